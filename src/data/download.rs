//! Parquet files from the Hugging Face hub, several at a time; a file has its name here only once it is complete.

use super::parquet_shards;
use anyhow::{Context, Result, anyhow, bail, ensure};
use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiBuilder, ApiError};
use hf_hub::{Repo, RepoType};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::collections::VecDeque;
use std::fs::{self, File};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Unfinished downloads, in the data set's folder.
const UNFINISHED: &str = ".download";
/// After this many files in a row that could not be fetched, no other is tried.
const FAILURES_IN_A_ROW: usize = 3;
/// A message names at most this many files.
const NAMED_FILES: usize = 5;

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
    /// An attempt to which nothing has come for so long has failed.
    pub stalled_after: Duration,
}

/// Why an attempt failed.
enum Failure {
    /// The network or the hub may recover; what has come in is resumed.
    Passing(anyhow::Error),
    /// What has come in is of no use; the next attempt starts afresh.
    Useless(anyhow::Error),
    /// Asking again gives the same answer.
    Lasting(anyhow::Error),
}

/// When something last came in, for the thread that downloads and the one that watches it.
#[derive(Clone)]
struct Pulse(Arc<Mutex<Heart>>);

struct Heart {
    last: Instant,
    given_up: bool,
}

/// Shows progress and keeps the pulse.
struct Watched {
    bar: ProgressBar,
    pulse: Pulse,
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
        Self {
            repository: repository.to_string(),
            endpoint: None,
            attempts: 5,
            first_wait: Duration::from_secs(1),
            stalled_after: Duration::from_secs(60),
        }
    }

    /// Makes sure that `folder` holds the parquet file `first` and then, `workers` at a time, those of `others`.
    ///
    /// # Errors
    /// If `workers` is 0, if `first` cannot be fetched, or if any of the others cannot. They are all tried, unless several
    /// in a row fail.
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
            let in_a_row = AtomicUsize::new(0);
            let next =
                || if in_a_row.load(Ordering::SeqCst) < FAILURES_IN_A_ROW { lock(&queue).pop_front() } else { None };
            std::thread::scope(|scope| {
                for _ in 0..threads {
                    scope.spawn(|| {
                        while let Some(file) = next() {
                            match self.fetch_file(folder, file, &display) {
                                Ok(()) => {
                                    in_a_row.store(0, Ordering::SeqCst);
                                    files.inc(1);
                                }
                                Err(error) => {
                                    in_a_row.fetch_add(1, Ordering::SeqCst);
                                    lock(&failed).push((file.clone(), error));
                                }
                            }
                        }
                    });
                }
            });
            failures = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        }
        let arrived = files.position() as usize;
        files.finish_and_clear();
        // Only empty where nothing is left to resume.
        fs::remove_dir(folder.join(UNFINISHED)).ok();

        if failures.is_empty() {
            return Ok(fetched);
        }
        failures.sort_by(|(left, _), (right, _)| left.cmp(right));
        let named = failures.iter().take(NAMED_FILES).map(|(file, error)| format!("{file} ({error:#})"));
        let mut list = named.collect::<Vec<_>>().join(", ");
        if failures.len() > NAMED_FILES {
            list += &format!(" and {} more", failures.len() - NAMED_FILES);
        }
        let untried = new - failures.len() - arrived;
        if untried > 0 {
            list += &format!("; {untried} others were not tried");
        }
        bail!(
            "{} of {new} files could not be fetched from {}: {list}; hint: check the network and run the same command again, \
             it goes on where this one stopped; `--dataset tales` needs no network",
            failures.len(),
            self.repository
        )
    }

    fn fetch_file(&self, folder: &Path, file: &str, display: &MultiProgress) -> Result<()> {
        let unfinished = folder.join(UNFINISHED).join(file);
        let mut wait = self.first_wait;
        for attempt in 1.. {
            let bar = display.add(ProgressBar::new(0));
            let tried = self.try_file(folder, file, &unfinished, &bar);
            bar.finish_and_clear();
            display.remove(&bar);
            let error = match tried {
                Ok(()) => break,
                Err(Failure::Lasting(error)) => return Err(error),
                Err(Failure::Passing(error)) => error,
                Err(Failure::Useless(error)) => {
                    fs::remove_dir_all(&unfinished).ok();
                    error
                }
            };
            if attempt >= self.attempts {
                return Err(error.context(format!("{attempt} attempts")));
            }
            tracing::debug!("{file}: attempt {attempt} failed: {error:#}");
            std::thread::sleep(wait);
            wait *= 2;
        }
        Ok(())
    }

    /// Downloads into `unfinished`, checks the file and moves it into `folder`.
    fn try_file(&self, folder: &Path, file: &str, unfinished: &Path, bar: &ProgressBar) -> Result<(), Failure> {
        let blob = self.download_watched(file, unfinished, bar)?;
        // A server that answers a request for the rest with the whole leaves a file with a good end that is too long.
        let whole = fs::metadata(&blob).is_ok_and(|found| Some(found.len()) == bar.length());
        if !whole || !parquet_shards::is_complete(&blob) {
            return Err(Failure::Useless(anyhow!("what came is no complete parquet file")));
        }
        let settle = || -> Result<()> {
            File::open(&blob)?.sync_all()?;
            fs::rename(&blob, folder.join(file))?;
            fs::remove_dir_all(unfinished)?;
            Ok(())
        };
        settle()
            .with_context(|| format!("{}: cannot be written", folder.join(file).display()))
            .map_err(Failure::Passing)
    }

    /// Downloads in a thread of its own: the crate waits for ever on a connection that has gone silent, we do not.
    fn download_watched(&self, file: &str, unfinished: &Path, bar: &ProgressBar) -> Result<PathBuf, Failure> {
        let pulse = Pulse(Arc::new(Mutex::new(Heart { last: Instant::now(), given_up: false })));
        let progress = Watched { bar: bar.clone(), pulse: pulse.clone() };
        let (hub, name, cache) = (self.clone(), file.to_string(), unfinished.to_path_buf());
        let (sender, receiver) = channel();
        std::thread::Builder::new()
            .name("download".to_string())
            .spawn(move || sender.send(hub.download(&name, &cache, progress)).ok())
            .map_err(|error| Failure::Passing(anyhow!("no thread can be started ({error})")))?;
        loop {
            let silence = lock(&pulse.0).last.elapsed();
            match receiver.recv_timeout(self.stalled_after.saturating_sub(silence)) {
                Ok(downloaded) => return downloaded,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::Passing(anyhow!("the download stopped without a reason")));
                }
                Err(RecvTimeoutError::Timeout) if pulse.give_up(self.stalled_after) => break,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        // The thread is left behind, waiting, with the crate's lock on the file; it writes no more, so the lock can go.
        let blobs = unfinished.join(self.repo().folder_name()).join("blobs");
        for entry in fs::read_dir(blobs).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "lock") {
                fs::remove_file(entry.path()).ok();
            }
        }
        Err(Failure::Passing(anyhow!("nothing came for {:?}", self.stalled_after)))
    }

    fn download(&self, file: &str, unfinished: &Path, progress: Watched) -> Result<PathBuf, Failure> {
        // A hub cache of its own for each file: the crate resumes what it finds there, and threads share nothing.
        let mut builder = ApiBuilder::from_env().with_cache_dir(unfinished.to_path_buf());
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        let pointer = builder
            .build()
            .and_then(|api| api.repo(self.repo()).download_with_progress(file, progress))
            .map_err(Failure::from_hub)?;
        pointer.canonicalize().map_err(|error| Failure::Passing(error.into()))
    }

    fn repo(&self) -> Repo {
        Repo::new(self.repository.clone(), RepoType::Dataset)
    }
}

impl Failure {
    fn from_hub(error: ApiError) -> Self {
        let status = match &error {
            // The client's error type is not ours to name, its text is what there is.
            ApiError::RequestError(error) => error.to_string().strip_prefix("http status: ").map(str::parse::<u16>),
            _ => None,
        };
        match (&error, status) {
            // Range not satisfiable: the remains are all of the file, or another's.
            (ApiError::InvalidResume, _) | (_, Some(Ok(416))) => Self::Useless(anyhow!("{error}")),
            (_, Some(Ok(400..=407 | 409..=428 | 430..=499))) => Self::Lasting(anyhow!("{error}")),
            _ => Self::Passing(anyhow!("{error}")),
        }
    }
}

impl Pulse {
    /// Gives up on the download, unless something has come in within `patience`; says whether it did.
    fn give_up(&self, patience: Duration) -> bool {
        let mut heart = lock(&self.0);
        heart.given_up = heart.last.elapsed() >= patience;
        heart.given_up
    }

    /// Notes that something came in; ends the thread of a download that was given up, before it writes.
    fn beat(&self) {
        let mut heart = lock(&self.0);
        if heart.given_up {
            drop(heart);
            // A panic without its message: the crate has no other way out.
            resume_unwind(Box::new("given up"));
        }
        heart.last = Instant::now();
    }
}

impl Progress for Watched {
    fn init(&mut self, size: usize, filename: &str) {
        self.pulse.beat();
        Progress::init(&mut self.bar, size, filename);
    }

    fn update(&mut self, size: usize) {
        self.pulse.beat();
        Progress::update(&mut self.bar, size);
    }

    fn finish(&mut self) {
        self.pulse.beat();
        Progress::finish(&mut self.bar);
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

    /// A hub on this machine, which notes the requests in order.
    struct TestHub {
        hub: Hub,
        /// File names, or where only a part was asked for, name and first byte.
        requests: Arc<Mutex<Vec<String>>>,
    }

    /// What the test hub does to requests for a file.
    #[derive(Clone, Copy)]
    enum Manners {
        /// Answers so many requests with 503, then serves.
        Busy(usize),
        /// Closes the connection after so many bytes of one answer.
        Breaks(usize),
        /// Sends so many bytes of one answer, then nothing, with the connection open.
        Stalls(usize),
        /// Answers what is not there with this status.
        Missing(u16),
    }

    fn serve(files: HashMap<String, Vec<u8>>, manners: Manners) -> TestHub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::<String>::new()));
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
                    let earlier =
                        lock(&noted).iter().filter(|request| request.split(' ').next() == Some(&file)).count();
                    let (start, end) = range.split_once('-').unwrap();
                    let start: usize = start.parse().unwrap();
                    lock(&noted).push(if start == 0 { file.clone() } else { format!("{file} {start}") });
                    let refusals = if let Manners::Busy(refusals) = manners { refusals } else { 0 };
                    let Some(content) = files.get(&file).filter(|_| earlier >= refusals) else {
                        let status = if let Manners::Missing(status) = manners { status } else { 503 };
                        write!(stream, "HTTP/1.1 {status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                            .unwrap();
                        return;
                    };
                    if start >= content.len() {
                        write!(stream, "HTTP/1.1 416 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").unwrap();
                        return;
                    }
                    let is_first = end.is_empty() && start == 0;
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
                    match manners {
                        Manners::Breaks(bytes) if is_first => stream.write_all(&part[..bytes]).unwrap(),
                        Manners::Stalls(bytes) if is_first => {
                            stream.write_all(&part[..bytes]).unwrap();
                            std::thread::sleep(Duration::from_secs(20));
                        }
                        _ => stream.write_all(part).unwrap(),
                    }
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
        let server = serve(files.clone(), Manners::Busy(0));
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
        let server = serve(files.clone(), Manners::Busy(0));
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
        let server = serve(shards(&names), Manners::Busy(2));
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
        let server = serve(files, Manners::Busy(0));
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
    fn a_broken_download_goes_on_where_it_stopped_even_in_a_later_run() {
        let names = names(1);
        let files = shards(&names);
        let server = serve(files.clone(), Manners::Breaks(100));
        let folder = tempfile::tempdir().unwrap();
        let impatient = Hub { attempts: 1, ..server.hub.clone() };
        let message = impatient.fetch(folder.path(), &names[0], &[], 1).unwrap_err().to_string();
        assert!(message.contains("shard_0.parquet (1 attempts"), "{message}");
        impatient.fetch(folder.path(), &names[0], &[], 1).unwrap();
        assert_eq!(fs::read(folder.path().join(&names[0])).unwrap(), files[&names[0]]);
        let expected = ["shard_0.parquet", "shard_0.parquet", "shard_0.parquet", "shard_0.parquet 100"];
        assert_eq!(*lock(&server.requests), expected);
        assert_eq!(listing(folder.path()), names);
    }

    #[test]
    fn a_silent_connection_is_given_up_and_resumed() {
        let names = names(1);
        let files = shards(&names);
        let server = serve(files.clone(), Manners::Stalls(100));
        let folder = tempfile::tempdir().unwrap();
        let hub = Hub { stalled_after: Duration::from_millis(300), ..server.hub };
        let start = Instant::now();
        hub.fetch(folder.path(), &names[0], &[], 1).unwrap();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        assert_eq!(fs::read(folder.path().join(&names[0])).unwrap(), files[&names[0]]);
        assert!(lock(&server.requests).contains(&"shard_0.parquet 100".to_string()));
        assert_eq!(listing(folder.path()), names);
    }

    #[test]
    fn a_connection_that_stays_silent_is_an_error() {
        let names = names(1);
        let server = serve(shards(&names), Manners::Stalls(0));
        let folder = tempfile::tempdir().unwrap();
        let hub = Hub { stalled_after: Duration::from_millis(200), ..server.hub };
        let message = hub.fetch(folder.path(), &names[0], &[], 1).unwrap_err().to_string();
        assert!(message.contains("nothing came for 200ms") && message.contains("hint: "), "{message}");
    }

    #[test]
    fn remains_that_the_server_does_not_resume_are_dropped() {
        let names = names(1);
        let files = shards(&names);
        let server = serve(files.clone(), Manners::Breaks(100));
        let folder = tempfile::tempdir().unwrap();
        let once = Hub { attempts: 1, ..server.hub.clone() };
        once.fetch(folder.path(), &names[0], &[], 1).unwrap_err();
        let blobs = folder.path().join(UNFINISHED).join(&names[0]).join("datasets--owner--texts/blobs");
        // All of it is there, and the server has no more to send.
        fs::write(blobs.join("shard_0.part"), &files[&names[0]]).unwrap();
        let healthy = serve(files.clone(), Manners::Busy(0));
        healthy.hub.fetch(folder.path(), &names[0], &[], 1).unwrap();
        assert_eq!(fs::read(folder.path().join(&names[0])).unwrap(), files[&names[0]]);
        assert!(lock(&healthy.requests).contains(&format!("shard_0.parquet {}", files[&names[0]].len())));
    }

    #[test]
    fn what_is_not_there_is_asked_for_once_and_many_failures_end_it() {
        for (status, attempts) in [(404, 1), (403, 1), (429, 3), (408, 3), (500, 3)] {
            let names = names(9);
            let mut files = shards(&names);
            files.retain(|name, _| *name == names[8]);
            let server = serve(files, Manners::Missing(status));
            let folder = tempfile::tempdir().unwrap();
            let message = server.hub.fetch(folder.path(), &names[8], &names[..8], 1).unwrap_err().to_string();
            assert!(message.starts_with("3 of 9 files could not be fetched"), "{message}");
            assert!(message.contains("; 5 others were not tried; hint: "), "{message}");
            assert!(message.contains(&status.to_string()), "{message}");
            let requests = lock(&server.requests).iter().filter(|request| **request == names[0]).count();
            assert_eq!(requests, attempts, "{status}");
        }
    }

    #[test]
    fn a_message_names_five_files_at_most() {
        let names = names(14);
        let mut files = shards(&names);
        // Each failure is followed by a success, so that all are tried.
        files.retain(|name, _| names.iter().position(|other| other == name).unwrap() % 2 == 1);
        let server = serve(files, Manners::Missing(404));
        let folder = tempfile::tempdir().unwrap();
        let message = server.hub.fetch(folder.path(), &names[13], &names[..13], 1).unwrap_err().to_string();
        assert!(message.starts_with("7 of 14 files") && message.contains(" and 2 more; hint: "), "{message}");
        assert_eq!(message.matches(".parquet (").count(), 5, "{message}");
    }

    #[test]
    fn without_the_first_file_nothing_else_is_fetched() {
        let names = names(2);
        let mut files = shards(&names);
        files.remove(&names[1]);
        let server = serve(files, Manners::Busy(0));
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
