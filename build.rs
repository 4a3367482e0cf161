//! With the feature `tch`: compiles the C++ that reaches what the `tch` crate does not bind, and links libtorch whole.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(libtorch_gpu, values(\"cuda\", \"hip\"))");
    #[cfg(feature = "tch")]
    libtorch::build();
}

#[cfg(feature = "tch")]
mod libtorch {
    use std::path::PathBuf;

    /// C++ sources; each becomes part of the library.
    const SOURCES: [&str; 1] = ["src/ops/libtorch/shim.cpp"];

    pub fn build() {
        // Set by torch-sys: the folder that it found libtorch's libraries in.
        let lib = PathBuf::from(std::env::var("DEP_TCH_LIBTORCH_LIB").expect("torch-sys names libtorch's folder"));
        let root = lib.parent().expect("libtorch's libraries lie in a folder of it");
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
        println!("cargo:rustc-env=LIBTORCH_LIBRARIES={}", lib.display());
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
    }
}
