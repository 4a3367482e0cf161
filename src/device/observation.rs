//! Looks at this machine for what [`super::diagnosis`] goes by.

use super::amd_sysfs::{self, KFD_NODES};
use super::diagnosis::{DeviceNode, Maker, Observed};
use super::driver::Cuda;
use super::libtorch;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Variables that choose among a maker's GPUs; HIP heeds CUDA's too.
fn choosers(maker: Maker) -> &'static [&'static str] {
    match maker {
        Maker::Nvidia => &["CUDA_VISIBLE_DEVICES"],
        Maker::Amd => &["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES"],
    }
}

/// Everything that tells why libtorch sees `gpus` GPUs, while it warned of `warnings`.
pub fn observe(gpus: usize, warnings: String) -> Observed {
    let (built_for, is_loaded) = (libtorch::built_for(), libtorch::gpu_part_is_loaded());
    let is_nvidia = built_for == Some(Maker::Nvidia);
    let variable = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let names = built_for.map(choosers).unwrap_or_default();
    Observed {
        built_for,
        is_loaded,
        gpus,
        warnings,
        nodes: device_nodes(Path::new("/dev")),
        driver: is_nvidia.then(|| Cuda::load()?.version()).map(|version| version.map_err(|error| format!("{error:#}"))),
        toolkit: (is_nvidia && is_loaded).then(|| tch::utils::version_cudart() as i32),
        choosers: names.iter().filter_map(|name| Some(((*name).to_owned(), variable(name)?))).collect(),
        architectures: if built_for == Some(Maker::Amd) {
            amd_sysfs::architectures(Path::new(KFD_NODES))
        } else {
            Vec::new()
        },
        disguise: variable("HSA_OVERRIDE_GFX_VERSION"),
    }
}

/// Device nodes of GPUs in `dev`, which is `/dev`.
fn device_nodes(dev: &Path) -> Vec<DeviceNode> {
    let starting_with = |folder: &Path, start: &str| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        let numbered = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.and_then(|name| name.strip_prefix(start)).is_some_and(|number| number.parse::<u32>().is_ok())
        };
        paths.retain(numbered);
        paths.sort();
        paths
    };
    let node = |maker, path: &PathBuf| DeviceNode { maker, path: path.display().to_string(), permitted: may_use(path) };
    let mut nodes: Vec<DeviceNode> =
        starting_with(dev, "nvidia").iter().map(|path| node(Maker::Nvidia, path)).collect();
    // Graphics of other makers have render nodes too, only AMD's have this one.
    let kfd = dev.join("kfd");
    if kfd.exists() {
        nodes.push(node(Maker::Amd, &kfd));
        nodes.extend(starting_with(&dev.join("dri"), "renderD").iter().map(|path| node(Maker::Amd, path)));
    }
    nodes
}

/// Whether this user may read and write the file at `path`.
fn may_use(path: &Path) -> bool {
    // Other errors, such as that the device is busy, are not about permission.
    let opened = File::options().read(true).write(true).open(path);
    !opened.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(dev: &Path) -> Vec<(Maker, String)> {
        let name =
            |node: DeviceNode| (node.maker, Path::new(&node.path).file_name().unwrap().to_str().unwrap().to_owned());
        device_nodes(dev).into_iter().map(name).collect()
    }

    #[test]
    fn gpus_are_told_from_other_graphics_by_their_device_nodes() {
        let dev = tempfile::tempdir().unwrap();
        let touch = |name: &str| fs::write(dev.path().join(name), "").unwrap();
        fs::create_dir(dev.path().join("dri")).unwrap();
        ["dri/renderD128", "dri/card0", "nvidiactl", "nvidia-uvm"].into_iter().for_each(touch);
        assert_eq!(found(dev.path()), []);
        touch("nvidia0");
        assert_eq!(found(dev.path()), [(Maker::Nvidia, "nvidia0".to_owned())]);
        touch("kfd");
        let amd = ["kfd", "renderD128"].map(|name| (Maker::Amd, name.to_owned()));
        assert_eq!(found(dev.path())[1..], amd);
        assert_eq!(found(&dev.path().join("nowhere")), []);
    }

    #[test]
    fn only_a_refusal_counts_as_no_permission() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(may_use(&file));
        // A folder cannot be opened for writing, whoever asks.
        assert!(may_use(folder.path()));
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).unwrap();
        // The administrator may use everything.
        assert_eq!(may_use(&file), File::open(&file).is_ok());
    }

    #[test]
    fn what_is_observed_here_is_consistent() {
        let observed = observe(0, String::new());
        // The GPU part is there exactly if the libtorch that was built against has one.
        assert_eq!(observed.is_loaded, observed.built_for.is_some());
        assert_eq!(observed.driver.is_some(), observed.built_for == Some(Maker::Nvidia));
        if let Some(toolkit) = observed.toolkit {
            assert!((11_000..100_000).contains(&toolkit), "{toolkit}");
        }
    }
}
