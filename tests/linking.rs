//! Linking with libtorch: stand-ins for its libraries, really linked and run, show what the arguments of the build script
//! do where no GPU of that kind is at hand.

#[path = "../build/link.rs"]
mod link;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A folder laid out like Python's `site-packages`, with a libtorch of empty libraries in its package `torch`.
struct StandIn {
    site_packages: TempDir,
}

impl StandIn {
    fn new(gpu_libraries: &[&str]) -> Self {
        let stand_in = Self { site_packages: tempfile::tempdir().unwrap() };
        for header in ["ATen/ATen.h", "torch/csrc/api/include/torch/torch.h"] {
            let header = stand_in.include().join(header);
            fs::create_dir_all(header.parent().unwrap()).unwrap();
            fs::write(header, "").unwrap();
        }
        for name in ["torch", "torch_cpu", "c10"].iter().chain(gpu_libraries) {
            let file_name = format!("lib{name}.so");
            make_library(&stand_in.lib().join(file_name), name, &[]);
        }
        stand_in
    }

    fn lib(&self) -> PathBuf {
        self.site_packages.path().join("torch/lib")
    }

    fn include(&self) -> PathBuf {
        self.site_packages.path().join("torch/include")
    }

    /// Links a program that refers to nothing, as rustc does (`--as-needed`), and gives its path.
    fn link(&self, arguments: &[String]) -> PathBuf {
        let program = self.site_packages.path().join("program");
        let source = self.site_packages.path().join("program.c");
        fs::write(&source, "int main(void) { return 0; }\n").unwrap();
        let mut all: Vec<&OsStr> = vec!["-Wl,--as-needed".as_ref(), "-o".as_ref(), program.as_ref(), source.as_ref()];
        all.extend(arguments.iter().map(OsStr::new));
        cc(&all);
        program
    }

    fn link_with_our_arguments(&self) -> PathBuf {
        self.link(&link::arguments(&self.lib()).unwrap())
    }
}

/// A shared library that defines one function, named after it.
fn make_library(file: &Path, function: &str, arguments: &[&OsStr]) {
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    let source = file.with_extension("c");
    fs::write(&source, format!("int stand_in_{function}(void) {{ return 0; }}\n")).unwrap();
    let name = format!("-Wl,-soname,{}", file.file_name().unwrap().display());
    let own = ["-shared", "-fPIC", &name, "-o"].map(OsStr::new);
    cc(&[&own[..], &[file.as_ref(), source.as_ref()], arguments].concat());
}

fn cc(arguments: &[&OsStr]) {
    let output = Command::new("cc").args(arguments).output().expect("cc, the C compiler that building takes anyway");
    assert!(output.status.success(), "cc {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn needed(program: &Path) -> Vec<String> {
    link::dynamic_entries(program, "NEEDED").unwrap()
}

/// The folders that are written into a program as the old kind of path.
fn rpath(program: &Path) -> Vec<PathBuf> {
    assert!(link::dynamic_entries(program, "RUNPATH").unwrap().is_empty(), "DT_RUNPATH switches DT_RPATH off");
    let entries = link::dynamic_entries(program, "RPATH").unwrap();
    entries.iter().flat_map(|entry| entry.split(':')).map(PathBuf::from).collect()
}

/// Runs a program without any variable that tells where libraries are.
fn run(program: &Path) -> Result<(), String> {
    let output = Command::new(program).env_remove("LD_LIBRARY_PATH").output().unwrap();
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

fn the_gpu_part_is_linked(name: &str, libraries: [&str; 2]) {
    let libtorch = StandIn::new(&libraries);
    let files = libraries.map(|library| format!("lib{library}.so"));

    let folder = format!("-L{}", libtorch.lib().display());
    let naming = [folder, format!("-l{}", libraries[0]), format!("-l{}", libraries[1])];
    let dropped = needed(&libtorch.link(&naming));
    assert!(files.iter().all(|file| !dropped.contains(file)), "naming the libraries is enough here: {dropped:?}");

    assert_eq!(link::gpu_part(&libtorch.lib()).map(|part| part.name), Some(name));
    let program = libtorch.link_with_our_arguments();
    let kept = needed(&program);
    assert!(files.iter().all(|file| kept.contains(file)), "{kept:?}");
    assert_eq!(rpath(&program), [libtorch.lib()]);
    run(&program).unwrap();
}

#[test]
fn the_rocm_part_stays_linked_though_nothing_refers_to_it() {
    the_gpu_part_is_linked("hip", ["torch_hip", "c10_hip"]);
}

#[test]
fn the_cuda_part_stays_linked_though_nothing_refers_to_it() {
    the_gpu_part_is_linked("cuda", ["torch_cuda", "c10_cuda"]);
}

#[test]
fn a_libtorch_for_cpus_links_no_gpu_part() {
    let libtorch = StandIn::new(&[]);
    assert!(link::gpu_part(&libtorch.lib()).is_none());
    let program = libtorch.link_with_our_arguments();
    let kept = needed(&program);
    assert!(!kept.iter().any(|file| file.contains("torch") || file.contains("c10")), "{kept:?}");
    assert_eq!(rpath(&program), [libtorch.lib()]);
    run(&program).unwrap();
}

#[test]
fn only_what_is_linked_last_is_kept_by_force() {
    let libtorch = StandIn::new(&["torch_hip", "c10_hip"]);
    let mut arguments = link::arguments(&libtorch.lib()).unwrap();
    arguments.push("-ltorch_cpu".to_owned());
    let kept = needed(&libtorch.link(&arguments));
    assert!(!kept.contains(&"libtorch_cpu.so".to_owned()), "{kept:?}");
}

/// AMD's own wheels: ROCm is a package beside torch, and the libraries of torch know only where they were built.
#[test]
fn rocm_in_packages_beside_torch_is_found_at_run_time() {
    let libtorch = StandIn::new(&["torch_hip", "c10_hip"]);
    let beside = |folder: &str| libtorch.site_packages.path().join(folder);
    let hip = beside("_rocm_sdk_core/lib/libamdhip64.so.7");
    let blas = beside("_rocm_sdk_libraries_gfx1151/lib/libhipblas.so.3");
    make_library(&hip, "hip", &[]);
    make_library(&blas, "blas", &[]);
    make_library(&beside("_rocm_sdk_core/lib/libunrelated.so.1"), "unrelated", &[]);
    make_library(&beside("_rocm_sdk_devel/lib/libamdhip64.so.7"), "hip", &[]);
    let built_with = ["-Wl,--enable-new-dtags,--no-as-needed", "-Wl,-rpath,/where/it/was/built"].map(OsStr::new);
    for name in ["torch_hip", "c10_hip"] {
        let arguments = [&built_with[..], &[hip.as_ref(), blas.as_ref()]].concat();
        make_library(&libtorch.lib().join(format!("lib{name}.so")), name, &arguments);
    }

    let program = libtorch.link_with_our_arguments();
    let folders = ["torch/lib", "_rocm_sdk_core/lib", "_rocm_sdk_libraries_gfx1151/lib"].map(beside);
    assert_eq!(rpath(&program), folders);
    let kept = needed(&program);
    for file in ["libamdhip64.so.7", "libhipblas.so.3"] {
        assert!(kept.iter().any(|kept| kept == file), "{file} is not among {kept:?}");
    }
    assert!(!kept.contains(&"libunrelated.so.1".to_owned()), "{kept:?}");
    run(&program).unwrap();

    // The path alone would not do.
    let mut arguments = link::arguments(&libtorch.lib()).unwrap();
    arguments.retain(|argument| !argument.contains(".so."));
    let error = run(&libtorch.link(&arguments)).unwrap_err();
    assert!(error.contains("libamdhip64.so.7"), "{error}");
}

#[test]
fn what_is_no_whole_libtorch_is_refused_by_name() {
    let libtorch = StandIn::new(&["torch_hip", "c10_hip"]);
    link::check_layout(&libtorch.lib(), &libtorch.include()).unwrap();
    let missing = ["torch/lib/libc10_hip.so", "torch/include/ATen/ATen.h", "torch/lib/libtorch_cpu.so"];
    for missing in missing.map(|file| libtorch.site_packages.path().join(file)) {
        fs::remove_file(&missing).unwrap();
        let error = link::check_layout(&libtorch.lib(), &libtorch.include()).unwrap_err();
        assert!(error.contains(&format!("found no {}", missing.display())), "{error}");
        assert!(error.contains("; hint: run scripts/setup-libtorch"), "{error}");
        fs::write(&missing, "").unwrap();
    }
}

#[test]
fn a_library_that_cannot_be_read_is_an_error_that_names_it() {
    let libtorch = StandIn::new(&["torch_hip", "c10_hip"]);
    fs::create_dir_all(libtorch.site_packages.path().join("_rocm_sdk_core/lib")).unwrap();
    let damaged = libtorch.lib().join("libtorch_hip.so");
    fs::write(&damaged, "no library").unwrap();
    let error = link::arguments(&libtorch.lib()).unwrap_err();
    assert!(error.contains(&format!("readelf -d {}", damaged.display())), "{error}");
}

/// The real thing: this program was linked by the same build script as `autoresearch`.
#[cfg(feature = "tch")]
#[test]
fn this_program_is_linked_with_the_gpu_part_that_its_libtorch_has() {
    let program = std::env::current_exe().unwrap();
    let folders = rpath(&program);
    let lib = folders.iter().find(|folder| folder.join("libtorch.so").exists()).expect("libtorch's folder in DT_RPATH");
    let part = link::gpu_part(lib);
    let compiled_in = [("hip", cfg!(libtorch_gpu = "hip")), ("cuda", cfg!(libtorch_gpu = "cuda"))];
    for (name, compiled_in) in compiled_in {
        assert_eq!(compiled_in, part.is_some_and(|part| part.name == name), "cfg(libtorch_gpu = \"{name}\")");
    }
    let kept = needed(&program);
    for name in part.map_or(&[][..], |part| &part.libraries) {
        assert!(kept.contains(&format!("lib{name}.so")), "{name} is not among {kept:?}");
    }
}
