//! The code that makes a number what it is, as one hash.

use sha2::{Digest, Sha256};
use std::io::Result;
use std::path::{Path, PathBuf};

/// Files and folders that are hashed, but for [`OTHERS`].
const SOURCES: [&str; 5] = ["Cargo.lock", "Cargo.toml", "build", "build.rs", "src"];

/// Not hashed: the editable files, whose changes are what is compared and must not run `build.rs` again, and what no number of a
/// run goes through.
const OTHERS: [&str; 7] =
    ["src/cli", "src/cli.rs", "src/model.rs", "src/optim.rs", "src/process.rs", "src/research", "src/verify"];

/// Endings of sources; editors leave other files beside them.
const ENDINGS: [&str; 7] = ["cpp", "cu", "grammar", "h", "lock", "rs", "toml"];

/// SHA-256, in hexadecimal, over the name, the length and the content of every source in `root`, in the order of the names.
///
/// # Errors
/// If one cannot be read.
pub fn sha256(root: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    for (name, path) in collect(root)?.files {
        let content = std::fs::read(path)?;
        hash.update(format!("{name} {}\n", content.len()));
        hash.update(content);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The files whose changes, and the folders in which new files, make another hash.
///
/// # Errors
/// If a folder cannot be read.
pub fn watched(root: &Path) -> Result<Vec<String>> {
    let Found { files, folders } = collect(root)?;
    // Cargo looks through folders: one with an editable file in it must not be named.
    let is_whole = |folder: &String| !OTHERS.iter().any(|other| other.starts_with(&format!("{folder}/")));
    Ok(files.into_iter().map(|(name, _)| name).chain(folders.into_iter().filter(is_whole)).collect())
}

/// Sources by name, with `/` on every system; files with where they are.
#[derive(Default)]
struct Found {
    files: Vec<(String, PathBuf)>,
    folders: Vec<String>,
}

fn collect(root: &Path) -> Result<Found> {
    let mut found = Found::default();
    for name in SOURCES {
        add(root, name, &mut found)?;
    }
    found.files.sort();
    Ok(found)
}

fn add(root: &Path, name: &str, found: &mut Found) -> Result<()> {
    let path = root.join(name);
    if OTHERS.contains(&name) {
        return Ok(());
    }
    if path.is_dir() {
        for entry in std::fs::read_dir(path)? {
            add(root, &format!("{name}/{}", entry?.file_name().to_string_lossy()), found)?;
        }
        found.folders.push(name.to_owned());
    } else if name.rsplit_once('.').is_some_and(|(_, ending)| ENDINGS.contains(&ending)) {
        found.files.push((name.to_owned(), path));
    }
    Ok(())
}
