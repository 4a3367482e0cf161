//! Locks that end with the process that holds them: one experiment at a time on a device, and in a work tree.

use anyhow::{Context, Result, anyhow, bail};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

/// Held until dropped, or until the process ends however it ends.
#[derive(Debug)]
pub struct Lock {
    _files: Vec<File>,
}

impl Lock {
    /// Takes the lock file `name` in `folder` for this process; `work` is what messages to others say.
    ///
    /// # Errors
    /// If another process has it, or the file cannot be made.
    pub fn take(folder: &Path, name: &str, work: &str) -> Result<Self> {
        Ok(Self { _files: vec![lock_file(folder, name, work, false)?] })
    }

    /// Who has the lock file `name` in `folder`, if anybody has.
    pub fn holder(folder: &Path, name: &str) -> Option<String> {
        let mut file = File::open(folder.join(name)).ok()?;
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => Some(note(&mut file)),
            _ => None,
        }
    }

    /// Takes the device named `device` as `--device` does. A named one excludes itself and `auto`; `auto` may become any
    /// and excludes all.
    ///
    /// # Errors
    /// As [`Lock::take`].
    pub fn take_device(folder: &Path, device: &str, work: &str) -> Result<Self> {
        let is_named = device != "auto";
        let mut files = vec![lock_file(folder, "devices.lock", work, is_named)?];
        if is_named {
            // The first is also called by the kind alone.
            let (kind, number) = device.split_once(':').unwrap_or((device, "0"));
            let letters = format!("{kind}-{number}").replace(|letter: char| !letter.is_ascii_alphanumeric(), "-");
            files.push(lock_file(folder, &format!("{letters}.lock"), work, false)?);
        }
        Ok(Self { _files: files })
    }
}

/// What the holder of `file` says of itself.
fn note(file: &mut File) -> String {
    let mut text = String::new();
    file.read_to_string(&mut text).ok();
    match text.trim() {
        "" => "another process".to_owned(),
        text => text.to_owned(),
    }
}

fn lock_file(folder: &Path, name: &str, work: &str, is_shared: bool) -> Result<File> {
    let path = folder.join(name);
    let unusable = |error: std::io::Error| {
        anyhow!("{}: cannot make the lock file ({error}); hint: the folder must be writable", path.display())
    };
    fs::create_dir_all(folder).map_err(unusable)?;
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(unusable)?;
    match if is_shared { file.try_lock_shared() } else { file.try_lock() } {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let holder = note(&mut file);
            bail!(
                "{}: expected device and work tree free, found one taken by {holder}; hint: wait for it, or give each its own --device (a GPU's number) at `start`",
                path.display()
            );
        }
        Err(TryLockError::Error(error)) => return Err(unusable(error)),
    }
    let note = format!("process {} ({work})\n", std::process::id());
    let written =
        file.set_len(0).and_then(|()| file.seek(SeekFrom::Start(0))).and_then(|_| file.write_all(note.as_bytes()));
    written.with_context(|| format!("{}: cannot write the lock file", path.display()))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_taken_once_and_free_again_afterwards() {
        let folder = tempfile::tempdir().unwrap();
        let take = |device| Lock::take_device(folder.path(), device, "experiment in /project");
        let first = take("libtorch:0").unwrap();
        assert!(Lock::holder(folder.path(), "libtorch-0.lock").unwrap().contains("experiment in /project"));
        let message = take("libtorch").unwrap_err().to_string();
        assert!(message.contains("experiment in /project") && message.contains("; hint: "), "{message}");
        let second = take("libtorch:1").unwrap();
        assert!(take("auto").is_err());
        drop((first, second));
        assert_eq!(Lock::holder(folder.path(), "libtorch-0.lock"), None);
        let all = take("auto").unwrap();
        assert!(take("libtorch:1").is_err());
        drop(all);
        assert!(take("cpu").is_ok());
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let message = Lock::take(&file.join("locks"), "work.lock", "").unwrap_err().to_string();
        assert!(message.contains("work.lock") && message.contains("; hint: "), "{message}");
    }
}
