//! Why a GPU cannot be used through libtorch: from what was observed to one of the usual causes, and what to do about it.

use std::fmt;

/// Who makes GPUs that libtorch computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// CUDA.
    Nvidia,
    /// ROCm.
    Amd,
}

/// A file through which programs reach a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// Whose GPU.
    pub maker: Maker,
    /// Such as `/dev/kfd`.
    pub path: String,
    /// Whether this user may read and write it.
    pub permitted: bool,
}

/// What can be seen of this machine's GPUs and of the libtorch that is linked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Whose GPUs the linked libtorch is for; none if it is for CPUs only.
    pub built_for: Option<Maker>,
    /// Whether its GPU part is in this process.
    pub is_loaded: bool,
    /// GPUs that it sees.
    pub gpus: usize,
    /// What it warned of while it looked.
    pub warnings: String,
    /// Device nodes, of any maker.
    pub nodes: Vec<DeviceNode>,
    /// Newest CUDA that NVIDIA's driver library can run, or why it cannot be asked; none on ROCm.
    pub driver: Option<Result<i32, String>>,
    /// CUDA that libtorch was built with; none on ROCm.
    pub toolkit: Option<i32>,
    /// Set variables that choose among GPUs.
    pub choosers: Vec<(String, String)>,
    /// Architectures of AMD GPUs by the kernel.
    pub architectures: Vec<String>,
    /// `HSA_OVERRIDE_GFX_VERSION`, which lets ROCm take a GPU for another.
    pub disguise: Option<String>,
}

impl Observed {
    /// Whether there is a GPU at all, usable or not.
    pub fn has_gpu(&self) -> bool {
        !self.nodes.is_empty()
    }
}

/// Why a GPU cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The linked libtorch is for CPUs only.
    NoGpuPart,
    /// The linked libtorch has a GPU part, which the linker dropped.
    NotLoaded,
    /// libtorch is for GPUs of one maker, the machine has those of another.
    OtherMaker { built_for: Maker, present: Maker },
    /// No device node: no GPU, or no kernel driver for it.
    NoDevice(Maker),
    /// A device node that this user may not use.
    NotPermitted { maker: Maker, path: String },
    /// No driver library beside the device node.
    NoDriverLibrary(String),
    /// The driver is older than libtorch needs.
    DriverTooOld { driver: i32, toolkit: i32 },
    /// A variable hides all GPUs.
    Hidden { variable: String, value: String },
    /// The driver seems to be well, and yet libtorch sees no GPU.
    Unseen { warnings: String, architectures: Vec<String>, disguise: Option<String> },
    /// There are GPUs, but none of this number.
    OutOfRange { gpus: usize, choosers: Vec<(String, String)> },
    /// The GPU has no bfloat16 instructions.
    NoBf16 { gpu: String },
    /// The first computation failed.
    CannotCompute { gpu: String, error: String, disguise: Option<String> },
}

/// Why a GPU whose number is beyond those that libtorch sees cannot be used.
pub fn diagnose(observed: &Observed) -> Cause {
    let Some(maker) = observed.built_for else { return Cause::NoGpuPart };
    if !observed.is_loaded {
        return Cause::NotLoaded;
    }
    if observed.gpus > 0 {
        return Cause::OutOfRange { gpus: observed.gpus, choosers: observed.choosers.clone() };
    }
    let (ours, others): (Vec<_>, Vec<_>) = observed.nodes.iter().partition(|node| node.maker == maker);
    if ours.is_empty() {
        return match others.first() {
            Some(other) => Cause::OtherMaker { built_for: maker, present: other.maker },
            None => Cause::NoDevice(maker),
        };
    }
    if let Some(node) = ours.iter().find(|node| !node.permitted) {
        return Cause::NotPermitted { maker, path: node.path.clone() };
    }
    if let Some(Err(error)) = &observed.driver {
        return Cause::NoDriverLibrary(error.clone());
    }
    // Within a major version of CUDA, older drivers run what was built with a newer toolkit.
    if let (Some(Ok(driver)), Some(toolkit)) = (&observed.driver, observed.toolkit)
        && driver / 1000 < toolkit / 1000
    {
        return Cause::DriverTooOld { driver: *driver, toolkit };
    }
    if let Some((variable, value)) = observed.choosers.first() {
        return Cause::Hidden { variable: variable.clone(), value: value.clone() };
    }
    Cause::Unseen {
        warnings: observed.warnings.clone(),
        architectures: observed.architectures.clone(),
        disguise: observed.disguise.clone(),
    }
}

impl fmt::Display for Maker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nvidia => "NVIDIA",
            Self::Amd => "AMD",
        })
    }
}

/// What was found, and a hint.
impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = |version: &i32| format!("{}.{}", version / 1000, version % 1000 / 10);
        let also = |disguise: &Option<String>| match disguise {
            Some(value) => format!(" (HSA_OVERRIDE_GFX_VERSION={value} is set: try without it)"),
            None => String::new(),
        };
        match self {
            Self::NoGpuPart => write!(
                f,
                "a libtorch for CPUs only in this program; hint: scripts/setup-libtorch gets the right one, then build again"
            ),
            Self::NotLoaded => write!(
                f,
                "that the GPU part of libtorch was not linked into this program; hint: run `cargo clean --release -p autoresearch` and build again"
            ),
            Self::OtherMaker { built_for, present } => write!(
                f,
                "a libtorch for {built_for} GPUs and a GPU of {present}; hint: scripts/setup-libtorch gets the right one, then build again"
            ),
            Self::NoDevice(Maker::Nvidia) => write!(
                f,
                "no GPU: there is no /dev/nvidia0; hint: install NVIDIA's driver (nvidia-smi must list the GPU), start a container with --gpus all"
            ),
            Self::NoDevice(Maker::Amd) => write!(
                f,
                "no GPU: there is no /dev/kfd; hint: load the kernel driver (modprobe amdgpu), start a container with --device /dev/kfd --device /dev/dri"
            ),
            Self::NotPermitted { maker: Maker::Amd, path } => write!(
                f,
                "no permission to use {path}; hint: join the groups that may (sudo usermod -aG render,video $USER) and log in again, start a container with --group-add render --group-add video"
            ),
            Self::NotPermitted { maker: Maker::Nvidia, path } => {
                write!(f, "no permission to use {path}; hint: this user must be able to read and write /dev/nvidia*")
            }
            Self::NoDriverLibrary(error) => write!(
                f,
                "a GPU, but no driver library ({error}); hint: install NVIDIA's driver whole, for containers its container toolkit (--gpus all)"
            ),
            Self::DriverTooOld { driver, toolkit } => write!(
                f,
                "a driver for CUDA {}, too old for this libtorch, which was built with CUDA {}; hint: update NVIDIA's driver, or build with a PyTorch for an older CUDA",
                version(driver),
                version(toolkit)
            ),
            Self::Hidden { variable, value } => {
                write!(
                    f,
                    "that {variable}='{value}' leaves no GPU to see; hint: unset {variable}, or name a GPU that is there"
                )
            }
            Self::Unseen { warnings, architectures, disguise } => {
                write!(f, "a GPU with its driver that libtorch does not see")?;
                if !architectures.is_empty() {
                    write!(f, ", of architecture {}", architectures.join(" and "))?;
                }
                if !warnings.is_empty() {
                    write!(f, ", and that it says: {warnings}")?;
                }
                write!(
                    f,
                    "; hint: this libtorch may not be made for this GPU or its driver{}; the system's log (dmesg) has the driver's complaints",
                    also(disguise)
                )
            }
            Self::OutOfRange { gpus, choosers } => {
                write!(f, "{gpus} in all; hint: they are numbered from 0, --device libtorch takes the first")?;
                choosers.iter().try_for_each(|(variable, value)| write!(f, ", {variable}='{value}' may hide others"))
            }
            Self::NoBf16 { gpu } => write!(
                f,
                "{gpu}, which has no bfloat16 instructions; hint: NVIDIA's GPUs have them from compute capability 8.0, AMD's from MI100 and Radeon RX 7000; --compute-type float32 does without them"
            ),
            Self::CannotCompute { gpu, error, disguise } => write!(
                f,
                "{gpu}, which fails at its first sum: {error}; hint: this libtorch may have no kernels for it{}, or other programs may have taken its memory",
                also(disguise)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(maker: Maker, path: &str, permitted: bool) -> DeviceNode {
        DeviceNode { maker, path: path.to_owned(), permitted }
    }

    /// All is well but that libtorch sees no GPU.
    fn nvidia() -> Observed {
        Observed {
            built_for: Some(Maker::Nvidia),
            is_loaded: true,
            gpus: 0,
            warnings: String::new(),
            nodes: vec![node(Maker::Nvidia, "/dev/nvidia0", true), node(Maker::Nvidia, "/dev/nvidiactl", true)],
            driver: Some(Ok(13_000)),
            toolkit: Some(13_000),
            choosers: vec![],
            architectures: vec![],
            disguise: None,
        }
    }

    fn amd() -> Observed {
        Observed {
            built_for: Some(Maker::Amd),
            nodes: vec![node(Maker::Amd, "/dev/kfd", true), node(Maker::Amd, "/dev/dri/renderD128", true)],
            driver: None,
            toolkit: None,
            architectures: vec!["gfx1151".to_owned()],
            ..nvidia()
        }
    }

    #[track_caller]
    fn assert_says(cause: &Cause, parts: &[&str]) {
        let message = cause.to_string();
        assert_eq!(message.matches("; hint: ").count(), 1, "{message}");
        for part in parts {
            assert!(message.contains(part), "expected {part:?} in {message}");
        }
    }

    #[test]
    fn a_libtorch_for_cpus_only_is_named_whatever_the_machine_has() {
        for observed in [nvidia(), amd()] {
            let cause = diagnose(&Observed { built_for: None, is_loaded: false, ..observed });
            assert_eq!(cause, Cause::NoGpuPart);
            assert_says(&cause, &["for CPUs only", "scripts/setup-libtorch"]);
        }
    }

    #[test]
    fn a_gpu_part_that_the_linker_dropped_is_named() {
        let cause = diagnose(&Observed { is_loaded: false, ..nvidia() });
        assert_eq!(cause, Cause::NotLoaded);
        assert_says(&cause, &["not linked", "cargo clean"]);
    }

    #[test]
    fn a_libtorch_for_the_other_maker_is_named() {
        let cause = diagnose(&Observed { nodes: amd().nodes, driver: Some(Err("none".to_owned())), ..nvidia() });
        assert_eq!(cause, Cause::OtherMaker { built_for: Maker::Nvidia, present: Maker::Amd });
        assert_says(&cause, &["for NVIDIA GPUs and a GPU of AMD"]);
        let cause = diagnose(&Observed { nodes: nvidia().nodes, ..amd() });
        assert_says(&cause, &["for AMD GPUs and a GPU of NVIDIA"]);
        // Both in one machine: the one that libtorch is for counts.
        let both = [nvidia().nodes, amd().nodes].concat();
        assert!(matches!(diagnose(&Observed { nodes: both, ..amd() }), Cause::Unseen { .. }));
    }

    #[test]
    fn a_missing_device_node_is_named() {
        let without = |observed: Observed| Observed { nodes: vec![], ..observed };
        assert!(!without(nvidia()).has_gpu() && nvidia().has_gpu());
        assert_says(&diagnose(&without(nvidia())), &["/dev/nvidia0", "nvidia-smi"]);
        assert_says(&diagnose(&without(amd())), &["/dev/kfd", "modprobe amdgpu"]);
        // A variable that hides GPUs is not what is wrong then.
        let hidden =
            Observed { choosers: vec![("CUDA_VISIBLE_DEVICES".to_owned(), String::new())], ..without(nvidia()) };
        assert_eq!(diagnose(&hidden), Cause::NoDevice(Maker::Nvidia));
    }

    #[test]
    fn a_node_without_permission_is_named_with_the_groups() {
        for path in ["/dev/kfd", "/dev/dri/renderD128"] {
            let mut observed = amd();
            observed.nodes.iter_mut().filter(|node| node.path == path).for_each(|node| node.permitted = false);
            assert_says(&diagnose(&observed), &[path, "permission", "render,video", "usermod"]);
        }
        let nodes = vec![node(Maker::Nvidia, "/dev/nvidia0", false)];
        // Without permission the driver's library does not work either: the permission is the cause.
        let driver = Some(Err("error 999".to_owned()));
        assert_says(&diagnose(&Observed { nodes, driver, ..nvidia() }), &["/dev/nvidia0", "permission"]);
    }

    #[test]
    fn a_driver_that_is_missing_or_too_old_is_named_with_versions() {
        let missing = Observed { driver: Some(Err("libcuda.so.1: no such file".to_owned())), ..nvidia() };
        assert_says(&diagnose(&missing), &["no driver library (libcuda.so.1: no such file)", "container toolkit"]);
        let old = Observed { driver: Some(Ok(12_040)), ..nvidia() };
        assert_eq!(diagnose(&old), Cause::DriverTooOld { driver: 12_040, toolkit: 13_000 });
        assert_says(&diagnose(&old), &["CUDA 12.4", "CUDA 13.0", "update"]);
        let same_major = Observed { driver: Some(Ok(12_040)), toolkit: Some(12_080), ..nvidia() };
        assert!(matches!(diagnose(&same_major), Cause::Unseen { .. }));
    }

    #[test]
    fn a_variable_that_hides_the_gpus_is_named_with_its_value() {
        for (variable, value, observed) in [
            ("CUDA_VISIBLE_DEVICES", "", nvidia()),
            ("HIP_VISIBLE_DEVICES", "7", amd()),
            ("ROCR_VISIBLE_DEVICES", "-1", amd()),
        ] {
            let choosers = vec![(variable.to_owned(), value.to_owned())];
            let cause = diagnose(&Observed { choosers, ..observed });
            assert_says(&cause, &[&format!("{variable}='{value}'"), "unset"]);
        }
    }

    #[test]
    fn what_libtorch_and_the_kernel_say_is_told_where_the_cause_is_unknown() {
        let warnings = "CUDA initialization: CUDA unknown error".to_owned();
        assert_says(&diagnose(&Observed { warnings, ..nvidia() }), &["CUDA unknown error", "dmesg"]);
        let disguised = Observed { disguise: Some("10.3.0".to_owned()), ..amd() };
        assert_says(&diagnose(&disguised), &["gfx1151", "HSA_OVERRIDE_GFX_VERSION=10.3.0"]);
        assert!(!diagnose(&amd()).to_string().contains("HSA_OVERRIDE"));
    }

    #[test]
    fn a_number_beyond_the_last_gpu_is_told_how_many_there_are() {
        let two = Observed { gpus: 2, ..nvidia() };
        assert_says(&diagnose(&two), &["2 in all", "numbered from 0"]);
        let chosen =
            Observed { choosers: vec![("CUDA_VISIBLE_DEVICES".to_owned(), "1".to_owned())], gpus: 1, ..nvidia() };
        assert_says(&diagnose(&chosen), &["1 in all", "CUDA_VISIBLE_DEVICES='1' may hide others"]);
    }

    #[test]
    fn gpus_that_cannot_compute_are_named() {
        assert_says(&Cause::NoBf16 { gpu: "Tesla T4 (sm_75)".to_owned() }, &["Tesla T4 (sm_75)", "bfloat16", "8.0"]);
        let failing = Cause::CannotCompute {
            gpu: "AMD Radeon 8060S".to_owned(),
            error: "invalid device function".to_owned(),
            disguise: Some("11.0.0".to_owned()),
        };
        assert_says(&failing, &["AMD Radeon 8060S", "invalid device function", "HSA_OVERRIDE_GFX_VERSION=11.0.0"]);
    }
}
