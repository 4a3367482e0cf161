//! How a program is linked with libtorch: which of its libraries must stay, and where they are found at run time.
//!
//! Plain functions of folders, for the build script and for a test that links with what they give.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The libraries that every libtorch has.
const COMMON: [&str; 3] = ["torch", "torch_cpu", "c10"];

/// What makes a libtorch compute on one kind of GPU.
pub struct GpuPart {
    /// As in `cfg(libtorch_gpu = "…")`.
    pub name: &'static str,
    /// Its libraries, without `lib` and `.so`.
    pub libraries: [&'static str; 2],
}

/// The kinds of GPU part there are.
pub const GPU_PARTS: [GpuPart; 2] = [
    GpuPart { name: "hip", libraries: ["torch_hip", "c10_hip"] },
    GpuPart { name: "cuda", libraries: ["torch_cuda", "c10_cuda"] },
];

/// Checks that `lib` and `include` are libtorch's folders of libraries (for Linux) and headers.
///
/// # Errors
/// If a library or header that the build needs is missing, or half of a GPU part.
pub fn check_layout(lib: &Path, include: &Path) -> Result<(), String> {
    let halves = GPU_PARTS.iter().filter(|part| part.libraries.iter().any(|name| library(lib, name).exists()));
    let libraries = COMMON.iter().chain(halves.flat_map(|part| &part.libraries)).map(|name| library(lib, name));
    let headers = ["ATen/ATen.h", "torch/csrc/api/include/torch/torch.h"].map(|header| include.join(header));
    match libraries.chain(headers).find(|file| !file.exists()) {
        None => Ok(()),
        Some(missing) => Err(format!(
            "feature 'tch': expected libtorch's libraries in {} and its headers in {}, found no {}; hint: run \
             scripts/setup-libtorch, and unset LIBTORCH, LIBTORCH_LIB and LIBTORCH_INCLUDE if they are set",
            lib.display(),
            include.display(),
            missing.display()
        )),
    }
}

/// The GPU part of the libtorch whose libraries lie in `lib`; none if it computes on CPUs alone.
pub fn gpu_part(lib: &Path) -> Option<&'static GpuPart> {
    GPU_PARTS.iter().find(|part| library(lib, part.libraries[0]).exists())
}

/// Arguments for the compiler driver that link a program on Linux with the libtorch in `lib`.
///
/// The GPU part is named although nothing refers to its symbols: it registers its kernels when it is loaded, and linkers
/// leave out what nothing refers to. The folders are written into the program as DT_RPATH, which unlike DT_RUNPATH also
/// holds for the libraries that the libraries need (ld.so(8)).
///
/// # Errors
/// If a library's dynamic section cannot be read.
pub fn arguments(lib: &Path) -> Result<Vec<String>, String> {
    let part = gpu_part(lib);
    let rocm_folders = if part.is_some_and(|part| part.name == "hip") { rocm_folders(lib)? } else { vec![] };

    let mut arguments = vec![format!("-L{}", lib.display()), "-Wl,--disable-new-dtags".to_owned()];
    arguments.push(format!("-Wl,-rpath,{}", lib.display()));
    arguments.extend(rocm_folders.iter().map(|folder| format!("-Wl,-rpath,{}", folder.display())));
    if let Some(part) = part {
        arguments.push("-Wl,--push-state,--no-as-needed".to_owned());
        arguments.extend(part.libraries.iter().map(|name| format!("-l{name}")));
        arguments.extend(rocm_libraries(lib, part, &rocm_folders)?);
        arguments.push("-Wl,--pop-state".to_owned());
    }
    Ok(arguments)
}

/// The values of one tag (NEEDED, RPATH, …) in the dynamic section of a library or program.
///
/// # Errors
/// If `readelf` is missing or cannot read the file.
pub fn dynamic_entries(file: &Path, tag: &str) -> Result<Vec<String>, String> {
    let failed = |found: &dyn std::fmt::Display| {
        let file = file.display();
        format!("readelf -d {file}: expected a dynamic section, found: {found}; hint: readelf is part of binutils")
    };
    let output = Command::new("readelf").args(["-d", "-W"]).arg(file).env("LC_ALL", "C").output();
    let output = output.map_err(|error| failed(&error))?;
    if !output.status.success() {
        return Err(failed(&String::from_utf8_lossy(&output.stderr).trim()));
    }
    // Lines look like ` 0x…01 (NEEDED)   Shared library: [libc10.so]`.
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter(|line| line.contains(&format!("({tag})")));
    Ok(lines.filter_map(|line| Some(line.split_once('[')?.1.rsplit_once(']')?.0.to_owned())).collect())
}

fn library(folder: &Path, name: &str) -> PathBuf {
    folder.join(format!("lib{name}.so"))
}

/// Where AMD's own PyTorch wheels keep ROCm: packages `_rocm_sdk_*` beside the package `torch`, found in Python by
/// loading them by path before torch. PyTorch's wheels have ROCm in `lib` itself.
///
/// Source: `docs/packaging/python_packaging.md` and `external-builds/pytorch/rewrite_torch_runpath.py` of
/// github.com/ROCm/TheRock.
fn rocm_folders(lib: &Path) -> Result<Vec<PathBuf>, String> {
    let Some(site_packages) = lib.parent().and_then(Path::parent) else {
        return Ok(vec![]);
    };
    let unreadable = |error| format!("{}: expected a readable folder, found: {error}", site_packages.display());
    let mut packages = vec![];
    for entry in fs::read_dir(site_packages).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // The development package holds the same libraries again.
        if name.starts_with("_rocm_sdk_") && !name.contains("devel") {
            packages.push(path);
        }
    }
    packages.sort();
    let folders = packages
        .iter()
        .flat_map(|package| ["lib", "lib/rocm_sysdeps/lib", "lib/host-math/lib"].map(|folder| package.join(folder)));
    Ok(folders.filter(|folder| folder.is_dir()).collect())
}

/// The ROCm libraries from `folders` that libtorch's libraries need, as arguments.
///
/// They become needed by the program itself, which finds them by its own path: wheels whose libraries carry a DT_RUNPATH of
/// the machine that they were built on hide the program's path from the lookups of these libraries, but not what is loaded
/// already.
fn rocm_libraries(lib: &Path, part: &GpuPart, folders: &[PathBuf]) -> Result<Vec<String>, String> {
    let mut found: Vec<String> = vec![];
    if folders.is_empty() {
        return Ok(found);
    }
    // The last needs ROCm's compiler, which makes the kernels; not every libtorch has it.
    let run_time_compiler = Some(&"caffe2_nvrtc").filter(|name| library(lib, name).exists());
    for name in COMMON.iter().chain(&part.libraries).chain(run_time_compiler) {
        for needed in dynamic_entries(&library(lib, name), "NEEDED")? {
            let file = folders.iter().map(|folder| folder.join(&needed)).find(|file| file.exists());
            found.extend(file.map(|file| file.display().to_string()).filter(|file| !found.contains(file)));
        }
    }
    Ok(found)
}
