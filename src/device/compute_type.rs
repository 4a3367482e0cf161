//! In which type a device multiplies matrices.

use burn::tensor::FloatDType;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The type that is asked for, as PyTorch names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeType {
    /// What suits the device: bfloat16 on GPUs through libtorch, float16 on GPUs through wgpu that have instructions for it, else
    /// float32.
    #[default]
    Auto,
    /// 24 significant bits.
    Float32,
    /// 8 significant bits, the range of float32.
    Bfloat16,
    /// 11 significant bits, up to 65504.
    Float16,
}

impl fmt::Display for ComputeType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Float32 => "float32",
            Self::Bfloat16 => "bfloat16",
            Self::Float16 => "float16",
        })
    }
}

/// `dtype` as PyTorch names it.
pub fn type_name(dtype: FloatDType) -> String {
    match dtype {
        FloatDType::F32 => "float32".to_owned(),
        FloatDType::F16 => "float16".to_owned(),
        FloatDType::BF16 => "bfloat16".to_owned(),
        other => format!("{other:?}").to_lowercase(),
    }
}
