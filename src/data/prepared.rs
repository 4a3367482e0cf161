//! What `prepare` leaves in the cache: a folder per data set with its shards, its tokenizer and a record of both.

use super::command::prepare_command;
use super::documents::{Documents, Split};
use super::manifest::Dataset;
use super::parquet_shards::ParquetShards;
use super::tales;
use super::text_files::{LONGEST_PIECE, SPLIT_RULE, TextFiles};
use crate::tokenizer::{Tokenizer, hexadecimal};
use anyhow::{Result, anyhow, bail, ensure};
use burn_dataset::Dataset as _;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The environment variable that names the cache folder.
pub const CACHE_VARIABLE: &str = "AUTORESEARCH_CACHE_DIR";

pub(super) const RECORD: &str = "prepared.json";

pub(super) const RECORD_FORMAT: u32 = 2;

/// Generated documents form groups of this size.
const GENERATED_GROUP: usize = 1024;

/// The column of a user's own parquet files.
const FOLDER_TEXT_COLUMN: &str = "text";

/// A data set that is ready to train on, with its tokenizer.
#[derive(Debug)]
pub struct Prepared {
    pub(super) folder: PathBuf,
    pub(super) record: Record,
    pub(super) tokenizer: Arc<Tokenizer>,
}

/// What `prepared.json` holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    pub(super) format: u32,
    pub(super) name: String,
    /// The user's folder with the files; where there is none, they lie beside the record.
    pub(super) corpus: Option<PathBuf>,
    pub(super) files: Files,
    /// Bytes of each file.
    pub(super) sizes: BTreeMap<String, u64>,
    pub(super) validation: ValidationText,
}

/// The format of a record of any version.
#[derive(Deserialize)]
struct AnyRecord {
    format: u32,
}

/// What the metric is computed on, so that runs can tell whether they were measured on the same text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ValidationText {
    pub(super) documents: usize,
    /// Bytes of UTF-8.
    pub(super) bytes: u64,
    pub(super) characters: u64,
    /// SHA-256, over each document its length in bytes (8 bytes, little-endian) and then its text; in hexadecimal.
    pub(super) sha256: String,
}

/// Which files hold the documents, by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Files {
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

pub(super) fn first_cache_folder(
    flag: Option<&Path>,
    variable: Option<OsString>,
    home: Option<PathBuf>,
) -> Result<PathBuf> {
    let named = flag.map(Path::to_path_buf).or(variable.map(PathBuf::from)).filter(|path| !path.as_os_str().is_empty());
    let home = home.filter(|path| !path.as_os_str().is_empty());
    named.or(home.map(|home| home.join(".cache").join("autoresearch"))).ok_or_else(|| {
        anyhow!("cache folder: expected one in --cache-dir, {CACHE_VARIABLE} or the home folder, found none; hint: pass --cache-dir DIR")
    })
}

impl Prepared {
    /// Opens what [`prepare`](super::prepare::prepare) made of `dataset`; with `vocab_size`, makes sure that the tokenizer has it.
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

    /// Documents in the validation text.
    pub fn validation_documents(&self) -> usize {
        self.record.validation.documents
    }

    /// Bytes of the validation text.
    pub fn validation_bytes(&self) -> u64 {
        self.record.validation.bytes
    }

    /// SHA-256 of the tokenizer's files, in hexadecimal.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn tokenizer_sha256(&self) -> Result<String> {
        Tokenizer::files_sha256(&self.folder)
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
    pub(super) fn of(documents: &Documents) -> Result<Self> {
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
    pub(super) fn sizes(&self, corpus: &Path) -> Result<BTreeMap<String, u64>> {
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
    pub(super) fn documents(&self, corpus: &Path, split: Split) -> Result<Documents> {
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

/// Which files of a user's folder are read, and how they are split.
pub(super) fn list_folder(corpus: &Path, say: &mut impl FnMut(&str)) -> Result<Files> {
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

/// Documents of one split of a user's folder, straight from its files.
///
/// # Errors
/// If the folder or a file in it cannot be read, or the split is empty.
pub fn folder_documents(folder: &Path, split: Split) -> Result<Documents> {
    list_folder(folder, &mut |_| ())?.documents(folder, split)
}

/// A data set's name and its folder in the cache.
pub(super) fn place(dataset: &Dataset, cache_dir: Option<&Path>) -> Result<(String, PathBuf)> {
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

/// `command` is the one that prepares the data set with the vocabulary that is expected.
pub(super) fn check_vocabulary(folder: &Path, tokenizer: &Tokenizer, expected: usize, command: &str) -> Result<()> {
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
pub(super) fn prepare_again(
    dataset: &str,
    vocab_size: Option<usize>,
    shards: Option<i64>,
    cache_dir: Option<&Path>,
) -> String {
    let vocab_size = vocab_size.map(|size| ["--vocab-size".to_string(), size.to_string()]);
    let shards = shards.map(|shards| ["--num-shards".to_string(), shards.to_string()]);
    let more = vocab_size.iter().chain(&shards).flatten().map(String::as_str).collect::<Vec<_>>();
    prepare_command(dataset, &more, cache_dir)
}
