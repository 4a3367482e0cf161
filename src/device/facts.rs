//! What is known of a GPU: name, architecture, memory.

use std::fmt;

/// A GPU as its driver describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuFacts {
    /// Marketing name, such as `NVIDIA H200`.
    pub name: String,
    /// Instruction set: `sm_90` for compute capability 9.0, or AMD's target such as `gfx1151`.
    pub architecture: Option<String>,
    /// Memory, by whoever tells.
    pub memory: GpuMemory,
    /// What it is reached through.
    pub through: String,
}

/// How much memory a GPU has. Drivers differ on shared memory, so each number comes with its source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuMemory {
    /// Bytes by the driver's programming interface, which is what libtorch goes by.
    pub by_driver: Option<u64>,
    /// Bytes by the Linux kernel: (the GPU's own, main memory that it may use), AMD only.
    pub by_kernel: Option<(u64, u64)>,
}

impl fmt::Display for GpuFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (", self.name)?;
        if let Some(architecture) = &self.architecture {
            write!(f, "{architecture}, ")?;
        }
        write!(f, "{}{})", self.memory, self.through)
    }
}

/// The driver's number; the kernel's too where the two do not agree, as on APUs.
impl fmt::Display for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        if let Some(bytes) = self.by_driver {
            write!(f, "{:.1} GiB by the driver, ", gib(bytes))?;
        }
        if let Some((own, main)) = self.by_kernel
            && self.by_driver.is_none_or(|bytes| bytes.abs_diff(own) > own / 20)
        {
            write!(f, "{:.1} GiB own + {:.1} GiB of main memory by the kernel, ", gib(own), gib(main))?;
        }
        Ok(())
    }
}

/// Whether GPUs of `architecture` have instructions for bfloat16.
///
/// NVIDIA: from compute capability 8.0 (CUDA C++ Programming Guide, "Arithmetic Instructions"). AMD: the matrix cores of
/// CDNA and of RDNA 3 and later (rocm.docs.amd.com, "Data types and precision support").
pub fn computes_in_bf16(architecture: &str) -> bool {
    if let Some(capability) = architecture.strip_prefix("sm_") {
        return capability.parse::<u32>().is_ok_and(|capability| capability >= 80);
    }
    let cdna = ["gfx908", "gfx90a", "gfx940", "gfx941", "gfx942", "gfx950"];
    // The last two digits are minor version and stepping.
    let major = architecture.strip_prefix("gfx").and_then(|digits| digits.get(..digits.len().saturating_sub(2)));
    let is_rdna3_or_later = major.and_then(|major| major.parse::<u32>().ok()).is_some_and(|major| major >= 11);
    cdna.contains(&architecture) || is_rdna3_or_later
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn described(name: &str, architecture: &str, memory: GpuMemory) -> String {
        GpuFacts {
            name: name.to_owned(),
            architecture: Some(architecture.to_owned()),
            memory,
            through: "libtorch".to_owned(),
        }
        .to_string()
    }

    #[test]
    fn a_gpu_is_described_in_one_line_with_the_source_of_its_memory() {
        let memory = GpuMemory { by_driver: Some(150_110_011_392), by_kernel: None };
        assert_eq!(described("NVIDIA H200", "sm_90", memory), "NVIDIA H200 (sm_90, 139.8 GiB by the driver, libtorch)");
        let unknown = GpuFacts {
            name: "GPU 0".to_owned(),
            architecture: None,
            memory: GpuMemory::default(),
            through: "libtorch".to_owned(),
        };
        assert_eq!(unknown.to_string(), "GPU 0 (libtorch)");
    }

    #[test]
    fn the_kernels_memory_is_shown_where_the_driver_says_otherwise() {
        let apu = GpuMemory { by_driver: Some(62 * GIB), by_kernel: Some((GIB / 2, 62 * GIB)) };
        let line = described("AMD Radeon 8060S", "gfx1151", apu);
        assert!(
            line.contains("62.0 GiB by the driver, 0.5 GiB own + 62.0 GiB of main memory by the kernel, lib"),
            "{line}"
        );
        let card = GpuMemory { by_driver: Some(191 * GIB), by_kernel: Some((192 * GIB, 500 * GIB)) };
        assert!(described("AMD Instinct MI300X", "gfx942", card).contains("(gfx942, 191.0 GiB by the driver, lib"));
    }

    #[test]
    fn bfloat16_needs_ampere_cdna_or_rdna3() {
        for architecture in ["sm_80", "sm_90", "sm_120", "gfx908", "gfx90a", "gfx942", "gfx1100", "gfx1151", "gfx1201"]
        {
            assert!(computes_in_bf16(architecture), "{architecture}");
        }
        for architecture in ["sm_75", "sm_61", "gfx906", "gfx90c", "gfx1030", "gfx1036", "gfx", "", "sm_"] {
            assert!(!computes_in_bf16(architecture), "{architecture}");
        }
    }
}
