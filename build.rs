//! Hashes the code that makes a number what it is. With the feature `tch`: compiles the C++ that reaches what the `tch` crate
//! does not bind, and links libtorch whole.

use std::path::Path;

#[path = "build/protocol.rs"]
mod protocol;

fn main() {
    let root = Path::new(".");
    match protocol::watched(root).and_then(|names| Ok((names, protocol::sha256(root)?))) {
        Ok((names, hash)) => {
            for name in names {
                println!("cargo::rerun-if-changed={name}");
            }
            println!("cargo::rustc-env=AUTORESEARCH_PROTOCOL_SHA256={hash}");
            keep_compiled_kernels(&hash);
        }
        Err(error) => println!(
            "cargo::error=the sources cannot be hashed ({error}); hint: build in a whole checkout, with Cargo.lock, build and src"
        ),
    }
    // The kind of GPU that the linked libtorch computes on; not set if it has none.
    println!("cargo::rustc-check-cfg=cfg(libtorch_gpu, values(\"hip\", \"cuda\"))");
    #[cfg(feature = "tch")]
    if let Err(message) = libtorch::build() {
        println!("cargo::error={message}");
    }
}

/// CubeCL keeps compiled GPU kernels by the program's build id, which linkers make anew after each edit of the model: with one
/// that hangs on the code the kernels come from (the dependencies and what is hashed here), the next experiment finds them.
fn keep_compiled_kernels(hash: &str) {
    let (linux, wgpu) = (std::env::var("CARGO_CFG_TARGET_OS"), std::env::var("CARGO_FEATURE_WGPU"));
    if linux.is_ok_and(|system| system == "linux") && wgpu.is_ok() {
        // As long as those that linkers make.
        println!("cargo::rustc-link-arg-bins=-Wl,--build-id=0x{}", &hash[..40]);
    }
}

#[cfg(feature = "tch")]
#[path = "build/link.rs"]
mod link;

#[cfg(feature = "tch")]
mod libtorch {
    use super::link;
    use std::path::{Path, PathBuf};

    /// C++ sources; each becomes part of the library.
    const SOURCES: [&str; 2] = ["src/ops/libtorch/shim.cpp", "src/device/libtorch.cpp"];

    pub fn build() -> Result<(), String> {
        for name in ["LIBTORCH", "LIBTORCH_INCLUDE", "LIBTORCH_LIB"] {
            println!("cargo::rerun-if-env-changed={name}");
        }
        println!("cargo::rerun-if-changed=build/link.rs");
        let system = std::env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
        // Set by torch-sys: the folder that it found libtorch's libraries in.
        let lib = std::env::var_os("DEP_TCH_LIBTORCH_LIB").map(PathBuf::from);
        let (Some(lib), "linux") = (lib, system.as_str()) else {
            return Err(format!(
                "feature 'tch': expected Linux, found '{system}'; hint: build without '--features tch', for the CPU"
            ));
        };
        println!("cargo::rerun-if-changed={}", lib.display());
        let root = match std::env::var_os("LIBTORCH_INCLUDE") {
            Some(root) => PathBuf::from(root),
            None => lib.parent().map(Path::to_path_buf).unwrap_or_default(),
        };
        let include = root.join("include");
        link::check_layout(&lib, &include)?;

        let part = link::gpu_part(&lib);
        compile(&include, part.as_ref().is_some_and(|part| part.name == "hip"));
        if let Some(part) = part {
            println!("cargo::rustc-cfg=libtorch_gpu=\"{}\"", part.name);
        }
        // For tests, which look for the compilers of kernels beside it.
        println!("cargo::rustc-env=LIBTORCH_LIBRARIES={}", lib.display());
        for argument in link::arguments(&lib)? {
            println!("cargo::rustc-link-arg={argument}");
        }
        Ok(())
    }

    fn compile(include: &Path, is_hip: bool) {
        for source in SOURCES {
            println!("cargo::rerun-if-changed={source}");
        }
        let mut build = cc::Build::new();
        if is_hip {
            build.define("AUTORESEARCH_HIP", None);
        }
        build
            .cpp(true)
            .std("c++17")
            .warnings(false)
            .include(include)
            .include(include.join("torch/csrc/api/include"))
            .files(SOURCES)
            .compile("autoresearch_libtorch");
    }
}
