//! Child processes that may hang, ignore signals, flood their output and leave others behind: each runs in a process group
//! of its own, with a limit, and the whole group is gone when it has ended.
//!
//! Output goes to files, never through pipes: a process that outlives its parent would keep a pipe open for ever.

use anyhow::{Context, Result, anyhow, bail};
#[cfg(windows)]
use process_wrap::std::JobObject;
#[cfg(unix)]
use process_wrap::std::ProcessGroup;
use process_wrap::std::{ChildWrapper, CommandWrap};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often a running child is looked at, after shorter pauses at its start.
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// How long a killed process may take to go; one that waits inside a driver may never do so.
const LONGEST_DEATH: Duration = Duration::from_secs(30);
/// How long the rest of a group may take: those that nobody reaps stay for ever.
const LONGEST_DEATH_OF_REST: Duration = Duration::from_secs(2);

/// Tells running children to end; clones are one flag.
#[derive(Clone, Debug, Default)]
pub struct Interruption(Arc<AtomicBool>);

impl Interruption {
    /// Sets the flag, for good.
    pub fn interrupt(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// When and how a child is ended that does not end by itself.
#[derive(Clone, Debug)]
pub struct Supervision {
    /// Time from its start.
    pub limit: Duration,
    /// Time between asking it to end (SIGTERM) and killing it (SIGKILL); with none it is killed at once.
    pub grace: Duration,
    /// Ends it before its time.
    pub interruption: Interruption,
}

/// What a child gets on standard input.
#[derive(Clone, Debug)]
pub enum Input {
    /// It is at its end.
    Nothing,
    /// These bytes; a child need not read them.
    Bytes(Vec<u8>),
    /// Nothing, but it stays open until the child has ended, or this process has, whatever ended it.
    HeldOpen,
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// By itself, with this code.
    Exited(i32),
    /// By a signal that did not come from here.
    Signal(i32),
    /// It was killed at the limit.
    TimedOut,
    /// It was killed because of an [`Interruption`].
    Interrupted,
}

/// What is said of a child: it `ended with code 1`.
impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(code) => write!(f, "ended with code {code}"),
            Self::Signal(signal) => write!(f, "was ended by signal {signal}"),
            Self::TimedOut => f.write_str("did not end in time"),
            Self::Interrupted => f.write_str("was interrupted"),
        }
    }
}

/// The end of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// How it came.
    pub how: How,
    /// How long the child was there.
    pub wall: Duration,
    /// Processes that the kernel killed meanwhile for lack of memory, on the whole machine.
    pub oom_kills: u64,
}

/// A child that runs, so that it is found again by another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its process group; the process that leads it has the same number.
    pub group: u32,
    /// When it was started, in the kernel's ticks since it did; 0 where that is not known.
    pub started: u64,
}

/// What a short command printed.
#[derive(Clone, Debug)]
pub struct Output {
    /// How it ended.
    pub how: How,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
}

/// Runs `command` to its end, with both outputs going to a new file `log`, and ends what it leaves running in its group.
///
/// `on_spawn` is told of the process at once; if it fails the process is killed.
///
/// # Errors
/// If the log cannot be written, the command cannot be started, or `on_spawn` fails.
pub fn run(
    command: Command,
    input: Input,
    log: &Path,
    supervision: &Supervision,
    on_spawn: impl FnOnce(&ProcessId) -> Result<()>,
) -> Result<Ended> {
    let file = create_log(log)?;
    let output = file.try_clone().with_context(|| log.display().to_string())?;
    run_with(command, Streams { input, output, errors: file }, supervision, on_spawn)
}

/// What `command`, which is quick and asks nothing, prints. What it leaves running goes on.
///
/// # Errors
/// If it cannot be started, or takes longer than `limit`: then all of it is killed.
pub fn output(command: Command, limit: Duration) -> Result<Output> {
    let name = name(&command);
    let output = output_within(command, Input::Nothing, limit)?;
    if output.how == How::TimedOut {
        bail!("{name}: expected it to end within {limit:?}, it did not; hint: run it by hand, maybe it asks something");
    }
    Ok(output)
}

/// What `command` prints until it ends; all of it is killed if that takes longer than `limit`.
///
/// # Errors
/// If it cannot be started.
pub fn output_within(command: Command, input: Input, limit: Duration) -> Result<Output> {
    let name = name(&command);
    let unwritable =
        |error| anyhow!("{name}: no file for its output ({error}); hint: check that TMPDIR has free space");
    let (mut output, mut errors) =
        (tempfile::tempfile().map_err(unwritable)?, tempfile::tempfile().map_err(unwritable)?);
    let streams = Streams {
        input,
        output: output.try_clone().map_err(unwritable)?,
        errors: errors.try_clone().map_err(unwritable)?,
    };
    let supervision = Supervision { limit, grace: Duration::ZERO, interruption: Interruption::default() };
    let mut running = Running::start(command, streams)?;
    let how = running.wait(&supervision)?;
    let read = |file: &mut File| {
        let mut bytes = Vec::new();
        file.rewind().and_then(|()| file.read_to_end(&mut bytes)).map_err(unwritable)?;
        anyhow::Ok(bytes)
    };
    Ok(Output { how, stdout: read(&mut output)?, stderr: read(&mut errors)? })
}

/// Where a child reads and writes.
pub struct Streams {
    pub input: Input,
    pub output: File,
    pub errors: File,
}

/// An empty file for what a child says.
pub fn create_log(path: &Path) -> Result<File> {
    File::create(path).map_err(|error| {
        anyhow!("{}: cannot write the log ({error}); hint: check that there is free space", path.display())
    })
}

/// [`run`] with outputs of any kind.
pub fn run_with(
    command: Command,
    streams: Streams,
    supervision: &Supervision,
    on_spawn: impl FnOnce(&ProcessId) -> Result<()>,
) -> Result<Ended> {
    let killed_before = oom_kills();
    let mut running = Running::start(command, streams)?;
    let how = on_spawn(&running.id()).and_then(|()| running.wait(supervision));
    running.end_rest();
    let wall = running.started.elapsed();
    Ok(Ended { how: how?, wall, oom_kills: oom_kills().saturating_sub(killed_before) })
}

/// A child and its group.
struct Running {
    child: Box<dyn ChildWrapper>,
    /// Kept open as long as this is there.
    _input: Option<std::process::ChildStdin>,
    started: Instant,
}

impl Running {
    fn start(mut command: Command, streams: Streams) -> Result<Self> {
        let name = name(&command);
        command.stdin(if matches!(streams.input, Input::Nothing) { Stdio::null() } else { Stdio::piped() });
        command.stdout(streams.output).stderr(streams.errors);
        let mut command = CommandWrap::from(command);
        #[cfg(unix)]
        command.wrap(ProcessGroup::leader());
        #[cfg(windows)]
        command.wrap(JobObject);
        let mut child = command.spawn().map_err(|error| {
            anyhow!("{name}: cannot be started ({error}); hint: check that it is there and on PATH")
        })?;
        let mut input = child.stdin().take();
        if let Input::Bytes(bytes) = streams.input
            && let Some(mut input) = input.take()
        {
            // In a thread of its own, which ends with the child at the latest: a pipe takes no more than its reader.
            thread::spawn(move || input.write_all(&bytes));
        }
        Ok(Self { child, _input: input, started: Instant::now() })
    }

    fn id(&self) -> ProcessId {
        let group = self.child.id();
        ProcessId { group, started: Stat::read(group).map_or(0, |stat| stat.started) }
    }

    /// Waits for the child, and ends it and its group when its time is over.
    fn wait(&mut self, supervision: &Supervision) -> Result<How> {
        let mut pause = Duration::from_millis(1);
        let how = loop {
            if let Some(status) = self.exit_status()? {
                return Ok(how_by_itself(status));
            }
            let left = supervision.limit.saturating_sub(self.started.elapsed());
            if supervision.interruption.is_set() {
                break How::Interrupted;
            }
            if left.is_zero() {
                break How::TimedOut;
            }
            thread::sleep(pause.min(left));
            pause = (2 * pause).min(LONGEST_PAUSE);
        };
        self.end(supervision.grace)?;
        Ok(how)
    }

    /// The child's status once it has ended. Asks for the child alone: a wait for the group would lose it where this process
    /// adopts what the child leaves, as the first process of a container does.
    fn exit_status(&mut self) -> Result<Option<ExitStatus>> {
        self.child.inner_mut().try_wait().context("a child process cannot be waited for; hint: this is a bug")
    }

    fn end(&mut self, grace: Duration) -> Result<()> {
        #[cfg(unix)]
        if !grace.is_zero() {
            // It may have ended just now.
            self.child.signal(SIGTERM).ok();
            if self.ends_within(grace)? {
                self.end_rest();
                return Ok(());
            }
        }
        self.child.start_kill().ok();
        if self.ends_within(LONGEST_DEATH)? {
            self.end_rest();
        } else {
            tracing::warn!(
                "process {} was killed and does not go; hint: it waits inside a driver, see the system's log (dmesg)",
                self.child.id()
            );
        }
        Ok(())
    }

    fn ends_within(&mut self, time: Duration) -> Result<bool> {
        let start = Instant::now();
        while self.exit_status()?.is_none() {
            if start.elapsed() >= time {
                return Ok(false);
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(true)
    }

    /// Kills what is left of the group, until there is nothing left to kill.
    fn end_rest(&mut self) {
        let start = Instant::now();
        while self.child.start_kill().is_ok() && start.elapsed() < LONGEST_DEATH_OF_REST {
            // A killed child is to be reaped here, the others by the system.
            self.exit_status().ok();
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[cfg(unix)]
const SIGTERM: i32 = 15;

#[cfg(unix)]
fn how_by_itself(status: ExitStatus) -> How {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (None, Some(signal)) => How::Signal(signal),
        (code, _) => How::Exited(code.unwrap_or_default()),
    }
}

#[cfg(not(unix))]
fn how_by_itself(status: ExitStatus) -> How {
    How::Exited(status.code().unwrap_or_default())
}

fn name(command: &Command) -> String {
    command.get_program().to_string_lossy().into_owned()
}

/// Kills a group that an earlier process left running; whether it was there. Where the kernel does not tell when a process
/// was started (all but Linux), none is touched.
pub fn kill_leftover(process: &ProcessId) -> bool {
    let is_there =
        || Stat::read(process.group).is_some_and(|stat| stat.started == process.started && stat.group == process.group);
    // The numbers 0 and 1 stand for this process's own group and for all processes.
    if process.group <= 1 || process.started == 0 || !is_there() {
        return false;
    }
    let start = Instant::now();
    while is_there() && kill_group(process.group) && start.elapsed() < LONGEST_DEATH_OF_REST {
        thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Whether there was something to kill.
#[cfg(unix)]
fn kill_group(group: u32) -> bool {
    unsafe extern "C" {
        /// C standard library.
        fn kill(process: i32, signal: i32) -> i32;
    }
    const SIGKILL: i32 = 9;
    // SAFETY: takes no memory.
    i32::try_from(group).is_ok_and(|group| unsafe { kill(-group, SIGKILL) } == 0)
}

#[cfg(not(unix))]
fn kill_group(_group: u32) -> bool {
    false
}

/// What Linux tells of a process (proc(5), `/proc/PID/stat`).
struct Stat {
    group: u32,
    started: u64,
}

impl Stat {
    fn read(process: u32) -> Option<Self> {
        Self::parse(&fs::read_to_string(format!("/proc/{process}/stat")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The second field is the program's name, in parentheses: it may hold spaces and parentheses of its own.
        let (_, fields) = text.rsplit_once(')')?;
        let field = |number: usize| fields.split_whitespace().nth(number - 3);
        Some(Self { group: field(5)?.parse().ok()?, started: field(22)?.parse().ok()? })
    }
}

/// Processes that the kernel has killed for lack of memory since it was started; 0 where it does not tell.
fn oom_kills() -> u64 {
    fs::read_to_string("/proc/vmstat").map_or(0, |counters| oom_kills_in(&counters))
}

fn oom_kills_in(counters: &str) -> u64 {
    counters.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use tempfile::TempDir;

    /// More than anything here takes on a busy machine.
    const LONG: Duration = Duration::from_secs(60);

    fn supervision(limit: Duration, grace: Duration) -> Supervision {
        Supervision { limit, grace, interruption: Interruption::default() }
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    /// How `script` ends, and its log.
    fn end_of(script: &str, input: Input, supervision: &Supervision) -> (Ended, String) {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let ended = run(shell(script), input, &log, supervision, |_| Ok(())).unwrap();
        (ended, String::from_utf8(fs::read(log).unwrap()).unwrap())
    }

    /// Whether the process whose number is in `file` still runs.
    fn is_running(folder: &TempDir, file: &str) -> bool {
        let number = fs::read_to_string(folder.path().join(file)).unwrap();
        let stat = fs::read_to_string(format!("/proc/{}/stat", number.trim()));
        stat.is_ok_and(|stat| !stat.rsplit_once(')').unwrap().1.starts_with(" Z"))
    }

    #[test]
    fn codes_and_signals_are_told_apart_and_both_outputs_are_logged() {
        let usual = supervision(LONG, Duration::ZERO);
        let (ended, log) = end_of("echo one; echo two >&2; exit 7", Input::Nothing, &usual);
        assert_eq!((ended.how, log.as_str()), (How::Exited(7), "one\ntwo\n"));
        assert_eq!(end_of("kill -SEGV $$", Input::Nothing, &usual).0.how, How::Signal(11));
        assert_eq!(end_of("kill -KILL $$", Input::Nothing, &usual).0.how, How::Signal(9));
    }

    #[test]
    fn a_child_that_hangs_is_killed_at_the_limit_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("cd '{}'; sleep 1000 & echo $! > other; wait", folder.path().display());
        let (ended, _) = end_of(&script, Input::Nothing, &supervision(Duration::from_millis(500), Duration::ZERO));
        assert_eq!(ended.how, How::TimedOut);
        assert!(ended.wall >= Duration::from_millis(500) && ended.wall < LONG, "{:?}", ended.wall);
        assert!(!is_running(&folder, "other"));
    }

    #[test]
    fn a_child_is_asked_to_end_first_if_there_is_time_and_killed_if_it_does_not() {
        let short = Duration::from_millis(300);
        let (ended, log) =
            end_of("trap 'echo asked; exit' TERM; sleep 1000 & wait", Input::Nothing, &supervision(short, LONG));
        assert_eq!((ended.how, log.as_str()), (How::TimedOut, "asked\n"));
        assert!(ended.wall < LONG);
        let (ended, log) =
            end_of("trap 'echo asked' TERM; while :; do sleep 0.05; done", Input::Nothing, &supervision(short, short));
        assert_eq!(ended.how, How::TimedOut);
        assert!(log.contains("asked\n") && ended.wall >= 2 * short, "{:?} {log}", ended.wall);
    }

    #[test]
    fn an_interruption_ends_a_child_before_its_time() {
        let usual = supervision(LONG, Duration::ZERO);
        let interruption = usual.interruption.clone();
        let folder = tempfile::tempdir().unwrap();
        let ended = run(shell("sleep 1000"), Input::Nothing, &folder.path().join("log"), &usual, |_| {
            interruption.interrupt();
            Ok(())
        });
        assert_eq!(ended.unwrap().how, How::Interrupted);
    }

    #[test]
    fn what_a_child_leaves_running_is_killed_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("cd '{}'; sleep 1000 & echo $! > left; exit 3", folder.path().display());
        let (ended, _) = end_of(&script, Input::Nothing, &supervision(LONG, Duration::ZERO));
        assert_eq!(ended.how, How::Exited(3));
        assert!(ended.wall < Duration::from_secs(30), "{:?}", ended.wall);
        assert!(!is_running(&folder, "left"));
    }

    #[test]
    fn a_child_may_write_much_and_read_nothing() {
        let bytes = Input::Bytes(vec![b'x'; 10_000_000]);
        let usual = supervision(LONG, Duration::ZERO);
        let (ended, log) = end_of("head -c 5000000 /dev/zero", bytes, &usual);
        assert_eq!((ended.how, log.len()), (How::Exited(0), 5_000_000));
    }

    #[test]
    fn a_child_reads_what_it_is_given_to_the_end() {
        let usual = supervision(LONG, Duration::ZERO);
        let (ended, log) = end_of("cat; echo end", Input::Bytes(b"all of it\n".to_vec()), &usual);
        assert_eq!((ended.how, log.as_str()), (How::Exited(0), "all of it\nend\n"));
        assert_eq!(end_of("cat; echo end", Input::Nothing, &usual).1, "end\n");
    }

    #[test]
    fn an_input_that_is_held_open_does_not_end_before_the_child() {
        let short = supervision(Duration::from_millis(500), Duration::ZERO);
        let (ended, log) = end_of("cat; echo closed", Input::HeldOpen, &short);
        assert_eq!((ended.how, log.as_str()), (How::TimedOut, ""));
    }

    #[test]
    fn a_child_that_nobody_could_write_down_does_not_go_on() {
        let folder = tempfile::tempdir().unwrap();
        let mut started = None;
        let usual = supervision(LONG, Duration::ZERO);
        let error = run(shell("sleep 1000"), Input::Nothing, &folder.path().join("log"), &usual, |process| {
            started = Some(*process);
            bail!("disk full")
        });
        assert_eq!(error.unwrap_err().to_string(), "disk full");
        assert!(Stat::read(started.unwrap().group).is_none());
    }

    #[test]
    fn what_cannot_be_started_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let usual = supervision(LONG, Duration::ZERO);
        let start =
            |log: &str| run(Command::new("./nosuch"), Input::Nothing, &folder.path().join(log), &usual, |_| Ok(()));
        let message = start("log").unwrap_err().to_string();
        assert!(message.starts_with("./nosuch: cannot be started (") && message.contains("; hint: "), "{message}");
        let message = start("no/log").unwrap_err().to_string();
        assert!(message.contains("no/log: cannot write the log"), "{message}");
    }

    #[test]
    fn a_leftover_is_killed_only_if_it_is_the_same_process() {
        let folder = tempfile::tempdir().unwrap();
        let script = format!("cd '{}'; sleep 1000 & echo $! > other; wait", folder.path().display());
        let ended =
            run(shell(&script), Input::Nothing, &folder.path().join("log"), &supervision(LONG, LONG), |process| {
                while fs::read_to_string(folder.path().join("other")).unwrap_or_default().is_empty() {
                    thread::sleep(Duration::from_millis(5));
                }
                // The same number, but of another process by now.
                assert!(!kill_leftover(&ProcessId { started: process.started + 1, ..*process }));
                assert!(is_running(&folder, "other"));
                let written = serde_json::to_string(process).unwrap();
                assert!(kill_leftover(&serde_json::from_str(&written).unwrap()));
                Ok(())
            });
        assert_eq!(ended.unwrap().how, How::Signal(9));
        assert!(!is_running(&folder, "other"));
        for group in [0, 1, u32::MAX] {
            let started = Stat::read(group.max(1)).map_or(1, |stat| stat.started);
            assert!(!kill_leftover(&ProcessId { group, started }));
        }
    }

    #[test]
    fn a_process_that_leads_no_group_is_no_leftover() {
        // This test's own process, as a damaged journal may name it.
        let own = Stat::read(std::process::id()).unwrap();
        assert!(own.started > 0);
        let group = if own.group == std::process::id() { 1 } else { std::process::id() };
        assert!(!kill_leftover(&ProcessId { group, started: own.started }));
    }

    #[test]
    fn a_name_with_parentheses_does_not_shift_the_fields() {
        let line = "7 (a) b (c) S 1 70 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 123456 1 1";
        let stat = Stat::parse(line).unwrap();
        assert_eq!((stat.group, stat.started), (70, 123_456));
        assert!(Stat::parse("7 (a) S 1").is_none());
    }

    #[test]
    fn a_short_command_gives_its_output_and_what_it_leaves_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let script =
            format!("cd '{}'; sleep 1000 & echo $! > left; echo out; echo err >&2; exit 1", folder.path().display());
        let Output { how, stdout, stderr } = output(shell(&script), LONG).unwrap();
        assert_eq!((how, &*stdout, &*stderr), (How::Exited(1), &b"out\n"[..], &b"err\n"[..]));
        assert!(is_running(&folder, "left"));
        let left: u32 = fs::read_to_string(folder.path().join("left")).unwrap().trim().parse().unwrap();
        assert!(kill_group(Stat::read(left).unwrap().group));
    }

    #[test]
    fn a_short_command_that_hangs_is_killed_and_named() {
        let message = output(shell("sleep 1000"), Duration::from_millis(200)).unwrap_err().to_string();
        assert!(
            message.starts_with("sh: expected it to end within 200ms") && message.contains("; hint: "),
            "{message}"
        );
    }

    #[test]
    fn the_kernels_counter_is_found_among_the_others() {
        assert_eq!(oom_kills_in("pgfault 7\noom_kill 3\noom_kill_disable 9\n"), 3);
        assert_eq!(oom_kills_in("pgfault 7\n"), 0);
    }
}
