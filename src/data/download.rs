//! Parquet files from the Hugging Face hub, several at a time; a file has its name here only once it is complete.

use super::parquet_shards;
use anyhow::{Context, Result, anyhow, bail, ensure};
use hf_hub::api::sync::{ApiBuilder, ApiError};
use hf_hub::{Repo, RepoType};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Unfinished downloads, in the data set's folder.
const UNFINISHED: &str = ".download";

/// A data set on the hub and how to fetch files of it.
#[derive(Clone, Debug)]
pub struct Hub {
    /// `owner/name`.
    pub repository: String,
    /// Another address than the hub's; none takes `HF_ENDPOINT`, or else the hub.
    pub endpoint: Option<String>,
    /// How often a file is tried.
    pub attempts: u32,
    /// The wait after the first failed attempt; it doubles each time.
    pub first_wait: Duration,
}

/// How many files were fetched and how many were there already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Files that were downloaded.
    pub new: usize,
    /// Complete files that were found in the folder.
    pub kept: usize,
}

impl Hub {
    /// The public hub, with patience for a network that fails now and then.
    pub fn new(repository: &str) -> Self {
        Self { repository: repository.to_string(), endpoint: None, attempts: 5, first_wait: Duration::from_secs(1) }
    }

    /// Makes sure that `folder` holds the parquet file `first` and then, `workers` at a time, those of `others`.
    ///
    /// # Errors
    /// If `workers` is 0, if `first` cannot be fetched, or, after all others have been tried, if any of them cannot:
    /// the message names each.
    pub fn fetch(&self, folder: &Path, first: &str, others: &[String], workers: usize) -> Result<Fetched> {
        ensure!(workers > 0, "--download-workers: expected a positive number, found 0; hint: 8 is the default");
        let missing = |file: &&String| !parquet_shards::is_complete(&folder.join(file.as_str()));
        let first = first.to_string();
        let wanted: VecDeque<&String> = others.iter().filter(missing).collect();
        let first_is_missing = missing(&&first);
        let new = wanted.len() + usize::from(first_is_missing);
        let fetched = Fetched { new, kept: 1 + others.len() - new };
        if new == 0 {
            return Ok(fetched);
        }

        let display = MultiProgress::new();
        let files = display.add(ProgressBar::new(new as u64));
        files.set_style(ProgressStyle::with_template("files {pos}/{len} [{elapsed_precise}] {msg}")?);
        files.set_message(self.repository.clone());
        files.tick();

        let mut failures = Vec::new();
        if first_is_missing {
            match self.fetch_file(folder, &first, &display) {
                Ok(()) => files.inc(1),
                Err(error) => failures.push((first, error)),
            }
        }
        if failures.is_empty() {
            let threads = workers.min(wanted.len());
            let (queue, failed) = (Mutex::new(wanted), Mutex::new(Vec::new()));
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| {
                        while let Some(file) = lock(&queue).pop_front() {
                            match self.fetch_file(folder, file, &display) {
                                Ok(()) => files.inc(1),
                                Err(error) => lock(&failed).push((file.clone(), error)),
                            }
                        }
                    });
                }
            });
            failures = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        }
        files.finish_and_clear();
        // Only empty where nothing is left to resume.
        fs::remove_dir(folder.join(UNFINISHED)).ok();

        if failures.is_empty() {
            return Ok(fetched);
        }
        failures.sort_by(|(left, _), (right, _)| left.cmp(right));
        let list = failures.iter().map(|(file, error)| format!("{file} ({error:#})")).collect::<Vec<_>>().join(", ");
        bail!(
            "{} of {new} files could not be fetched from {}: {list}; hint: check the network and run the same command again, \
             finished files are kept; `--dataset tales` needs no network",
            failures.len(),
            self.repository
        )
    }

    fn fetch_file(&self, folder: &Path, file: &str, display: &MultiProgress) -> Result<()> {
        let unfinished = folder.join(UNFINISHED).join(file);
        let mut wait = self.first_wait;
        for attempt in 1.. {
            let bar = display.add(ProgressBar::new(0));
            let tried = self.try_file(folder, file, &unfinished, bar.clone());
            bar.finish_and_clear();
            display.remove(&bar);
            let Err((error, remains_are_good)) = tried else {
                break;
            };
            // What has come in is resumed; the last attempt starts afresh, in case that is what is wrong.
            if !remains_are_good || attempt + 1 >= self.attempts {
                fs::remove_dir_all(&unfinished).ok();
            }
            if attempt >= self.attempts {
                return Err(error.context(format!("{attempt} attempts")));
            }
            tracing::debug!("{file}: attempt {attempt} failed: {error:#}");
            std::thread::sleep(wait);
            wait *= 2;
        }
        Ok(())
    }

    /// Downloads into `unfinished`, checks the file and moves it into `folder`; an error says whether to resume.
    fn try_file(
        &self,
        folder: &Path,
        file: &str,
        unfinished: &Path,
        bar: ProgressBar,
    ) -> Result<(), (anyhow::Error, bool)> {
        let blob = self.download(file, unfinished, bar).map_err(|error| {
            let remains_are_good = !matches!(error.downcast_ref(), Some(ApiError::InvalidResume));
            (error, remains_are_good)
        })?;
        if !parquet_shards::is_complete(&blob) {
            return Err((anyhow!("what came is no complete parquet file"), false));
        }
        let settle = || -> Result<()> {
            File::open(&blob)?.sync_all()?;
            fs::rename(&blob, folder.join(file))?;
            fs::remove_dir_all(unfinished)?;
            Ok(())
        };
        settle()
            .with_context(|| format!("{}: cannot be written", folder.join(file).display()))
            .map_err(|error| (error, true))
    }

    fn download(&self, file: &str, unfinished: &Path, bar: ProgressBar) -> Result<PathBuf> {
        // A hub cache of its own for each file: the crate resumes what it finds there, and threads share nothing.
        let mut builder = ApiBuilder::from_env().with_cache_dir(unfinished.to_path_buf());
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        let pointer = builder
            .build()?
            .repo(Repo::new(self.repository.clone(), RepoType::Dataset))
            .download_with_progress(file, bar)?;
        Ok(pointer.canonicalize()?)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::parquet_shards::tests::write_shard;
    use std::collections::HashMap;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::sync::Arc;

    /// A hub on this machine: serves `files`, answers the first `refusals` requests for a file with 503, and notes the order.
    struct TestHub {
        hub: Hub,
        requests: Arc<Mutex<Vec<String>>>,
    }

    fn serve(files: HashMap<String, Vec<u8>>, refusals: usize) -> TestHub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (files, noted) = (Arc::new(files), requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, files, noted) = (stream.unwrap(), files.clone(), noted.clone());
                std::thread::spawn(move || {
                    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                    let file = lines
                        .next()
                        .unwrap()
                        .unwrap()
                        .split(' ')
                        .nth(1)
                        .unwrap()
                        .rsplit('/')
                        .next()
                        .unwrap()
                        .to_string();
                    let mut range = String::new();
                    for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
                        if let Some(bytes) = line.to_lowercase().strip_prefix("range: bytes=") {
                            range = bytes.to_string();
                        }
                    }
                    let earlier = lock(&noted).iter().filter(|request| **request == file).count();
                    lock(&noted).push(file.clone());
                    let Some(content) = files.get(&file).filter(|_| earlier >= refusals) else {
                        write!(stream, "HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
                        return;
                    };
                    let (start, end) = range.split_once('-').unwrap();
                    let start: usize = start.parse().unwrap();
                    let end = end.parse().map_or(content.len(), |last: usize| last + 1);
                    let part = &content[start..end];
                    write!(
                        stream,
                        "HTTP/1.1 206 Partial Content\r\nETag: \"{file}\"\r\nX-Repo-Commit: abc\r\nContent-Length: {}\r\n\
                         Content-Range: bytes {start}-{}/{}\r\nConnection: close\r\n\r\n",
                        part.len(),
                        end - 1,
                        content.len()
                    )
                    .unwrap();
                    stream.write_all(part).unwrap();
                });
            }
        });
        let hub = Hub { endpoint: Some(endpoint), attempts: 3, first_wait: Duration::ZERO, ..Hub::new("owner/texts") };
        TestHub { hub, requests }
    }

    fn names(count: usize) -> Vec<String> {
        (0..count).map(|shard| format!("shard_{shard}.parquet")).collect()
    }

    fn shards(names: &[String]) -> HashMap<String, Vec<u8>> {
        let folder = tempfile::tempdir().unwrap();
        let shard = |name: &String| {
            let path = folder.path().join(name);
            write_shard(&path, &[Some(name)]);
            (name.clone(), fs::read(path).unwrap())
        };
        names.iter().map(shard).collect()
    }

    fn listing(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_first_file_comes_first_and_all_arrive_whole() {
        let names = names(5);
        let files = shards(&names);
        let server = serve(files.clone(), 0);
        let folder = tempfile::tempdir().unwrap();
        let fetched = server.hub.fetch(folder.path(), &names[4], &names[..4], 3).unwrap();
        assert_eq!(fetched, Fetched { new: 5, kept: 0 });
        assert_eq!(listing(folder.path()), names);
        for name in &names {
            assert_eq!(fs::read(folder.path().join(name)).unwrap(), files[name]);
        }
        let requests = lock(&server.requests).clone();
        let others = requests.iter().position(|request| *request != names[4]).unwrap();
        assert!(requests[..others].iter().all(|request| *request == names[4]) && others >= 2, "{requests:?}");
        assert!(!requests[others..].contains(&names[4]), "{requests:?}");
    }

    #[test]
    fn complete_files_are_kept_and_truncated_ones_fetched_again() {
        let names = names(3);
        let files = shards(&names);
        let server = serve(files.clone(), 0);
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(&names[0]), &files[&names[0]]).unwrap();
        fs::write(folder.path().join(&names[1]), &files[&names[1]][..50]).unwrap();
        let fetched = server.hub.fetch(folder.path(), &names[2], &names[..2], 2).unwrap();
        assert_eq!(fetched, Fetched { new: 2, kept: 1 });
        assert_eq!(fs::read(folder.path().join(&names[1])).unwrap(), files[&names[1]]);
        assert!(!lock(&server.requests).contains(&names[0]));
    }

    #[test]
    fn a_busy_hub_is_asked_again() {
        let names = names(2);
        let server = serve(shards(&names), 2);
        let folder = tempfile::tempdir().unwrap();
        server.hub.fetch(folder.path(), &names[1], &names[..1], 1).unwrap();
        assert_eq!(listing(folder.path()), names);
    }

    #[test]
    fn a_failed_file_is_named_after_the_others_have_arrived() {
        let names = names(5);
        let mut files = shards(&names);
        files.remove(&names[0]);
        files.insert(names[2].clone(), b"no parquet".to_vec());
        let server = serve(files, 0);
        let folder = tempfile::tempdir().unwrap();
        let message = server.hub.fetch(folder.path(), &names[4], &names[..4], 2).unwrap_err().to_string();
        assert!(
            message.starts_with("2 of 5 files could not be fetched from owner/texts: shard_0.parquet (3 attempts"),
            "{message}"
        );
        assert!(
            message.contains("shard_2.parquet") && message.contains("hint: ") && !message.contains('\n'),
            "{message}"
        );
        assert_eq!(listing(folder.path()), [&names[1..2], &names[3..]].concat());
    }

    #[test]
    fn without_the_first_file_nothing_else_is_fetched() {
        let names = names(2);
        let mut files = shards(&names);
        files.remove(&names[1]);
        let server = serve(files, 0);
        let folder = tempfile::tempdir().unwrap();
        let message = server.hub.fetch(folder.path(), &names[1], &names[..1], 1).unwrap_err().to_string();
        assert!(message.contains("shard_1.parquet"), "{message}");
        assert!(!lock(&server.requests).contains(&names[0]));
    }

    #[test]
    fn no_workers_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let message = Hub::new("owner/texts").fetch(folder.path(), "a", &[], 0).unwrap_err().to_string();
        assert!(message.starts_with("--download-workers: ") && message.contains("hint: "), "{message}");
    }
}
