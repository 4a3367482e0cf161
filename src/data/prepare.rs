//! The cache: a folder per data set with its shards, its tokenizer and a record of what was prepared.

use super::command::prepare_command;
use super::documents::{Documents, Split};
use super::download::Hub;
use super::manifest::{Dataset, Manifest, Source};
use super::parquet_shards::ParquetShards;
use super::tales;
use super::text_files::{LONGEST_PIECE, SPLIT_RULE, TextFiles};
use crate::atomic_file::write_atomically;
use crate::tokenizer::{Tokenizer, TrainOptions};
use anyhow::{Context, Result, anyhow, bail, ensure};
use burn_dataset::Dataset as _;
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The data set of [`PrepareOptions::default`].
const DEFAULT_DATASET: &str = "climbmix";
/// The size of the vocabulary where none is named.
pub const DEFAULT_VOCAB_SIZE: usize = 8192;
/// The environment variable that names the cache folder.
pub const CACHE_VARIABLE: &str = "AUTORESEARCH_CACHE_DIR";

const RECORD: &str = "prepared.json";
const RECORD_FORMAT: u32 = 2;
/// The column of a user's own parquet files.
const FOLDER_TEXT_COLUMN: &str = "text";
/// How much of a user's own text the tokenizer is trained on.
const FOLDER_TOKENIZER_CHARACTERS: usize = 1_000_000_000;
/// The tokenizer sees this much of the start of each document.
const DOCUMENT_CHARACTERS: usize = 10_000;
/// Documents that are longer on average lose most of their text, as packing keeps at most one row of each.
const LONG_DOCUMENT_CHARACTERS: u64 = 20_000;
/// Generated documents form groups of this size.
const GENERATED_GROUP: usize = 1024;

/// What to prepare, as on the command line.
#[derive(Clone, Debug)]
pub struct PrepareOptions {
    /// A data set's name or a folder.
    pub dataset: String,
    /// The cache folder; see [`cache_folder`] for what none means.
    pub cache_dir: Option<PathBuf>,
    /// Training shards to fetch, -1 for all.
    pub num_shards: i64,
    /// Files to fetch at a time.
    pub download_workers: usize,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Whether to replace a tokenizer that is there.
    pub retrain_tokenizer: bool,
}

impl Default for PrepareOptions {
    fn default() -> Self {
        Self {
            dataset: DEFAULT_DATASET.to_string(),
            cache_dir: None,
            num_shards: 10,
            download_workers: 8,
            vocab_size: DEFAULT_VOCAB_SIZE,
            retrain_tokenizer: false,
        }
    }
}

/// A data set that is ready to train on, with its tokenizer.
#[derive(Debug)]
pub struct Prepared {
    folder: PathBuf,
    record: Record,
    tokenizer: Arc<Tokenizer>,
}

/// What `prepared.json` holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    format: u32,
    name: String,
    /// The user's folder with the files; where there is none, they lie beside the record.
    corpus: Option<PathBuf>,
    files: Files,
    /// Bytes of each file.
    sizes: BTreeMap<String, u64>,
    validation: ValidationText,
}

/// The format of a record of any version.
#[derive(Deserialize)]
struct AnyRecord {
    format: u32,
}

/// What the metric is computed on, so that runs can tell whether they were measured on the same text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ValidationText {
    documents: usize,
    /// Bytes of UTF-8.
    bytes: u64,
    characters: u64,
    /// SHA-256, over each document its length in bytes (8 bytes, little-endian) and then its text; in hexadecimal.
    sha256: String,
}

/// Which files hold the documents, by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Files {
    Shards { column: String, train: Vec<String>, validation: String },
    Rows { column: String, file: String, first_validation_row: usize, first_training_row: usize },
    Text { files: Vec<String> },
    Generated,
}

/// The cache folder: `flag`, or else the environment's [`CACHE_VARIABLE`], or else `~/.cache/autoresearch`.
///
/// # Errors
/// If none of them is there.
pub fn cache_folder(flag: Option<&Path>) -> Result<PathBuf> {
    first_cache_folder(flag, std::env::var_os(CACHE_VARIABLE), std::env::home_dir())
}

fn first_cache_folder(flag: Option<&Path>, variable: Option<OsString>, home: Option<PathBuf>) -> Result<PathBuf> {
    let named = flag.map(Path::to_path_buf).or(variable.map(PathBuf::from)).filter(|path| !path.as_os_str().is_empty());
    let home = home.filter(|path| !path.as_os_str().is_empty());
    named.or(home.map(|home| home.join(".cache").join("autoresearch"))).ok_or_else(|| {
        anyhow!("cache folder: expected one in --cache-dir, {CACHE_VARIABLE} or the home folder, found none; hint: pass --cache-dir DIR")
    })
}

/// Gets a data set, trains its tokenizer and records both; what is there already is kept. `say` is told what was done.
///
/// # Errors
/// If an option is out of range, the cache cannot be written, the data cannot be fetched or read or holds no text, or a
/// tokenizer with another vocabulary is there and is not to be replaced.
pub fn prepare(options: &PrepareOptions, mut say: impl FnMut(&str)) -> Result<Prepared> {
    ensure!(
        options.num_shards > 0 || options.num_shards == -1,
        "--num-shards: expected a positive number or -1 for all, found {}; hint: 10 is the default",
        options.num_shards
    );
    let dataset = Dataset::from_argument(&options.dataset)?;
    let (name, folder) = place(&dataset, options.cache_dir.as_deref())?;
    fs::create_dir_all(&folder).map_err(|error| {
        anyhow!(
            "{}: the cache folder cannot be made ({error}); hint: name a folder that you may write to with --cache-dir or {CACHE_VARIABLE}",
            folder.display()
        )
    })?;
    say(&format!("data set {name} in {}", folder.display()));
    if let Dataset::Named(manifest) = &dataset {
        say(&format!("{name}: {}", manifest.description));
    }

    let kept = if options.retrain_tokenizer { None } else { kept_tokenizer(&folder, options, &mut say)? };
    let (corpus, files) = match &dataset {
        Dataset::Folder(corpus) => (Some(corpus.clone()), list_folder(corpus, &mut say)?),
        Dataset::Named(manifest) => (None, fetch(manifest, &folder, options, &mut say)?),
    };
    let place_of_files = corpus.as_deref().unwrap_or(&folder);
    let characters = match &dataset {
        Dataset::Named(manifest) => manifest.tokenizer_characters,
        Dataset::Folder(_) => FOLDER_TOKENIZER_CHARACTERS,
    };
    let train = files.documents(place_of_files, Split::Train)?;
    let validation = files.documents(place_of_files, Split::Validation)?;
    train.require_text(&format!("{}, training split", options.dataset))?;
    validation.require_text(&format!("{}, validation split", options.dataset))?;
    let sizes = files.sizes(place_of_files)?;
    let validation = ValidationText::of(&validation)?;
    let mean = validation.characters / validation.documents as u64;
    say(&format!(
        "{} training documents, {} validation documents; the latter have {mean} characters on average",
        train.len(),
        validation.documents
    ));
    if mean > LONG_DOCUMENT_CHARACTERS {
        say(
            "warning: of a document that is longer than a row of training, the rest is dropped, here most of the text; \
             hint: split long documents at blank lines into several rows or .jsonl lines",
        );
    }

    let tokenizer = match kept {
        Some(tokenizer) => {
            say(&format!("tokenizer: kept, vocabulary {}", tokenizer.vocab_size()));
            tokenizer
        }
        None => {
            let tokenizer = train_tokenizer(&train, options.vocab_size, characters)?;
            tokenizer.save(&folder)?;
            say(&format!("tokenizer: trained, vocabulary {}", tokenizer.vocab_size()));
            tokenizer
        }
    };
    let record = Record { format: RECORD_FORMAT, name, corpus, files, sizes, validation };
    let text = serde_json::to_string_pretty(&record).context("the record of a data set is valid JSON")?;
    write_atomically(&folder.join(RECORD), text.as_bytes())?;
    Ok(Prepared { folder, record, tokenizer: Arc::new(tokenizer) })
}

/// Documents of one split of a user's folder, straight from its files.
///
/// # Errors
/// If the folder or a file in it cannot be read, or the split is empty.
pub fn folder_documents(folder: &Path, split: Split) -> Result<Documents> {
    list_folder(folder, &mut |_| ())?.documents(folder, split)
}

impl Prepared {
    /// Opens what [`prepare`] made of `dataset`; with `vocab_size`, makes sure that the tokenizer has it.
    ///
    /// # Errors
    /// If the data set is not prepared, its record or tokenizer is damaged, its files are not those that were prepared (as
    /// far as names and sizes tell), or the vocabulary is another.
    pub fn open(dataset: &str, cache_dir: Option<&Path>, vocab_size: Option<usize>) -> Result<Self> {
        let (_, folder) = place(&Dataset::from_argument(dataset)?, cache_dir)?;
        let path = folder.join(RECORD);
        let command = prepare_again(dataset, vocab_size, None, cache_dir);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
                "{}: expected the prepared data set {dataset}, found no {RECORD}; hint: run `{command}`",
                folder.display()
            ),
            Err(error) => bail!(
                "{}: the cache cannot be read ({error}); hint: check --cache-dir, {CACHE_VARIABLE} and the folder's permissions",
                path.display()
            ),
        };
        let damaged = |error: serde_json::Error| {
            anyhow!(
                "{}: expected the record of a data set, found: {error}; hint: run `{command}` again",
                path.display()
            )
        };
        // The format alone first: another may have other fields.
        let AnyRecord { format } = serde_json::from_str(&text).map_err(damaged)?;
        ensure!(
            format == RECORD_FORMAT,
            "{}: expected format {RECORD_FORMAT}, found {format}; hint: run `{command}` again",
            path.display()
        );
        let record: Record = serde_json::from_str(&text).map_err(damaged)?;
        let command = prepare_again(dataset, vocab_size, record.fetched_shards(), cache_dir);
        record.check_files(&folder, &command)?;
        let tokenizer = Tokenizer::load(&folder).map_err(|error| anyhow!("{error:#}: `{command}`"))?;
        if let Some(expected) = vocab_size {
            check_vocabulary(&folder, &tokenizer, expected, &command)?;
        }
        Ok(Self { folder, record, tokenizer: Arc::new(tokenizer) })
    }

    /// The data set's name; of a folder, its last component and a hash of its path.
    pub fn name(&self) -> &str {
        &self.record.name
    }

    /// What `--dataset` takes for this data set wherever the program is run: its name, or the folder's absolute path.
    pub fn argument(&self) -> String {
        match &self.record.corpus {
            Some(folder) => folder.to_string_lossy().into_owned(),
            None => self.record.name.clone(),
        }
    }

    /// The data set's folder in the cache.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether this is the generated data set, whose information content is known.
    pub fn is_tales(&self) -> bool {
        self.record.files == Files::Generated
    }

    /// The tokenizer that was trained on the training split.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// SHA-256 of the validation text when it was prepared, in hexadecimal: equal where two runs were measured on the same.
    pub fn validation_sha256(&self) -> &str {
        &self.record.validation.sha256
    }

    /// Opens the documents of one split.
    ///
    /// # Errors
    /// If a file is missing or damaged.
    pub fn documents(&self, split: Split) -> Result<Documents> {
        self.record.files.documents(self.record.corpus.as_deref().unwrap_or(&self.folder), split)
    }
}

impl Record {
    /// How many training shards were fetched, where the data set comes in shards.
    fn fetched_shards(&self) -> Option<i64> {
        match &self.files {
            Files::Shards { train, .. } if self.corpus.is_none() => i64::try_from(train.len()).ok(),
            _ => None,
        }
    }

    /// Makes sure that the files are those that were prepared, by name and size.
    fn check_files(&self, folder: &Path, command: &str) -> Result<()> {
        let corpus = self.corpus.as_deref().unwrap_or(folder);
        for (name, expected) in &self.sizes {
            let path = corpus.join(name);
            let found = match fs::metadata(&path) {
                Ok(file) if file.len() == *expected => continue,
                Ok(file) => format!("one of {} bytes", file.len()),
                Err(error) => format!("none that can be read ({error})"),
            };
            bail!(
                "{}: expected the file of {expected} bytes that was prepared, found {found}; hint: run `{command}` again",
                path.display()
            );
        }
        if self.corpus.is_some()
            && let files = list_folder(corpus, &mut |_| ())?
            && let Some(other) = files.names().find(|name| !self.sizes.contains_key(*name))
        {
            bail!(
                "{}: expected the files that were prepared, found a new one, {other}; hint: run `{command}` again",
                corpus.display()
            );
        }
        Ok(())
    }
}

impl ValidationText {
    /// Reads all of `documents`.
    fn of(documents: &Documents) -> Result<Self> {
        let mut hash = Sha256::new();
        let (mut bytes, mut characters) = (0, 0);
        for text in documents.iter() {
            let text = text?;
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
            bytes += text.len() as u64;
            characters += text.chars().count() as u64;
        }
        Ok(Self { documents: documents.len(), bytes, characters, sha256: hexadecimal(&hash.finalize()) })
    }
}

impl Files {
    /// The files' names, none twice.
    fn names(&self) -> impl Iterator<Item = &String> {
        let (several, one): (&[String], _) = match self {
            Self::Shards { train, validation, .. } => (train, Some(validation)),
            Self::Rows { file, .. } => (&[], Some(file)),
            Self::Text { files } => (files, None),
            Self::Generated => (&[], None),
        };
        several.iter().chain(one)
    }

    /// Bytes of each file in `corpus`.
    fn sizes(&self, corpus: &Path) -> Result<BTreeMap<String, u64>> {
        let size = |name: &String| {
            let path = corpus.join(name);
            let file = fs::metadata(&path).map_err(|error| {
                anyhow!("{}: the file cannot be read ({error}); hint: check its permissions", path.display())
            })?;
            Ok((name.clone(), file.len()))
        };
        self.names().map(size).collect()
    }

    /// The documents of one split of the files in `corpus`.
    fn documents(&self, corpus: &Path, split: Split) -> Result<Documents> {
        let paths = |names: &[String]| names.iter().map(|name| corpus.join(name)).collect::<Vec<_>>();
        Ok(match (self, split) {
            (Files::Shards { column, train, .. }, Split::Train) => {
                Documents::from_parquet(ParquetShards::open(paths(train), column)?)
            }
            (Files::Shards { column, validation, .. }, Split::Validation) => {
                Documents::from_parquet(ParquetShards::open(paths(std::slice::from_ref(validation)), column)?)
            }
            (Files::Rows { column, file, first_validation_row, first_training_row }, split) => {
                let rows = match split {
                    Split::Train => *first_training_row..usize::MAX,
                    Split::Validation => *first_validation_row..*first_training_row,
                };
                Documents::from_parquet(ParquetShards::open_rows(paths(std::slice::from_ref(file)), column, rows)?)
            }
            (Files::Text { files }, split) => Documents::from_text(TextFiles::open(paths(files), split)?),
            (Files::Generated, Split::Train) => {
                Documents::generated(tales::TRAIN_DOCUMENTS, GENERATED_GROUP, tales::train_document)
            }
            (Files::Generated, Split::Validation) => {
                Documents::generated(tales::VALIDATION_DOCUMENTS, GENERATED_GROUP, tales::validation_document)
            }
        })
    }
}

/// A data set's name and its folder in the cache.
fn place(dataset: &Dataset, cache_dir: Option<&Path>) -> Result<(String, PathBuf)> {
    let name = match dataset {
        Dataset::Named(manifest) => manifest.name.clone(),
        Dataset::Folder(path) => {
            let last = path.file_name().map_or_else(|| "root".into(), |last| last.to_string_lossy());
            let hash = Sha256::digest(path.as_os_str().as_encoded_bytes());
            format!("{last}-{}", hexadecimal(&hash[..4]))
        }
    };
    let folder = cache_folder(cache_dir)?.join(&name);
    Ok((name, folder))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Makes sure that the data set's files are there and lists them.
fn fetch(manifest: &Manifest, folder: &Path, options: &PrepareOptions, say: &mut impl FnMut(&str)) -> Result<Files> {
    let column = manifest.text_column.clone();
    let mut fetch = |repository: &str, first: &str, others: &[String]| -> Result<()> {
        let fetched = Hub::new(repository).fetch(folder, first, others, options.download_workers)?;
        say(&format!("files from {repository}: {} fetched, {} there already", fetched.new, fetched.kept));
        Ok(())
    };
    match &manifest.source {
        Source::HubShards(hub) => {
            // -1 is no size: all of them.
            let train = hub.training_files(usize::try_from(options.num_shards).unwrap_or(usize::MAX));
            let validation = hub.validation_file();
            fetch(&hub.repository, &validation, &train)?;
            Ok(Files::Shards { column, train, validation })
        }
        Source::HubFile { repository, file, first_validation_row, first_training_row } => {
            fetch(repository, file, &[])?;
            Ok(Files::Rows {
                column,
                file: file.clone(),
                first_validation_row: *first_validation_row,
                first_training_row: *first_training_row,
            })
        }
        Source::Generated => Ok(Files::Generated),
    }
}

/// Which files of a user's folder are read, and how they are split.
fn list_folder(corpus: &Path, say: &mut impl FnMut(&str)) -> Result<Files> {
    let unreadable = |error: std::io::Error| {
        anyhow!("{}: the folder cannot be read ({error}); hint: check its permissions", corpus.display())
    };
    let (mut shards, mut texts) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(corpus).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        // A name that is no UTF-8 has none of the extensions, as far as we are concerned.
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        if name.starts_with('.') || !path.is_file() {
            continue;
        }
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("").to_ascii_lowercase();
        match extension.as_str() {
            "parquet" => shards.push(name.to_string()),
            "txt" | "md" | "jsonl" => texts.push(name.to_string()),
            _ => {}
        }
    }
    shards.sort();
    texts.sort();
    if let Some(validation) = shards.pop() {
        ensure!(
            !shards.is_empty(),
            "{}: expected a training shard beside the validation shard {validation}, which is the last .parquet file by name, found none; \
             hint: add a shard or split this one",
            corpus.display()
        );
        say(&format!("{} training shards, validation on {validation}, the last by name", shards.len()));
        if !texts.is_empty() {
            say(&format!("{} text files beside the .parquet files are not read", texts.len()));
        }
        return Ok(Files::Shards { column: FOLDER_TEXT_COLUMN.to_string(), train: shards, validation });
    }
    ensure!(
        !texts.is_empty(),
        "{}: expected .parquet, .txt, .md or .jsonl files, found none of them; hint: name the folder that holds the files itself",
        corpus.display()
    );
    say(&format!(
        "{} text files; .txt and .md are cut into documents of at most {LONGEST_PIECE} characters, at blank lines where there are any; \
         {SPLIT_RULE}",
        texts.len()
    ));
    Ok(Files::Text { files: texts })
}

/// The tokenizer in `folder`, if there is a whole one.
fn kept_tokenizer(folder: &Path, options: &PrepareOptions, say: &mut impl FnMut(&str)) -> Result<Option<Tokenizer>> {
    if !folder.join(RECORD).exists() {
        return Ok(None);
    }
    match Tokenizer::load(folder) {
        Ok(tokenizer) => {
            let PrepareOptions { dataset, vocab_size, num_shards, cache_dir, .. } = options;
            let shards = Some(*num_shards).filter(|shards| *shards != PrepareOptions::default().num_shards);
            let command = prepare_again(dataset, Some(*vocab_size), shards, cache_dir.as_deref());
            check_vocabulary(folder, &tokenizer, *vocab_size, &command)?;
            Ok(Some(tokenizer))
        }
        Err(error) => {
            say(&format!("tokenizer: trained again, as the one that is there cannot be used: {error:#}"));
            Ok(None)
        }
    }
}

/// `command` is the one that prepares the data set with the vocabulary that is expected.
fn check_vocabulary(folder: &Path, tokenizer: &Tokenizer, expected: usize, command: &str) -> Result<()> {
    let found = tokenizer.vocab_size();
    ensure!(
        found == expected,
        "{}: expected a tokenizer with a vocabulary of {expected}, found one of {found}; hint: keep --vocab-size {found}, or replace it \
         with `{command} --retrain-tokenizer`",
        folder.display()
    );
    Ok(())
}

/// The command that prepares `dataset` like this.
fn prepare_again(dataset: &str, vocab_size: Option<usize>, shards: Option<i64>, cache_dir: Option<&Path>) -> String {
    let vocab_size = vocab_size.map(|size| ["--vocab-size".to_string(), size.to_string()]);
    let shards = shards.map(|shards| ["--num-shards".to_string(), shards.to_string()]);
    let more = vocab_size.iter().chain(&shards).flatten().map(String::as_str).collect::<Vec<_>>();
    prepare_command(dataset, &more, cache_dir)
}

fn train_tokenizer(documents: &Documents, vocab_size: usize, characters: usize) -> Result<Tokenizer> {
    let options = TrainOptions { vocab_size, max_chars: characters, doc_cap_chars: DOCUMENT_CHARACTERS };
    let bar = ProgressBar::new(0);
    bar.set_style(ProgressStyle::with_template("tokenizer: {msg} {wide_bar} {percent}% [{elapsed_precise}]")?);
    let texts = documents.iter().map(|text| Ok(text?.to_string()));
    let tokenizer = Tokenizer::train(texts, &options, |stage, done, total| {
        if bar.message() != stage {
            bar.set_message(stage.to_string());
        }
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    tokenizer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::parquet_shards::tests::write_shard;

    const STORY: &str = "The cat sat on the mat, and the dog sat on the cat, and then the mat sat on the dog.";

    /// A corpus and a cache for it.
    struct Place {
        corpus: tempfile::TempDir,
        cache: tempfile::TempDir,
    }

    impl Place {
        fn new() -> Self {
            Self { corpus: tempfile::tempdir().unwrap(), cache: tempfile::tempdir().unwrap() }
        }

        fn shard(self, name: &str, texts: &[Option<&str>]) -> Self {
            write_shard(&self.corpus.path().join(name), texts);
            self
        }

        fn file(self, name: &str, content: &[u8]) -> Self {
            fs::write(self.corpus.path().join(name), content).unwrap();
            self
        }

        fn options(&self) -> PrepareOptions {
            PrepareOptions {
                dataset: self.corpus.path().to_str().unwrap().to_string(),
                cache_dir: Some(self.cache.path().to_path_buf()),
                vocab_size: 270,
                ..PrepareOptions::default()
            }
        }

        fn prepare(&self) -> (Prepared, String) {
            self.prepare_with(&self.options())
        }

        fn prepare_with(&self, options: &PrepareOptions) -> (Prepared, String) {
            let mut said = String::new();
            let prepared = prepare(options, |line| said += &format!("{line}\n")).unwrap();
            (prepared, said)
        }

        fn open(&self, vocab_size: Option<usize>) -> Result<Prepared> {
            Prepared::open(&self.options().dataset, Some(self.cache.path()), vocab_size)
        }

        fn refusal(&self) -> String {
            one_line(prepare(&self.options(), |_| {}))
        }
    }

    fn one_line<T>(result: Result<T>) -> String {
        let message = format!("{:#}", result.err().expect("refused"));
        assert!(message.contains("; hint: ") && !message.contains('\n'), "{message}");
        message
    }

    fn shards() -> Place {
        let other = STORY.to_uppercase();
        Place::new()
            .shard("a.parquet", &[Some(STORY), None])
            .shard("b.parquet", &[Some(&other)])
            .shard("c.parquet", &[Some("validation")])
    }

    fn texts(prepared: &Prepared, split: Split) -> Vec<String> {
        prepared.documents(split).unwrap().iter().map(|text| text.unwrap().to_string()).collect()
    }

    #[test]
    fn the_last_shard_by_name_is_validation_and_other_files_are_left_alone() {
        let place = shards().file("README.md", b"about").file(".hidden.parquet", b"no parquet");
        let (prepared, said) = place.prepare();
        assert_eq!(texts(&prepared, Split::Train), [STORY, "", &STORY.to_uppercase()]);
        assert_eq!(texts(&prepared, Split::Validation), ["validation"]);
        assert!(said.contains("validation on c.parquet") && said.contains("1 text files beside"), "{said}");
        assert!(!prepared.is_tales());
    }

    #[test]
    fn what_was_prepared_opens_again() {
        let place = shards();
        let (prepared, _) = place.prepare();
        let opened = place.open(Some(270)).unwrap();
        assert_eq!(opened.record, prepared.record);
        assert_eq!(opened.tokenizer().ranks(), prepared.tokenizer().ranks());
        assert_eq!(texts(&opened, Split::Train), texts(&prepared, Split::Train));
    }

    #[test]
    fn a_second_run_keeps_the_tokenizer_and_another_vocabulary_must_be_asked_for() {
        let place = shards();
        place.prepare();
        assert!(place.prepare().1.contains("tokenizer: kept, vocabulary 270"));
        let other = PrepareOptions { vocab_size: 280, ..place.options() };
        let message = one_line(prepare(&other, |_| {}));
        assert!(message.contains("vocabulary of 280, found one of 270"), "{message}");
        let again = prepare_command(&other.dataset, &["--vocab-size", "280"], other.cache_dir.as_deref());
        let retrain = format!("{again} --retrain-tokenizer");
        assert!(message.ends_with(&format!("`{retrain}`")), "{message}");
        assert!(one_line(place.open(Some(280))).ends_with(&format!("`{retrain}`")));
        let (prepared, said) = place.prepare_with(&PrepareOptions { retrain_tokenizer: true, ..other });
        assert!(said.contains("tokenizer: trained, vocabulary 280"), "{said}");
        assert_eq!(prepared.tokenizer().vocab_size(), 280);
        place.open(Some(280)).unwrap();
    }

    #[test]
    fn a_damaged_tokenizer_is_refused_and_prepare_repairs_it() {
        let place = shards();
        let (prepared, _) = place.prepare();
        fs::write(prepared.folder().join("tokenizer.tiktoken"), "damaged").unwrap();
        assert!(one_line(place.open(None)).contains("prepare --dataset"));
        assert!(place.prepare().1.contains("tokenizer: trained again"));
        place.open(None).unwrap();
    }

    #[test]
    fn text_files_are_split_by_the_stated_rule() {
        let lines: String = (0..60).map(|number| format!("{{\"text\": \"{number} {STORY}\"}}\n")).collect();
        let place = Place::new().file("a.jsonl", lines.as_bytes()).file("b.txt", STORY.as_bytes());
        let (prepared, said) = place.prepare();
        assert!(said.contains("SHA-256"), "{said}");
        let (train, validation) = (texts(&prepared, Split::Train), texts(&prepared, Split::Validation));
        assert_eq!(train.len() + validation.len(), 61);
        assert!(!validation.is_empty() && validation.iter().all(|text| !train.contains(text)));
    }

    #[test]
    fn a_single_file_is_split_by_row() {
        let place = shards().shard("all.parquet", &["test", "validation", "train", "more"].map(Some));
        let files = Files::Rows {
            column: "text".to_string(),
            file: "all.parquet".to_string(),
            first_validation_row: 1,
            first_training_row: 2,
        };
        let texts = |split| -> Vec<String> {
            let documents = files.documents(place.corpus.path(), split).unwrap();
            documents.iter().map(|text| text.unwrap().to_string()).collect()
        };
        assert_eq!(texts(Split::Validation), ["validation"]);
        assert_eq!(texts(Split::Train), ["train", "more"]);
    }

    #[test]
    fn a_single_shard_leaves_none_to_train_on() {
        let message = Place::new().shard("only.parquet", &[Some(STORY)]).refusal();
        assert!(message.contains("expected a training shard beside the validation shard only.parquet"), "{message}");
    }

    #[test]
    fn a_folder_without_texts_is_refused() {
        assert!(Place::new().file("image.png", b"").refusal().contains("expected .parquet, .txt, .md or .jsonl files"));
    }

    #[test]
    fn an_empty_corpus_is_refused() {
        let place = Place::new().shard("a.parquet", &[None, Some("")]).shard("b.parquet", &[Some(STORY)]);
        assert!(place.refusal().contains("training split: expected text, found no non-empty document among 2"));
        let place = Place::new().shard("a.parquet", &[Some(STORY)]).shard("b.parquet", &[]);
        assert!(place.refusal().contains("validation split: expected text, found no non-empty document among 0"));
    }

    #[test]
    fn a_truncated_shard_is_refused_by_name() {
        let place = shards();
        let path = place.corpus.path().join("b.parquet");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let message = place.refusal();
        assert!(message.contains("b.parquet: expected a complete parquet file"), "{message}");
    }

    #[test]
    fn what_is_not_prepared_names_the_command() {
        let place = shards();
        let message = one_line(place.open(None));
        let command = prepare_command(&place.options().dataset, &[], Some(place.cache.path()));
        assert!(message.ends_with(&format!("hint: run `{command}`")), "{message}");
        assert!(message.starts_with(place.cache.path().to_str().unwrap()), "{message}");
    }

    #[test]
    fn a_cache_that_cannot_be_used_is_refused() {
        let place = shards();
        let blocked = place.cache.path().join("blocked");
        fs::write(&blocked, "a file").unwrap();
        let options = PrepareOptions { cache_dir: Some(blocked.clone()), ..place.options() };
        assert!(one_line(prepare(&options, |_| {})).contains("the cache folder cannot be made"));
        assert!(one_line(Prepared::open(&options.dataset, Some(&blocked), None)).contains("the cache cannot be read"));
    }

    #[test]
    fn a_damaged_record_is_refused() {
        let place = shards();
        let (prepared, _) = place.prepare();
        for content in ["{", "{\"format\": 2}"] {
            fs::write(prepared.folder().join(RECORD), content).unwrap();
            assert!(one_line(place.open(None)).contains("expected the record of a data set"));
        }
        fs::write(prepared.folder().join(RECORD), "{\"format\": 1, \"old\": 1}").unwrap();
        assert!(one_line(place.open(None)).contains("expected format 2, found 1"));
    }

    #[test]
    fn files_that_changed_since_they_were_prepared_are_refused() {
        let place = Place::new().file("a.txt", b"one text").file("b.txt", b"another text");
        place.prepare_with(&PrepareOptions { vocab_size: 262, ..place.options() });
        place.open(None).unwrap();
        let place = place.file("c.txt", b"a new text");
        let message = one_line(place.open(None));
        assert!(message.contains("found a new one, c.txt") && message.contains("prepare --dataset"), "{message}");
        fs::remove_file(place.corpus.path().join("c.txt")).unwrap();
        place.open(None).unwrap();
        let place = place.file("a.txt", b"one text more");
        let message = one_line(place.open(None));
        assert!(
            message.contains("a.txt: expected the file of 8 bytes that was prepared, found one of 13"),
            "{message}"
        );
        fs::remove_file(place.corpus.path().join("a.txt")).unwrap();
        assert!(one_line(place.open(None)).contains("a.txt: expected the file of 8 bytes"));
    }

    #[test]
    fn the_validation_text_is_recorded_and_equal_texts_have_equal_hashes() {
        let (prepared, _) = shards().prepare();
        let expected = [&10u64.to_le_bytes()[..], b"validation"].concat();
        assert_eq!(prepared.validation_sha256(), hexadecimal(&Sha256::digest(&expected)));
        let ValidationText { documents, bytes, characters, .. } = prepared.record.validation;
        assert_eq!((documents, bytes, characters), (1, 10, 10));
        let other = shards().shard("c.parquet", &[Some("validation"), Some("")]).prepare().0;
        assert_ne!(other.validation_sha256(), prepared.validation_sha256());
        let more_to_train_on = shards().shard("b2.parquet", &[Some("more")]).prepare().0;
        assert_eq!(more_to_train_on.validation_sha256(), prepared.validation_sha256());
    }

    #[test]
    fn a_hint_asks_for_as_many_shards_as_there_are() {
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("climbmix");
        fs::create_dir(&folder).unwrap();
        let record = Record {
            format: RECORD_FORMAT,
            name: "climbmix".to_string(),
            corpus: None,
            files: Files::Shards {
                column: "text".to_string(),
                train: vec!["a.parquet".to_string(), "b.parquet".to_string()],
                validation: "c.parquet".to_string(),
            },
            sizes: BTreeMap::from([("a.parquet".to_string(), 7)]),
            validation: ValidationText { documents: 1, bytes: 1, characters: 1, sha256: String::new() },
        };
        fs::write(folder.join(RECORD), serde_json::to_string(&record).unwrap()).unwrap();
        let message = one_line(Prepared::open("climbmix", Some(cache.path()), Some(300)));
        assert!(
            message.contains("prepare --dataset climbmix --vocab-size 300 --num-shards 2 --cache-dir "),
            "{message}"
        );
    }

    #[test]
    fn long_documents_are_warned_about() {
        let long = STORY.repeat(400);
        let (_, said) = shards().shard("c.parquet", &[Some(&long)]).prepare();
        assert!(said.contains("1 validation documents; the latter have 33600 characters"), "{said}");
        assert!(said.contains("warning: ") && said.contains("hint: split long documents"), "{said}");
        assert!(!shards().prepare().1.contains("warning: "));
    }

    #[test]
    fn impossible_numbers_of_shards_are_refused() {
        for num_shards in [0, -2] {
            let options = PrepareOptions { num_shards, ..shards().options() };
            assert!(one_line(prepare(&options, |_| {})).starts_with("--num-shards: "));
        }
    }

    #[test]
    fn folders_of_the_same_name_do_not_share_a_cache() {
        let root = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|parent| root.path().join(parent).join("texts"));
        let names = [&one, &two].map(|path| place(&Dataset::Folder(path.clone()), Some(root.path())).unwrap().0);
        assert!(names.iter().all(|name| name.starts_with("texts-")) && names[0] != names[1], "{names:?}");
    }

    #[test]
    fn the_flag_wins_over_the_variable_and_that_over_the_home_folder() {
        let (flag, variable, home) = (Path::new("/flag"), OsString::from("/variable"), PathBuf::from("/home"));
        let folder = |flag, variable, home| first_cache_folder(flag, variable, home).unwrap();
        assert_eq!(folder(Some(flag), Some(variable.clone()), Some(home.clone())), flag);
        assert_eq!(folder(None, Some(variable), Some(home.clone())), Path::new("/variable"));
        assert_eq!(folder(None, Some(OsString::new()), Some(home.clone())), Path::new("/home/.cache/autoresearch"));
        assert!(one_line(first_cache_folder(None, None, None)).contains("--cache-dir"));
    }

    #[test]
    fn the_generated_data_set_needs_nothing() {
        let cache = tempfile::tempdir().unwrap();
        let options = PrepareOptions {
            dataset: "tales".to_string(),
            cache_dir: Some(cache.path().to_path_buf()),
            vocab_size: 300,
            ..PrepareOptions::default()
        };
        let prepared = prepare(&options, |_| {}).unwrap();
        assert!(prepared.is_tales());
        assert_eq!(*prepared.documents(Split::Train).unwrap().get(5).unwrap(), *tales::train_document(5));
        assert_eq!(*prepared.documents(Split::Validation).unwrap().get(5).unwrap(), *tales::validation_document(5));
    }
}
