//! What CubeCL finds out about kernels, tuned and compiled, kept from run to run.

use super::{Adapter, compiler};
use crate::data::prepared::cache_folder;
use anyhow::{Result, anyhow};
use cubecl::config::cache::CacheConfig;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use cubecl::future::block_on;
use std::fs;
use std::panic::{catch_unwind, set_hook, take_hook};
use std::path::{Path, PathBuf};
use turso::{Builder, Error};

/// Lets CubeCL keep what it finds out about kernels in the cache folder, for each adapter and driver by itself.
pub fn keep(adapter: &Adapter) -> Result<()> {
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    config.environment.name = environment_name(adapter);
    let folder = folder()?;
    replace_damaged(&folder.join(format!("{}.db", environment_name(adapter))));
    config.environment.path = CacheConfig::Directory(folder);
    config.compilation.cache = true;
    if !CubeClRuntimeConfig::try_set(config) {
        cubecl::environment::activate(environment_name(adapter));
    }
    Ok(())
}

/// The folder for what is found out about adapters.
pub fn folder() -> Result<PathBuf> {
    let folder = cache_folder(None)?.join("tuned");
    fs::create_dir_all(&folder).map_err(|error| {
        anyhow!("{}: the folder for tuned kernels cannot be made ({error}); hint: AUTORESEARCH_CACHE_DIR names another place", folder.display())
    })?;
    Ok(folder)
}

/// Takes the database at `path` away if it is damaged: with one CubeCL panics, complains of every kernel, or tunes them all
/// anew at each start.
fn replace_damaged(path: &Path) {
    let Some(fault) = fault(path) else { return };
    tracing::warn!("{}: expected a database of tuned kernels, found {fault}; it is replaced", path.display());
    for ending in ["db", "db-wal", "db-tshm"] {
        fs::remove_file(path.with_extension(ending)).ok();
    }
}

/// What is wrong with the database, if anything is.
fn fault(path: &Path) -> Option<String> {
    if !path.exists() {
        return None;
    }
    // The database's code panics where its pages contradict each other; nobody needs to see that.
    let hook = take_hook();
    set_hook(Box::new(|_| ()));
    let outcome = catch_unwind(|| block_on(check(path)));
    set_hook(hook);
    match outcome {
        Ok(Ok(verdict)) => (verdict != "ok").then_some(verdict),
        Ok(Err(Error::NotAdb(fault) | Error::Corrupt(fault))) => Some(fault),
        // What a file that was cut off is called.
        Ok(Err(Error::Error(fault))) if fault.contains("short read") => Some(fault),
        // Another process may be at it, or the disk is full: no reason to lose what is there.
        Ok(Err(error)) => {
            tracing::debug!("{}: cannot be checked ({error})", path.display());
            None
        }
        Err(_) => Some("pages that contradict each other".to_owned()),
    }
}

/// What SQLite's integrity check says; `ok` if all is well. The file is opened as CubeCL does.
async fn check(path: &Path) -> Result<String, Error> {
    let database = Builder::new_local(&path.to_string_lossy()).experimental_multiprocess_wal(true).build().await?;
    let mut rows = database.connect()?.query("PRAGMA integrity_check", ()).await?;
    rows.next().await?.ok_or(Error::QueryReturnedNoRows)?.get(0)
}

/// Adapter, driver and shader language, as a file may be called.
pub fn environment_name(adapter: &Adapter) -> String {
    let name = format!("{} {} {}", adapter.name, adapter.driver, compiler(adapter));
    let words =
        name.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '.').filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-").to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A database as CubeCL makes it: an entry for each kernel.
    fn write_database(path: &Path) {
        block_on(async {
            let database =
                Builder::new_local(path.to_str().unwrap()).experimental_multiprocess_wal(true).build().await?;
            let connection = database.connect()?;
            connection.execute("CREATE TABLE entries (key BLOB PRIMARY KEY, value BLOB NOT NULL)", ()).await?;
            for number in 0..300_u32 {
                let entry = (number.to_le_bytes().to_vec(), vec![7_u8; 20 * number as usize]);
                connection.execute("INSERT INTO entries VALUES (?1, ?2)", entry).await?;
            }
            connection.query("PRAGMA wal_checkpoint(TRUNCATE)", ()).await?.next().await?;
            Ok::<_, Error>(())
        })
        .unwrap();
    }

    #[test]
    fn a_damaged_database_is_taken_away_with_its_companions() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("some-gpu.db");
        replace_damaged(&path);
        write_database(&path);
        replace_damaged(&path);
        let whole = fs::read(&path).unwrap();
        assert!(whole.len() > 500_000, "{}", whole.len());
        let garbled = |start: usize, end: usize| {
            let mut bytes = whole.clone();
            bytes[start..end].fill(0xa5);
            bytes
        };
        let damaged = [
            whole[..100].to_vec(),
            whole[..whole.len() / 2].to_vec(),
            vec![7; 5000],
            garbled(0, 100),
            garbled(100, 4096),
            garbled(4096, 8192),
            garbled(8192, 12288),
            garbled(whole.len() / 2, whole.len() / 2 + 50_000),
        ];
        for (number, content) in damaged.iter().enumerate() {
            for ending in ["db-wal", "db-tshm"] {
                fs::write(path.with_extension(ending), "").unwrap();
            }
            fs::write(&path, content).unwrap();
            replace_damaged(&path);
            for ending in ["db", "db-wal", "db-tshm"] {
                assert!(!path.with_extension(ending).exists(), "damage {number}: {ending}");
            }
        }
        // What is whole stays, in the same place.
        fs::write(&path, &whole).unwrap();
        replace_damaged(&path);
        assert_eq!(fs::read(&path).unwrap().len(), whole.len());
    }

    #[test]
    fn each_adapter_driver_and_language_has_a_file_of_its_own() {
        let name = environment_name(&Adapter::stand_in("Some GPU (RADV/2)"));
        assert!(name.starts_with("some-gpu-radv-2-driver-1.2-"), "{name}");
    }
}
