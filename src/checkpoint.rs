//! Tensors in safetensors files: reading, writing, and weights into a model by name.

use crate::atomic_file::write_atomically;
use crate::parameters::{Parameter, parameters, with_values};
use anyhow::{Context, Result, anyhow, bail};
use burn::module::Module;
use burn::tensor::{DType, Tensor, TensorData};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The contents of a safetensors file.
#[derive(Debug)]
pub struct TensorFile {
    /// The header's free text, by key.
    pub metadata: HashMap<String, String>,
    /// The tensors, by name.
    pub tensors: BTreeMap<String, TensorData>,
}

impl TensorFile {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// If it cannot be read, is damaged, or holds a type other than float32, bfloat16, float16, int32 or int64.
    pub fn read(path: &Path) -> Result<Self> {
        let hint = "hint: it may be missing, damaged or cut off: write it anew";
        let name = path.display();
        let bytes = std::fs::read(path).map_err(|error| anyhow!("{name}: cannot read it ({error}); {hint}"))?;
        Self::parse(&bytes)
            .map_err(|error| anyhow!("{name}: expected a whole safetensors file, found: {error:#}; {hint}"))
    }

    /// Reads the file's bytes.
    ///
    /// # Errors
    /// As [`TensorFile::read`].
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let file = SafeTensors::deserialize(bytes)?;
        let tensors = file.iter().map(|(name, view)| {
            let dtype = match view.dtype() {
                Dtype::F32 => DType::F32,
                Dtype::BF16 => DType::BF16,
                Dtype::F16 => DType::F16,
                Dtype::I32 => DType::I32,
                Dtype::I64 => DType::I64,
                other => bail!("tensor '{name}' has the type {other:?}, expected F32, BF16, F16, I32 or I64"),
            };
            let bytes = burn::tensor::Bytes::from_bytes_vec(view.data().to_vec());
            Ok((name.to_owned(), TensorData::from_bytes(bytes, view.shape().to_vec(), dtype)))
        });
        Ok(Self { metadata, tensors: tensors.collect::<Result<_>>()? })
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// If there is none.
    pub fn get(&self, name: &str) -> Result<&TensorData> {
        self.tensors.get(name).with_context(|| format!("there is no tensor '{name}'"))
    }

    /// The tensors whose names start with `prefix`, without it.
    pub fn with_prefix<'a>(&'a self, prefix: &'a str) -> BTreeMap<&'a str, &'a TensorData> {
        self.tensors.iter().filter_map(|(name, data)| Some((name.strip_prefix(prefix)?, data))).collect()
    }
}

/// Writes `values` and `metadata` to a safetensors file at `path`, whole or not at all.
///
/// # Errors
/// If a value cannot be read from its device or the file cannot be written.
pub fn write(path: &Path, values: &[Parameter], metadata: HashMap<String, String>) -> Result<()> {
    let mut datas = Vec::new();
    for parameter in values {
        let data = parameter.value.to_data();
        let dtype = match data.dtype() {
            DType::F32 => Dtype::F32,
            DType::BF16 => Dtype::BF16,
            DType::F16 => Dtype::F16,
            other => bail!("cannot store '{}' of type {other:?} in {}", parameter.name, path.display()),
        };
        datas.push((parameter, dtype, data));
    }
    let views = datas.iter().map(|(parameter, dtype, data)| {
        Ok((parameter.name.as_str(), TensorView::new(*dtype, parameter.shape.clone(), data.as_bytes())?))
    });
    let views = views.collect::<Result<Vec<_>>>()?;
    let bytes = safetensors::serialize(views, Some(metadata))?;
    write_atomically(path, &bytes)
}

/// `model` with the weights of `tensors`, cast to the types that the model keeps.
///
/// # Errors
/// If a parameter is missing, has another shape, or a tensor belongs to no parameter.
pub fn load_weights<M: Module>(model: M, tensors: &BTreeMap<&str, &TensorData>) -> Result<M> {
    let mut values = BTreeMap::new();
    for parameter in parameters(&model) {
        let name = &parameter.name;
        let Some(data) = tensors.get(name.as_str()) else {
            bail!("the weights lack '{name}'; hint: they were made by another src/model.rs");
        };
        if data.shape()[..] != parameter.shape[..] {
            bail!(
                "the weights have '{name}' of shape {:?}, the model expects {:?}; hint: they were made by another src/model.rs or configuration",
                data.shape(),
                parameter.shape
            );
        }
        let flat =
            TensorData::clone(data).convert::<f32>().try_into_vec::<f32>().expect("float32 after the conversion");
        let elements = flat.len();
        let options = (&parameter.value.device(), parameter.value.dtype());
        let flat = TensorData::new(flat, [elements]);
        values.insert(name.clone(), Tensor::<1>::from_data(flat, options));
    }
    if let Some(name) = tensors.keys().find(|name| !values.contains_key(**name)) {
        bail!("the weights have '{name}', which the model has not; hint: they were made by another src/model.rs");
    }
    Ok(with_values(model, values))
}
