//! The code that makes a number what it is, as one hash.

use sha2::{Digest, Sha256};
use std::io::Result;
use std::path::{Path, PathBuf};

/// Evaluator, data, tokenizer, training loop and the versions of all libraries: files and folders. Not the editable files, whose
/// changes are what is compared and must not run `build.rs` again.
pub const SOURCES: [&str; 8] = [
    "Cargo.lock",
    "src/config.rs",
    "src/data",
    "src/eval.rs",
    "src/honesty.rs",
    "src/run",
    "src/tokenizer",
    "src/train.rs",
];

/// SHA-256, in hexadecimal, over the name, the length and the content of every file in `names`, which are in `root`; in the
/// order of the names.
///
/// # Errors
/// If one cannot be read.
pub fn sha256(root: &Path, names: &[&str]) -> Result<String> {
    let mut files = Vec::new();
    for name in names {
        collect(root, Path::new(name), &mut files)?;
    }
    files.sort();
    let mut hash = Sha256::new();
    for (name, path) in files {
        let content = std::fs::read(path)?;
        hash.update(format!("{name} {}\n", content.len()));
        hash.update(content);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Adds the files of `name` to `found`: their names, with `/` on every system, and where they are.
fn collect(root: &Path, name: &Path, found: &mut Vec<(String, PathBuf)>) -> Result<()> {
    let path = root.join(name);
    if path.is_dir() {
        for entry in std::fs::read_dir(path)? {
            collect(root, &name.join(entry?.file_name()), found)?;
        }
    } else {
        let parts: Vec<_> = name.iter().map(|part| part.to_string_lossy()).collect();
        found.push((parts.join("/"), path));
    }
    Ok(())
}
