//! Making a data set ready: its files, its tokenizer, and the record of both.

use super::documents::{Documents, Split};
use super::download::Hub;
use super::manifest::{Dataset, Manifest, Source};
use super::prepared::{
    CACHE_VARIABLE, Files, Prepared, RECORD, RECORD_FORMAT, Record, ValidationText, check_vocabulary, list_folder,
    place, prepare_again,
};
use crate::atomic_file::write_atomically;
use crate::tokenizer::{Tokenizer, TrainOptions};
use anyhow::{Context, Result, anyhow, ensure};
use burn_dataset::Dataset as _;
use indicatif::{ProgressBar, ProgressStyle};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The data set of [`PrepareOptions::default`].
const DEFAULT_DATASET: &str = "climbmix";
/// The size of the vocabulary where none is named.
pub const DEFAULT_VOCAB_SIZE: usize = 8192;
/// How much of a user's own text the tokenizer is trained on.
const FOLDER_TOKENIZER_CHARACTERS: usize = 1_000_000_000;
/// The tokenizer sees this much of the start of each document.
const DOCUMENT_CHARACTERS: usize = 10_000;
/// Documents that are longer on average lose most of their text, as packing keeps at most one row of each.
const LONG_DOCUMENT_CHARACTERS: u64 = 20_000;
/// What to prepare, as on the command line.
#[derive(Clone, Debug)]
pub struct PrepareOptions {
    /// A data set's name or a folder.
    pub dataset: String,
    /// The cache folder; see [`cache_folder`](super::prepared::cache_folder) for what none means.
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
    use crate::data::command::prepare_command;
    use crate::data::parquet_shards::tests::write_shard;
    use crate::data::prepared::first_cache_folder;
    use crate::data::tales;
    use crate::tokenizer::hexadecimal;
    use sha2::{Digest, Sha256};
    use std::collections::BTreeMap;
    use std::ffi::OsString;

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
