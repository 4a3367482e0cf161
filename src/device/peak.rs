//! How many bfloat16 operations a second a GPU can make at most: the denominator of `mfu`.

use anyhow::{Result, bail};
use std::ffi::OsStr;

/// Environment variable that replaces the table.
pub const VARIABLE: &str = "GPU_BF16_PEAK_FLOPS";

/// Words of a GPU's name, all of which it must have, and its dense bfloat16 peak with sums in float32. The first row that
/// matches counts: special ones come first. Vendors often print the number for sparse matrices, which is twice as much.
const PEAKS: &[(&[&str], f64)] = &[
    // NVIDIA Blackwell datasheet and DGX B300 datasheet.
    (&["GB200"], 2500e12),
    (&["GB300"], 2500e12),
    (&["B200"], 2250e12),
    (&["B300"], 2250e12),
    (&["B100"], 1750e12),
    // NVIDIA H100, H200 and GH200 datasheets; the SXM forms have no word of their own. H800: the H100 with slower links.
    // NVIDIA prints no number for the H20: the one that public tables agree on.
    (&["H100", "PCIe"], 756.5e12),
    (&["H100", "NVL"], 835.5e12),
    (&["H100"], 989.5e12),
    (&["H200", "NVL"], 835.5e12),
    (&["H200"], 989.5e12),
    (&["GH200"], 989.5e12),
    (&["H800", "PCIe"], 756.5e12),
    (&["H800"], 989.5e12),
    (&["H20"], 148e12),
    // NVIDIA A100, A30, A40 and A10 datasheets; AWS's page on the G5 instances for the A10G.
    (&["A100"], 312e12),
    (&["A800"], 312e12),
    (&["A30"], 165e12),
    (&["A40"], 149.7e12),
    (&["A10"], 125e12),
    (&["A10G"], 70e12),
    // NVIDIA L40S, L40 and L4 datasheets.
    (&["L40S"], 362.05e12),
    (&["L40"], 181.05e12),
    (&["L4"], 121e12),
    // NVIDIA RTX 6000 Ada and RTX A6000 datasheets.
    (&["RTX", "6000", "Ada"], 364.2e12),
    (&["RTX", "A6000"], 154.8e12),
    // Whitepapers on the RTX Blackwell, Ada and GA102 architectures, rows "BF16 with FP32 Accumulate".
    (&["RTX", "5090"], 209.5e12),
    (&["RTX", "4090"], 165.2e12),
    (&["RTX", "3090", "Ti"], 80e12),
    (&["RTX", "3090"], 71e12),
    // AMD's product pages; of the MI350 series they print 2.3 and 2.5e15, from 256 units of 4096 operations at 2.2 and
    // 2.4 GHz. Either half of an MI250X or MI250 is a device of its own.
    (&["MI355X"], 2516.6e12),
    (&["MI350X"], 2306.9e12),
    (&["MI325X"], 1307.4e12),
    (&["MI300X"], 1307.4e12),
    (&["MI300A"], 980.6e12),
    // AMD publishes no number: 80 of the MI300X's 304 compute units, at its clock.
    (&["MI308X"], 1307.4e12 * 80.0 / 304.0),
    (&["MI250X"], 383e12 / 2.0),
    (&["MI250"], 362.1e12 / 2.0),
    (&["MI210"], 181e12),
    (&["7900", "XTX"], 122.8e12),
    // What the ports of this program to this GPU go by.
    (&["8060S"], RADEON_8060S),
];

const RADEON_8060S: f64 = 49.6e12;

/// Words of names that stand for a slower relative, or for a part, of the GPU whose name they are added to.
const OTHER_GPUS: [&str; 3] = ["Laptop", "D", "MIG"];

/// The peak of a GPU in operations a second: as `stated` in [`VARIABLE`], else from the table, none if it is not there.
///
/// # Errors
/// If `stated` is no number of operations a second.
pub fn bf16_peak_flops(stated: Option<&OsStr>, name: &str, architecture: Option<&str>) -> Result<Option<f64>> {
    let Some(stated) = stated else { return Ok(from_table(name, architecture)) };
    let text = stated.to_string_lossy();
    match text.trim().parse::<f64>() {
        // Less is no GPU, but a number of teraflops.
        Ok(flops) if flops.is_finite() && flops >= 1e9 => Ok(Some(flops)),
        _ => bail!(
            "{VARIABLE}: expected operations a second of at least 1e9, found '{text}'; hint: 49.6 teraflops are 49.6e12, or unset it"
        ),
    }
}

fn from_table(name: &str, architecture: Option<&str>) -> Option<f64> {
    let words: Vec<&str> = name.split(|letter: char| letter.is_whitespace() || "-_/(),".contains(letter)).collect();
    let has = |word: &str| words.iter().any(|found| found.eq_ignore_ascii_case(word));
    if OTHER_GPUS.iter().any(|word| has(word)) {
        return None;
    }
    let row = PEAKS.iter().find(|(row, _)| row.iter().all(|word| has(word)));
    row.map(|(_, flops)| *flops).or_else(|| {
        // Drivers that do not know the name say "AMD Radeon Graphics" or the architecture; smaller relatives of the 8060S
        // have the same one.
        let is_named = ["8050S", "8040S"].iter().any(|word| has(word));
        let is_halo = architecture == Some("gfx1151") || has("gfx1151");
        (is_halo && !is_named).then_some(RADEON_8060S)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peak(name: &str) -> Option<f64> {
        bf16_peak_flops(None, name, None).unwrap()
    }

    #[test]
    fn names_as_drivers_report_them_have_their_peaks() {
        for (name, flops) in [
            ("NVIDIA H100 80GB HBM3", 989.5e12),
            ("NVIDIA H100 PCIe", 756.5e12),
            ("NVIDIA H100 NVL", 835.5e12),
            ("NVIDIA H200", 989.5e12),
            ("NVIDIA H200 NVL", 835.5e12),
            ("NVIDIA GH200 480GB", 989.5e12),
            ("NVIDIA B200", 2250e12),
            ("NVIDIA GB200", 2500e12),
            ("NVIDIA A100-SXM4-80GB", 312e12),
            ("NVIDIA A100 80GB PCIe", 312e12),
            ("NVIDIA A10", 125e12),
            ("NVIDIA A10G", 70e12),
            ("NVIDIA L4", 121e12),
            ("NVIDIA L40S", 362.05e12),
            ("NVIDIA RTX 6000 Ada Generation", 364.2e12),
            ("NVIDIA GeForce RTX 4090", 165.2e12),
            ("NVIDIA GeForce RTX 3090", 71e12),
            ("NVIDIA GeForce RTX 3090 Ti", 80e12),
            ("NVIDIA GeForce RTX 5090", 209.5e12),
            ("AMD Instinct MI300X", 1307.4e12),
            ("AMD Instinct MI300X VF", 1307.4e12),
            ("AMD Instinct MI300A", 980.6e12),
            ("AMD Instinct MI325X", 1307.4e12),
            ("AMD Instinct MI355X", 2516.6e12),
            ("AMD Instinct MI250X", 191.5e12),
            ("AMD Radeon RX 7900 XTX", 122.8e12),
            ("Radeon RX 7900 XTX", 122.8e12),
            ("AMD Radeon 8060S", 49.6e12),
            ("Radeon 8060S Graphics", 49.6e12),
            ("gfx1151", 49.6e12),
        ] {
            assert_eq!(peak(name), Some(flops), "{name}");
        }
        let cut_down = peak("AMD Instinct MI308X").unwrap();
        assert!((cut_down - 344e12).abs() < 0.1e12, "{cut_down:e}");
    }

    #[test]
    fn a_name_that_contains_anothers_is_not_taken_for_it() {
        for name in [
            "",
            "NVIDIA A1000",
            "NVIDIA T4",
            "NVIDIA RTX 6000",
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 5090 D",
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "AMD Radeon RX 7900 XT",
            "AMD Radeon Graphics",
            "AMD Radeon 8050S",
            "Intel Arc A770",
        ] {
            assert_eq!(peak(name), None, "{name}");
        }
    }

    #[test]
    fn without_a_useful_name_the_architecture_tells() {
        let by_architecture = |name, architecture| bf16_peak_flops(None, name, Some(architecture)).unwrap();
        assert_eq!(by_architecture("AMD Radeon Graphics", "gfx1151"), Some(49.6e12));
        assert_eq!(by_architecture("Radeon 8050S Graphics", "gfx1151"), None);
        assert_eq!(by_architecture("AMD Radeon Graphics", "gfx1150"), None);
        assert_eq!(by_architecture("NVIDIA H100 PCIe", "sm_90"), Some(756.5e12));
    }

    #[test]
    fn every_row_can_be_reached() {
        for (words, flops) in PEAKS {
            assert_eq!(peak(&words.join(" ")), Some(*flops), "{words:?} comes after a row that matches it too");
        }
    }

    #[test]
    fn the_variable_replaces_the_table_and_nonsense_is_refused() {
        let stated = |text: &str| bf16_peak_flops(Some(OsStr::new(text)), "NVIDIA H100 PCIe", None);
        assert_eq!(stated("49.6e12").unwrap(), Some(49.6e12));
        assert_eq!(stated(" 5e13 ").unwrap(), Some(5e13));
        for wrong in ["", "fast", "49.6", "-1e12", "nan", "inf", "49.6e12 FLOPS"] {
            let message = stated(wrong).unwrap_err().to_string();
            let parts = [VARIABLE, "expected ", &format!("found '{wrong}'"), "; hint: "];
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}
