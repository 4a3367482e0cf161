//! With the feature `tch`: compiles the C++ that reaches what the `tch` crate does not bind, and links libtorch whole.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The kind of GPU that the linked libtorch computes on; not set if it has none.
    println!("cargo::rustc-check-cfg=cfg(libtorch_gpu, values(\"hip\", \"cuda\"))");
    #[cfg(feature = "tch")]
    libtorch::build();
}

#[cfg(feature = "tch")]
mod libtorch {
    use std::path::PathBuf;

    /// C++ sources; each becomes part of the library.
    const SOURCES: [&str; 2] = ["src/ops/libtorch/shim.cpp", "src/device/libtorch.cpp"];

    pub fn build() {
        // Set by torch-sys: the folder that it found libtorch's libraries in.
        let lib = PathBuf::from(std::env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys names libtorch's folder"));
        let root = lib.parent().expect("libtorch's libraries lie in a folder of it");
        for part in ["hip", "cuda"] {
            if lib.join(format!("libtorch_{part}.so")).exists() {
                println!("cargo::rustc-cfg=libtorch_gpu=\"{part}\"");
            }
        }
        for source in SOURCES {
            println!("cargo:rerun-if-changed={source}");
        }
        cc::Build::new()
            .cpp(true)
            .std("c++17")
            .warnings(false)
            .include(root.join("include"))
            .include(root.join("include/torch/csrc/api/include"))
            .files(SOURCES)
            .compile("autoresearch_libtorch");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    }
}
