//! Small files of JSON in which a branch's state lies.

use crate::atomic_file::write_atomically;
use anyhow::{Result, anyhow};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::path::Path;

/// What the file at `path` holds, if it is there; `expected` is what messages call it.
///
/// # Errors
/// If it cannot be read, or holds something else: the message ends with `hint`.
pub fn read<T: DeserializeOwned>(path: &Path, expected: &str, hint: &str) -> Result<Option<T>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(anyhow!("{}: cannot be read ({error}); hint: check its permissions", path.display())),
    };
    let value = serde_json::from_str(&text);
    value.map(Some).map_err(|error| anyhow!("{}: expected {expected}, found: {error}; hint: {hint}", path.display()))
}

/// Replaces the file at `path`.
///
/// # Errors
/// If it cannot be written.
pub fn write(path: &Path, value: &impl Serialize) -> Result<()> {
    write_atomically(path, serde_json::to_string_pretty(value)?.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_what_is_damaged_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        let value = || read::<Vec<u32>>(&path, "numbers", "count again");
        assert_eq!(value().unwrap(), None);
        write(&path, &[1, 2]).unwrap();
        assert_eq!(value().unwrap(), Some(vec![1, 2]));
        fs::write(&path, "[1,").unwrap();
        let message = value().unwrap_err().to_string();
        assert!(
            message.contains("state.json: expected numbers") && message.ends_with("; hint: count again"),
            "{message}"
        );
    }
}
