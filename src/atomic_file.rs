//! Writing files so that a crash leaves the old file or the new one, never a part.

use anyhow::{Result, anyhow};
use std::io::Write;
use std::path::Path;

/// Replaces the file at `path` by `bytes`: written to a temporary name in the same folder, synced,
/// then renamed.
///
/// # Errors
/// When the folder does not exist or cannot be written; the file that was there before is then
/// untouched and no temporary file remains.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    // A bare file name has the empty parent.
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    replace(path, folder, bytes).map_err(|error| {
        anyhow!(
            "{}: cannot write the file ({error}); hint: check that the folder exists, is writable and has free space",
            path.display()
        )
    })
}

fn replace(path: &Path, folder: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".").suffix(".tmp");
    // Temporary files are private by default; this one becomes an ordinary file, so the umask alone
    // decides.
    #[cfg(unix)]
    let mode = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666);
    #[cfg(unix)]
    builder.permissions(mode);

    let mut file = builder.tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|failed| failed.error)?;
    // The rename itself survives a power cut only when the folder is synced too.
    #[cfg(unix)]
    std::fs::File::open(folder)?.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_the_file_and_leaves_no_temporary_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("value");
        write_atomically(&path, b"a longer first value").unwrap();
        write_atomically(&path, b"second").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"second");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_write_keeps_what_was_there_and_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        // A folder that is not empty cannot be replaced by a file.
        let path = folder.path().join("taken");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("inside"), b"kept").unwrap();
        let message = format!("{:#}", write_atomically(&path, b"new").unwrap_err());
        assert!(
            message.contains("taken") && message.contains("hint"),
            "{message}"
        );
        assert_eq!(std::fs::read(path.join("inside")).unwrap(), b"kept");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[cfg(unix)]
    #[test]
    fn other_users_may_read_what_the_umask_lets_them() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let [ours, ordinary] = ["ours", "ordinary"].map(|name| folder.path().join(name));
        write_atomically(&ours, b"").unwrap();
        std::fs::write(&ordinary, b"").unwrap();
        let [ours, ordinary] =
            [ours, ordinary].map(|path| path.metadata().unwrap().permissions().mode());
        assert_eq!(ours, ordinary);
    }
}
