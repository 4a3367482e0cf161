//! The environment that ROCm needs. libtorch reads it when it is loaded, which is before `main`: where it is not right the
//! program starts itself again, once, with a corrected one.

use anyhow::{Result, anyhow};
use std::ffi::OsString;
use std::fmt;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Holds the id of the process that has started itself again. The id stays the same then, and a child has another: it
/// looks at its own environment.
const MARKER: &str = "AUTORESEARCH_RESTARTED";

/// With `backend:malloc` in any of them libtorch crashes on ROCm, which reads all three (c10/cuda/CUDAAllocatorConfig.h).
const HARMFUL: [&str; 3] = ["PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"];

/// Without it attention on consumer GPUs takes kernels that are up to 19 times slower.
const NEEDED: (&str, &str) = ("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "1");

/// What to do with a variable of the environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Take it out.
    Remove(&'static str),
    /// Give it a value.
    Set(&'static str, &'static str),
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Remove(name) => write!(f, "unset {name}"),
            Self::Set(name, value) => write!(f, "export {name}={value}"),
        }
    }
}

/// Whether this program computes on AMD GPUs and the kernel's driver for them is there.
pub fn is_amd() -> bool {
    cfg!(libtorch_gpu = "hip") && Path::new("/dev/kfd").exists()
}

/// What has to change in the environment in which `value` looks up variables, for the process `id`.
pub fn changes(value: impl Fn(&str) -> Option<OsString>, is_amd: bool, id: u32) -> Vec<Change> {
    let was_restarted = value(MARKER).is_some_and(|marker| marker == *id.to_string());
    if !is_amd || was_restarted {
        return Vec::new();
    }
    let mut changes: Vec<Change> =
        HARMFUL.into_iter().filter(|name| value(name).is_some()).map(Change::Remove).collect();
    let (name, needed) = NEEDED;
    if value(name).is_none_or(|found| found != needed) {
        changes.push(Change::Set(name, needed));
    }
    changes
}

/// Starts this program again, with the same arguments, if its environment has to change; says in a line what changes.
///
/// To be called first thing in `main`: it returns only where nothing has to change.
///
/// # Errors
/// If the program cannot be started again.
pub fn correct(is_amd: bool) -> Result<()> {
    let id = std::process::id();
    let changes = changes(|name| std::env::var_os(name), is_amd, id);
    if changes.is_empty() {
        return Ok(());
    }
    let mut arguments = std::env::args_os();
    // The file itself, even if another one has its name by now.
    let mut program = Command::new("/proc/self/exe");
    program.arg0(arguments.next().unwrap_or_default()).args(arguments).env(MARKER, id.to_string());
    for change in &changes {
        match *change {
            Change::Remove(name) => program.env_remove(name),
            Change::Set(name, value) => program.env(name, value),
        };
    }
    let changes = changes.iter().map(Change::to_string).collect::<Vec<_>>().join("; ");
    // The log does not run yet; whoever reads standard error may be gone.
    writeln!(std::io::stderr(), "environment corrected for ROCm: {changes}").ok();
    let error = program.exec();
    Err(anyhow!("the program cannot start again with the environment that ROCm needs ({error}); hint: {changes}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::process::Stdio;

    fn changes_in(environment: &[(&str, &str)], is_amd: bool) -> Vec<Change> {
        let environment: BTreeMap<&str, &str> = environment.iter().copied().collect();
        changes(|name| environment.get(name).map(OsString::from), is_amd, 42)
    }

    const SET: Change = Change::Set(NEEDED.0, NEEDED.1);

    #[test]
    fn on_amd_allocator_settings_go_and_the_fast_attention_comes() {
        assert_eq!(changes_in(&[("PATH", "/bin")], true), [SET]);
        assert_eq!(changes_in(&[(NEEDED.0, "0")], true), [SET]);
        for name in HARMFUL {
            let settings = [(name, "backend:malloc"), ("PYTORCH_NO_HIP_MEMORY_CACHING", "1")];
            assert_eq!(changes_in(&settings, true), [Change::Remove(name), SET]);
            assert_eq!(changes_in(&[(name, ""), NEEDED], true), [Change::Remove(name)]);
        }
    }

    #[test]
    fn nothing_changes_where_all_is_well_or_the_gpu_is_not_amds() {
        assert_eq!(changes_in(&[NEEDED, ("HSA_OVERRIDE_GFX_VERSION", "11.0.0")], true), []);
        assert_eq!(changes_in(&[("PYTORCH_ALLOC_CONF", "backend:malloc")], false), []);
    }

    #[test]
    fn a_process_starts_itself_again_once_and_its_children_look_for_themselves() {
        assert_eq!(changes_in(&[(MARKER, "42"), ("PYTORCH_ALLOC_CONF", "x")], true), []);
        assert_eq!(changes_in(&[(MARKER, "41")], true), [SET]);
        assert_eq!(changes_in(&[(MARKER, "")], true), [SET]);
    }

    /// Makes the test below a child that corrects its environment and shows it.
    const CHILD: &str = "AUTORESEARCH_TEST_ENVIRONMENT_CHILD";

    #[test]
    fn a_process_is_started_again_with_the_corrected_environment_and_the_same_arguments() {
        let name = "device::environment::tests::\
                    a_process_is_started_again_with_the_corrected_environment_and_the_same_arguments";
        if std::env::var_os(CHILD).is_some() {
            correct(true).unwrap();
            for (name, value) in std::env::vars_os() {
                println!("\nvariable {name:?}={value:?}");
            }
            println!("\narguments {:?}", std::env::args_os().collect::<Vec<_>>());
            println!("\nprocess {}", std::process::id());
            return;
        }
        let kept = [("HSA_OVERRIDE_GFX_VERSION", "11.0.0"), ("ODD", "a \"b\"\n=c"), ("EMPTY", ""), (CHILD, "1")];
        let mut command = Command::new(std::env::current_exe().unwrap());
        let arguments = [name, "--exact", "--nocapture", "--test-threads=1", "--skip", "with \"two\"  words"];
        command.args(arguments).arg0("another name").env_clear().envs(kept);
        command.envs(HARMFUL.map(|name| (name, "backend:malloc"))).env(NEEDED.0, "0");
        // Where libraries are found may depend on it.
        let libraries = std::env::var_os("LD_LIBRARY_PATH").map(|value| ("LD_LIBRARY_PATH", value));
        command.envs(libraries.clone());
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let id = child.id().to_string();
        let output = child.wait_with_output().unwrap();
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{stdout}{stderr}");

        let mut expected: Vec<(OsString, OsString)> = kept.map(|(name, value)| (name.into(), value.into())).to_vec();
        expected.extend([(NEEDED.0, NEEDED.1), (MARKER, &id)].map(|(name, value)| (name.into(), value.into())));
        expected.extend(libraries.map(|(name, value)| (name.into(), value)));
        let mut expected: Vec<String> = expected.iter().map(|(name, value)| format!("{name:?}={value:?}")).collect();
        expected.sort();
        let lines = |start: &str| stdout.lines().filter_map(|line| line.strip_prefix(start)).collect::<Vec<_>>();
        let mut found = lines("variable ");
        found.sort();
        assert_eq!(found, expected);
        let arguments: Vec<&str> = ["another name"].into_iter().chain(arguments).collect();
        assert_eq!(lines("arguments "), [format!("{arguments:?}")]);
        // The same process, started again once.
        assert_eq!(lines("process "), [id]);
        let said: Vec<&str> = stderr.lines().filter(|line| line.starts_with("environment corrected")).collect();
        let line = "environment corrected for ROCm: unset PYTORCH_HIP_ALLOC_CONF; unset PYTORCH_ALLOC_CONF; \
                    unset PYTORCH_CUDA_ALLOC_CONF; export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1";
        assert_eq!(said, [line]);
    }
}
