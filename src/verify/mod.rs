//! Checks this build, on a device, against golden values: what a user runs to find out whether a driver computes right
//! numbers, and what the tests run.
//!
//! A folder of goldens holds files of six kinds, told apart by the start of their names: `tokenizer-*`, `packing-*`,
//! `model-*`, `model-*-optim`, `muon*` and `run-*`, each a JSON description, most with tensors in safetensors beside it.

mod model;
mod muon;
mod packing;
mod run;
mod tokenizer;
mod tolerances;

use crate::checkpoint::TensorFile;
use crate::config::Profile;
use crate::data::documents::{Documents, Split};
use crate::data::prepared::folder_documents;
use crate::model::Hyperparameters;
use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::tensor::{Device, FloatDType, TensorData};
use serde::de::DeserializeOwned;
use std::fmt;
use std::path::PathBuf;
use tempfile::TempDir;
use tolerances::Tolerances;

/// The goldens in `tests/golden/`.
const BUILT_IN: [(&str, &[u8]); 5] = [
    ("model-gqa.json", include_bytes!("../../tests/golden/model-gqa.json")),
    ("model-gqa.safetensors", include_bytes!("../../tests/golden/model-gqa.safetensors")),
    ("model-gqa-optim.safetensors", include_bytes!("../../tests/golden/model-gqa-optim.safetensors")),
    ("muon.json", include_bytes!("../../tests/golden/muon.json")),
    ("muon.safetensors", include_bytes!("../../tests/golden/muon.safetensors")),
];

/// One comparison with a golden value.
#[derive(Clone, Debug)]
pub struct Check {
    /// Name of the golden.
    pub case: String,
    /// What was compared.
    pub quantity: String,
    /// How far off it is.
    pub error: f64,
    /// How far off it may be.
    pub tolerance: f64,
}

impl Check {
    /// Whether the error is within the tolerance; a NaN is not.
    pub fn passed(&self) -> bool {
        self.error <= self.tolerance
    }
}

impl Check {
    fn new(case: &str, quantity: impl Into<String>, error: f64, tolerance: f64) -> Self {
        Self { case: case.to_owned(), quantity: quantity.into(), error, tolerance }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { case, quantity, error, tolerance } = self;
        let verdict = if self.passed() { "pass" } else { "fail" };
        write!(f, "{case}: {quantity}: error {error:.2e}, tolerance {tolerance:.0e}: {verdict}")
    }
}

/// What comes of a golden.
#[derive(Debug)]
pub enum Finding {
    /// A value was compared.
    Compared(Check),
    /// The golden was not looked at.
    LeftOut {
        /// Its name.
        case: String,
        /// Why.
        reason: &'static str,
    },
    /// The golden could not be compared; the error names it.
    Unusable(anyhow::Error),
}

/// The kinds of goldens.
#[derive(Clone, Copy)]
enum Kind {
    Tokenizer,
    Packing,
    Model,
    Muon,
    Run,
}

impl Kind {
    fn of(case: &str) -> Option<Self> {
        let kinds = [
            ("tokenizer-", Self::Tokenizer),
            ("packing-", Self::Packing),
            ("model-", Self::Model),
            ("muon", Self::Muon),
            ("run-", Self::Run),
        ];
        kinds.into_iter().find_map(|(prefix, kind)| case.starts_with(prefix).then_some(kind))
    }

    fn needs_corpus(self) -> bool {
        matches!(self, Self::Tokenizer | Self::Packing | Self::Run)
    }
}

/// The hyperparameters that the goldens were made with, whatever an experiment has made of `src/model.rs`.
fn reference_hyperparameters() -> Hyperparameters {
    Hyperparameters {
        embedding_lr: 0.6,
        unembedding_lr: 0.004,
        matrix_lr: 0.04,
        scalar_lr: 0.5,
        weight_decay: 0.2,
        adam_betas: (0.8, 0.95),
        warmup_ratio: 0.0,
        warmdown_ratio: 0.5,
        final_lr_fraction: 0.0,
        ..Hyperparameters::for_profile(Profile::H100)
    }
}

/// Writes the goldens that are built into the program to a temporary folder.
///
/// # Errors
/// If they cannot be written.
pub fn write_built_in_goldens() -> Result<TempDir> {
    let folder = tempfile::tempdir().context("cannot make a temporary folder for the built-in goldens")?;
    for (name, bytes) in BUILT_IN {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(folder)
}

/// A folder of goldens and what its cases need.
#[derive(Debug)]
pub struct Goldens {
    /// The folder.
    pub folder: PathBuf,
    /// Text that the tokenizer, packing and run goldens were made from.
    pub corpus: Option<PathBuf>,
    /// Where to compute.
    pub device: Device,
    /// Type of embeddings and activations.
    pub compute_type: FloatDType,
    /// Type in which the device multiplies matrices: float32 as the goldens, or less with wider tolerances.
    pub product_type: FloatDType,
}

impl Goldens {
    /// Runs every case and calls `report` with what comes of it, a case at a time.
    ///
    /// # Errors
    /// If the folder cannot be read or holds no goldens, or there are no tolerances for the type of the products.
    pub fn verify(&self, mut report: impl FnMut(Finding)) -> Result<()> {
        let tolerances = Tolerances::of(self.product_type)?;
        for case in self.cases()? {
            let Some(kind) = Kind::of(&case) else {
                let reason =
                    "its name is of no known kind; hint: names start with tokenizer-, packing-, model-, muon or run-";
                report(Finding::LeftOut { case, reason });
                continue;
            };
            if kind.needs_corpus() && self.corpus.is_none() {
                report(Finding::LeftOut { case, reason: "it needs the corpus; hint: --corpus names its folder" });
                continue;
            }
            match self.run(kind, &case, tolerances) {
                Ok(checks) => checks.into_iter().map(Finding::Compared).for_each(&mut report),
                Err(error) => report(Finding::Unusable(unusable(&case, &error))),
            }
        }
        Ok(())
    }

    /// Names of the cases in the folder: its JSON files.
    fn cases(&self) -> Result<Vec<String>> {
        let folder = self.folder.display();
        let entries = std::fs::read_dir(&self.folder).map_err(|error| {
            anyhow!("{folder}: cannot read the golden folder ({error}); hint: --golden names a folder")
        })?;
        let mut cases = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                cases.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
            }
        }
        cases.sort();
        if cases.is_empty() {
            bail!("{folder} holds no goldens, expected .json files; hint: --golden names a folder of them");
        }
        Ok(cases)
    }

    fn run(&self, kind: Kind, case: &str, tolerances: &Tolerances) -> Result<Vec<Check>> {
        let checks = match kind {
            Kind::Tokenizer => tokenizer::checks(self, case),
            Kind::Packing => packing::checks(self, case),
            Kind::Run => run::checks(self, case, tolerances),
            Kind::Model => model::checks(self, case, tolerances),
            Kind::Muon => muon::checks(self, case, tolerances),
        }?;
        ensure!(!checks.is_empty(), "it holds nothing to compare");
        Ok(checks)
    }

    /// Documents of one split of the corpus.
    fn documents(&self, split: Split) -> Result<Documents> {
        let corpus = self.corpus.as_ref().context("this golden needs the corpus; hint: --corpus names its folder")?;
        folder_documents(corpus, split)
    }

    fn json<T: DeserializeOwned>(&self, case: &str) -> Result<T> {
        let path = self.folder.join(format!("{case}.json"));
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} has not the expected form", path.display()))
    }

    fn tensors(&self, name: &str) -> Result<TensorFile> {
        TensorFile::read(&self.folder.join(format!("{name}.safetensors")))
    }
}

/// Why a golden cannot be compared, with a hint where there is none.
fn unusable(case: &str, error: &anyhow::Error) -> anyhow::Error {
    let message = format!("golden '{case}': {error:#}");
    match message.contains("; hint: ") {
        true => anyhow!(message),
        false => anyhow!("{message}; hint: it may be damaged, tests/golden/ shows the form"),
    }
}

/// ‖a − b‖ / ‖b‖ over all elements; ‖a‖ where b is zero.
///
/// # Errors
/// If the two have other numbers of elements.
fn relative_error(found: &TensorData, golden: &TensorData) -> Result<f64> {
    let (mut difference, mut norm) = (0.0, 0.0);
    for (a, b) in paired(found, golden)? {
        difference += (a - b).powi(2);
        norm += b.powi(2);
    }
    Ok(if norm == 0.0 { difference.sqrt() } else { difference.sqrt() / norm.sqrt() })
}

/// Mean of |a − b| over all elements.
///
/// # Errors
/// If the two have other numbers of elements.
fn mean_absolute_difference(found: &TensorData, golden: &TensorData) -> Result<f64> {
    let elements = golden.num_elements() as f64;
    Ok(paired(found, golden)?.map(|(a, b)| (a - b).abs()).sum::<f64>() / elements)
}

fn paired<'a>(found: &'a TensorData, golden: &'a TensorData) -> Result<impl Iterator<Item = (f64, f64)> + 'a> {
    let (computed, expected) = (found.shape(), golden.shape());
    ensure!(
        found.num_elements() == golden.num_elements(),
        "a golden has the shape {expected:?}, this program computes {computed:?}"
    );
    Ok(found.iter::<f64>().zip(golden.iter::<f64>()))
}

/// The shape and the token ids of tensor `name` of `file`.
///
/// # Errors
/// If it is not there, is empty or holds what is no id of a vocabulary of `vocab_size`.
fn token_ids(file: &TensorFile, name: &str, vocab_size: usize) -> Result<(Vec<usize>, Vec<u32>)> {
    let data = file.get(name)?;
    ensure!(data.num_elements() > 0, "'{name}' is empty, found the shape {:?}", data.shape());
    let ids = data.iter::<i64>().map(|id| match u32::try_from(id) {
        Ok(id) if (id as usize) < vocab_size => Ok(id),
        _ => bail!("'{name}' must hold ids below {vocab_size}, found {id}"),
    });
    Ok((data.shape().to_vec(), ids.collect::<Result<_>>()?))
}
