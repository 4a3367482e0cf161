//! What kind of end a training came to, from what it wrote, how its process ended, and its log.

use super::excerpt::{first_lines, last_lines, read_end, telling_part};
use crate::process::{Ended, How};
use crate::run::{Failure, FailureKind, Phase, Phases, Summary};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// The kinds of ends without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CrashKind {
    /// The edited program does not compile.
    Build,
    /// Memory ran out before the evaluation.
    OomTrain,
    /// Memory ran out in the evaluation.
    OomEval,
    /// The loss or the metric is no number.
    Nan,
    /// The loss is too large to be of use.
    Exploding,
    /// It took longer than its limit.
    Timeout,
    /// The program panicked.
    Panic,
    /// The data cannot be used.
    Data,
    /// The model fails the evaluator's checks.
    Dishonest,
    /// Someone else ended it.
    Killed,
    /// All else.
    Error,
}

impl fmt::Display for CrashKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // As it is written in files.
        self.serialize(f)
    }
}

/// An end without a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Crash {
    /// Its kind.
    pub kind: CrashKind,
    /// One line that says what happened.
    pub message: String,
    /// The lines of the log that tell most, see [`super::excerpt`].
    pub excerpt: String,
}

/// The result of the training that ended so, or the kind of its crash.
///
/// `run` is its folder, which [`crate::run::clear`] must have emptied before it was started: files of an earlier one would
/// be taken for its own. One that was interrupted counts as killed.
///
/// # Errors
/// [`Crash`] unless the training ended with code 0 and a whole summary.
pub fn classify(run: &Path, ended: &Ended, log: &Path) -> Result<Summary, Crash> {
    let log = read_end(log);
    let telling = telling_part(&log);
    let crash = |kind, message: &str| {
        let excerpt = if telling.len() < log.len() { first_lines(telling) } else { last_lines(&log) };
        Crash { kind, message: first_lines(&message.replace('\n', " ")), excerpt }
    };
    if ended.how == How::Exited(0) {
        return match Summary::read(run) {
            Ok(Some(summary)) if summary.val_bpb.is_finite() => Ok(summary),
            Ok(Some(summary)) => {
                Err(crash(CrashKind::Nan, &format!("val_bpb is {}, expected a number", summary.val_bpb)))
            }
            Ok(None) => Err(crash(CrashKind::Error, "the training ended with code 0 and without a summary")),
            Err(error) => Err(crash(CrashKind::Error, &format!("{error:#}"))),
        };
    }
    // A damaged one is as good as none: it is written just before the end.
    let failure = Failure::read(run).unwrap_or_default();
    let phase = Phases::read(run).unwrap_or_default().unwrap_or_default().phase;
    let message = match &failure {
        Some(failure) => failure.message.clone(),
        None => describe(ended),
    };
    let out_of_memory = match phase {
        Phase::Evaluation | Phase::Done => CrashKind::OomEval,
        Phase::StartUp | Phase::Training => CrashKind::OomTrain,
    };
    let kind = match (failure.map(|failure| failure.kind), ended.how) {
        (Some(FailureKind::Nan), _) => CrashKind::Nan,
        (Some(FailureKind::Exploding), _) => CrashKind::Exploding,
        (Some(FailureKind::Data), _) => CrashKind::Data,
        (Some(FailureKind::Dishonest), _) => CrashKind::Dishonest,
        (Some(FailureKind::Timeout), _) | (_, How::TimedOut) => CrashKind::Timeout,
        (_, How::Interrupted) => CrashKind::Killed,
        // A panic as well as an error may come from an allocation that failed.
        _ if speaks_of_memory(&message) || speaks_of_memory(telling) => out_of_memory,
        (Some(FailureKind::Panic), _) | (None, How::Exited(PANICKED)) => CrashKind::Panic,
        (_, How::Signal(SIGKILL)) if ended.oom_kills > 0 => out_of_memory,
        (_, How::Signal(signal)) if FROM_OUTSIDE.contains(&signal) => CrashKind::Killed,
        _ => CrashKind::Error,
    };
    Err(crash(kind, &message))
}

/// The code with which Rust programs end after a panic.
const PANICKED: i32 = 101;
const SIGKILL: i32 = 9;
/// SIGHUP, SIGINT, SIGQUIT, SIGKILL and SIGTERM: no fault of a program brings them.
const FROM_OUTSIDE: [i32; 5] = [1, 2, 3, SIGKILL, 15];

fn describe(ended: &Ended) -> String {
    match ended.how {
        How::Signal(signal) if signal == SIGKILL && ended.oom_kills > 0 => {
            "the training was killed (signal 9) while the kernel ran out of memory".to_owned()
        }
        how @ How::Signal(signal) => format!("the training {how}{}", signal_name(signal)),
        How::TimedOut => format!("the training was killed after {:.0} s, its limit", ended.wall.as_secs_f64()),
        how => format!("the training {how}"),
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        1 => " (SIGHUP)",
        2 => " (SIGINT)",
        3 => " (SIGQUIT)",
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV)",
        13 => " (SIGPIPE)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

/// Whether `text` is what libtorch, a GPU's driver, wgpu, Rust or C++ say when an allocation fails.
fn speaks_of_memory(text: &str) -> bool {
    let phrases = [
        // libtorch on CUDA and HIP, and wgpu.
        "out of memory",
        "outofmemory",
        "cudaerrormemoryallocation",
        "_alloc_failed",
        // libtorch on a CPU, and the C library.
        "can't allocate memory",
        "cannot allocate memory",
        // wgpu and Vulkan.
        "not enough memory",
        "can't allocate buffer",
        "error_out_of_device_memory",
        "error_out_of_host_memory",
        // Rust and C++.
        "memory allocation of ",
        "std::bad_alloc",
    ];
    let text = text.to_lowercase();
    phrases.iter().any(|phrase| text.contains(phrase))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;
    use std::time::Duration;
    use tempfile::TempDir;

    /// What a training left.
    struct Left {
        folder: TempDir,
        ended: Ended,
    }

    impl Left {
        fn new(how: How) -> Self {
            let ended = Ended { how, wall: Duration::from_secs(900), oom_kills: 0 };
            Self { folder: tempfile::tempdir().unwrap(), ended }
        }

        fn with(self, file: &str, content: impl fmt::Display) -> Self {
            fs::write(self.folder.path().join(file), content.to_string()).unwrap();
            self
        }

        fn log(self, log: &str) -> Self {
            self.with("run.log", log)
        }

        fn phase(self, phase: &str) -> Self {
            self.with("phase.json", json!({"phase": phase, "began": {"start_up": 0.0}}))
        }

        fn failure(self, kind: &str, message: &str) -> Self {
            self.with("failure.json", json!({"kind": kind, "phase": "training", "message": message}))
        }

        fn summary(self, val_bpb: Option<f64>) -> Self {
            let mut summary = serde_json::to_value(crate::run::summary()).unwrap();
            summary["val_bpb"] = val_bpb.into();
            self.with("summary.json", summary)
        }

        fn classify(&self) -> Result<Summary, Crash> {
            classify(self.folder.path(), &self.ended, &self.folder.path().join("run.log"))
        }

        #[track_caller]
        fn is(&self, kind: CrashKind) -> Crash {
            let crash = self.classify().unwrap_err();
            assert_eq!(crash.kind, kind, "{crash:?}");
            assert!(!crash.message.is_empty() && !crash.message.contains('\n'), "{crash:?}");
            crash
        }
    }

    const ABORTED: How = How::Signal(6);
    const PANIC: How = How::Exited(PANICKED);
    const FAILED: How = How::Exited(1);

    #[test]
    fn only_code_0_with_a_whole_summary_and_a_number_is_a_result() {
        let summary = Left::new(How::Exited(0)).summary(Some(0.8)).classify().unwrap();
        assert_eq!((summary.val_bpb, summary.num_steps, summary.mfu_percent), (0.8, 953, None));
        Left::new(How::Exited(0)).is(CrashKind::Error);
        Left::new(How::Exited(0)).with("summary.json", "{\"val_bpb\": 0.8").is(CrashKind::Error);
        Left::new(How::Exited(0)).with("summary.json", "{\"val_bpb\": 0.8}").is(CrashKind::Error);
        Left::new(How::Exited(0)).summary(None).is(CrashKind::Nan);
        Left::new(FAILED).summary(Some(0.8)).is(CrashKind::Error);
    }

    #[test]
    fn what_the_training_says_of_itself_comes_first() {
        let kinds = [
            ("nan", CrashKind::Nan),
            ("exploding", CrashKind::Exploding),
            ("data", CrashKind::Data),
            ("dishonest", CrashKind::Dishonest),
            ("timeout", CrashKind::Timeout),
            ("error", CrashKind::Error),
        ];
        for (name, kind) in kinds {
            let crash = Left::new(FAILED).failure(name, "FAIL: the\nloss").log("step 1\nFAIL: the loss\n").is(kind);
            assert_eq!((&*crash.message, &*crash.excerpt), ("FAIL: the loss", "FAIL: the loss"));
        }
        Left::new(PANIC).failure("panic", "panicked at src/model.rs:1:2: no").is(CrashKind::Panic);
        // It said so, and then hung on its way out.
        Left::new(How::TimedOut).failure("nan", "FAIL: the loss is NaN").is(CrashKind::Nan);
        Left::new(PANIC).with("failure.json", "{\"kind\": \"na").is(CrashKind::Panic);
    }

    #[test]
    fn memory_that_ran_out_is_known_by_the_words_of_each_library() {
        let texts = [
            (
                PANIC,
                "thread 'main' panicked at burn-tch-0.22.1/src/tensor.rs:1:2:\ncalled `Result::unwrap()` on an `Err` value: Torch(\"CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB\\nException raised from malloc\")\n",
            ),
            (
                PANIC,
                "thread 'main' (9) panicked at src/tensor.rs:1:2:\nTorch(\"HIP out of memory. Tried to allocate 2.00 GiB.\")\n",
            ),
            (FAILED, "error: the device failed at step 3 (HIP error: hipErrorOutOfMemory); hint: its driver\n"),
            (
                FAILED,
                "error: the device failed at step 3 (CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`)\n",
            ),
            (PANIC, "thread 'main' panicked at src/runtime.rs:1:2:\nwgpu error: Out of Memory\n"),
            (
                PANIC,
                "thread 'main' panicked at src/runtime.rs:1:2:\nIn Device::create_buffer\n  Not enough memory left.\n",
            ),
            (
                PANIC,
                "thread 'main' panicked at tch.rs:1:2:\n[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\n",
            ),
            (ABORTED, "step 1\nmemory allocation of 1099511627776 bytes failed\n"),
            (ABORTED, "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"),
            (ABORTED, "terminate called after throwing an instance of 'c10::OutOfMemoryError'\n"),
        ];
        for (how, log) in texts {
            Left::new(how).log(log).phase("training").is(CrashKind::OomTrain);
            Left::new(how).log(log).phase("start_up").is(CrashKind::OomTrain);
            Left::new(how).log(log).phase("evaluation").is(CrashKind::OomEval);
            Left::new(how).log(log).is(CrashKind::OomTrain);
        }
        Left::new(PANIC)
            .failure("panic", "panicked: Torch(\"CUDA out of memory.\")")
            .phase("evaluation")
            .is(CrashKind::OomEval);
        // A GPU that was passed over at the start has nothing to do with the end.
        let warned = " WARN passed over: --device libtorch: CUDA error: out of memory\nstep 1\nthread 'main' panicked at src/model.rs:1:2:\nx\n";
        Left::new(PANIC).log(warned).is(CrashKind::Panic);
    }

    #[test]
    fn a_kill_is_for_lack_of_memory_if_the_kernel_counted_one() {
        let mut killed = Left::new(How::Signal(SIGKILL)).log("step 1\n").phase("evaluation");
        let crash = killed.is(CrashKind::Killed);
        assert_eq!(crash.message, "the training was ended by signal 9 (SIGKILL)");
        killed.ended.oom_kills = 1;
        assert!(killed.is(CrashKind::OomEval).message.contains("out of memory"));
        let mut other = Left::new(How::Signal(15));
        other.ended.oom_kills = 1;
        other.is(CrashKind::Killed);
    }

    #[test]
    fn ends_from_outside_are_told_from_the_programs_own() {
        let crash = Left::new(How::TimedOut).log("step 1\n").is(CrashKind::Timeout);
        assert_eq!(crash.message, "the training was killed after 900 s, its limit");
        Left::new(How::Interrupted).is(CrashKind::Killed);
        for signal in FROM_OUTSIDE {
            Left::new(How::Signal(signal)).is(CrashKind::Killed);
        }
        for signal in [4, 6, 7, 8, 11] {
            assert!(Left::new(How::Signal(signal)).is(CrashKind::Error).message.contains(" (SIG"));
        }
        Left::new(PANIC).log("thread 'main' panicked at src/model.rs:1:2:\nindex\n").is(CrashKind::Panic);
        Left::new(How::Exited(127)).log("autoresearch: error while loading shared libraries\n").is(CrashKind::Error);
    }

    #[test]
    fn without_a_telling_line_the_last_ones_are_shown() {
        let log: String = (0..100).map(|step| format!("step {step}\n")).collect();
        let excerpt = Left::new(How::Signal(11)).log(&log).is(CrashKind::Error).excerpt;
        assert!(excerpt.starts_with("step 80\n") && excerpt.ends_with("\nstep 99"), "{excerpt}");
        assert_eq!(Left::new(How::Signal(11)).is(CrashKind::Error).excerpt, "");
    }

    #[test]
    fn names_are_the_same_in_files_and_in_messages() {
        let kinds = [CrashKind::OomTrain, CrashKind::OomEval, CrashKind::Nan, CrashKind::Dishonest, CrashKind::Build];
        assert_eq!(kinds.map(|kind| kind.to_string()), ["oom-train", "oom-eval", "nan", "dishonest", "build"]);
        assert_eq!(serde_json::to_value(kinds).unwrap(), json!(["oom-train", "oom-eval", "nan", "dishonest", "build"]));
    }
}
