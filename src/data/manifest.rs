//! The data sets known by name: one small manifest each, compiled into the program.

use anyhow::{Result, bail};
use serde::Deserialize;
use std::path::{Path, PathBuf};

const MANIFESTS: [(&str, &str); 3] = [
    ("climbmix", include_str!("../../data/climbmix.toml")),
    ("tinystories", include_str!("../../data/tinystories.toml")),
    ("tales", include_str!("../../data/tales.toml")),
];

/// One data set: what it is and where its text comes from.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The name that `--dataset` takes.
    #[serde(skip)]
    pub name: String,
    /// One line for people.
    pub description: String,
    /// The column that holds a document's text.
    pub text_column: String,
    /// Size of the vocabulary unless another is asked for.
    pub vocab_size: usize,
    /// The tokenizer is trained on this many characters of the training split, or on all if there are fewer.
    pub tokenizer_characters: usize,
    /// Where the documents are.
    pub source: Source,
}

/// Where a named data set's documents are.
#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Source {
    /// Numbered parquet files of a Hugging Face data set, one of them kept for validation.
    HubShards(HubShards),
    /// One parquet file of a Hugging Face data set, split by row.
    HubFile {
        /// `owner/name` on the hub.
        repository: String,
        /// The file's name there and here.
        file: String,
        /// The first row of the validation split.
        first_validation_row: usize,
        /// The first row of the training split, where the validation split ends.
        first_training_row: usize,
    },
    /// The program writes the documents itself.
    Generated,
}

/// Numbered parquet files of a Hugging Face data set.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HubShards {
    /// `owner/name` on the hub.
    pub repository: String,
    /// What stands before the shard's number in a file name.
    pub file_prefix: String,
    /// The number is padded with zeros to this many digits.
    pub file_digits: usize,
    /// What stands after the number.
    pub file_suffix: String,
    /// How many files there are, the validation shard included.
    pub shards: usize,
    /// The shard that is never trained on.
    pub validation_shard: usize,
}

impl HubShards {
    /// The file name of the validation shard.
    pub fn validation_file(&self) -> String {
        self.file(self.validation_shard)
    }

    /// The file names of the first `wanted` training shards, or of all if there are fewer.
    pub fn training_files(&self, wanted: usize) -> Vec<String> {
        let training = (0..self.shards).filter(|&shard| shard != self.validation_shard);
        training.take(wanted).map(|shard| self.file(shard)).collect()
    }

    fn file(&self, shard: usize) -> String {
        let Self { file_prefix, file_digits, file_suffix, .. } = self;
        format!("{file_prefix}{shard:0file_digits$}{file_suffix}")
    }
}

impl Manifest {
    /// The manifest of this name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        let (name, text) = MANIFESTS.iter().find(|(known, _)| *known == name)?;
        let mut manifest: Self = toml::from_str(text).expect("embedded manifests are valid, a test reads them all");
        manifest.name = (*name).to_string();
        Some(manifest)
    }

    /// The names of all manifests.
    pub fn names() -> impl Iterator<Item = &'static str> {
        MANIFESTS.iter().map(|(name, _)| *name)
    }
}

/// What `--dataset` names.
#[derive(Clone, Debug)]
pub enum Dataset {
    /// A data set with a manifest.
    Named(Manifest),
    /// The absolute path of a folder with the user's own files.
    Folder(PathBuf),
}

impl Dataset {
    /// Reads the value of `--dataset`; a data set's name wins over a folder of the same name.
    ///
    /// # Errors
    /// If it is neither a known name nor a readable folder.
    pub fn from_argument(argument: &str) -> Result<Self> {
        if let Some(manifest) = Manifest::named(argument) {
            return Ok(Self::Named(manifest));
        }
        let known = Manifest::names().collect::<Vec<_>>().join(", ");
        match Path::new(argument).canonicalize() {
            Ok(folder) if folder.is_dir() => Ok(Self::Folder(folder)),
            Ok(file) => bail!(
                "--dataset {argument}: expected a data set ({known}) or a folder, found the file {}; hint: name the folder that holds it",
                file.display()
            ),
            Err(error) => bail!(
                "--dataset {argument}: expected a data set ({known}) or a folder, found neither ({error}); hint: check the spelling and the path"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_manifest_is_valid_and_keeps_its_validation_apart() {
        for name in Manifest::names() {
            let manifest = Manifest::named(name).unwrap();
            assert_eq!(manifest.name, name);
            match manifest.source {
                Source::HubShards(hub) => assert!(hub.validation_shard < hub.shards),
                Source::HubFile { first_validation_row, first_training_row, .. } => {
                    assert!(first_validation_row < first_training_row)
                }
                Source::Generated => assert_eq!(name, "tales"),
            }
        }
    }

    #[test]
    fn the_validation_shard_is_never_trained_on() {
        let Source::HubShards(climbmix) = Manifest::named("climbmix").unwrap().source else {
            panic!("climbmix is made of shards");
        };
        assert_eq!(climbmix.validation_file(), "shard_06542.parquet");
        assert_eq!(climbmix.training_files(2), ["shard_00000.parquet", "shard_00001.parquet"]);
        let all = climbmix.training_files(usize::MAX);
        assert_eq!(all.len(), 6542);
        assert!(!all.contains(&climbmix.validation_file()));
        let first = HubShards { validation_shard: 0, ..climbmix };
        assert_eq!(first.training_files(1), ["shard_00001.parquet"]);
    }

    #[test]
    fn an_unknown_data_set_is_refused_with_the_known_names() {
        let error = Dataset::from_argument("climbmx").unwrap_err().to_string();
        assert!(error.contains("climbmx") && error.contains("climbmix, tinystories, tales"), "{error}");
        assert!(error.contains("hint: "), "{error}");
    }

    #[test]
    fn a_file_is_no_data_set() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = Dataset::from_argument(file.path().to_str().unwrap()).unwrap_err().to_string();
        assert!(error.contains("found the file"), "{error}");
    }
}
