//! What a machine has to compute on, for people who ask.

use super::ComputeDevice;
use super::compute_type::ComputeType;
use std::fmt;

/// A device, or why there is none.
#[derive(Debug)]
pub struct Listed {
    /// What `--device` takes.
    pub name: String,
    /// What it is, or what is missing.
    pub description: String,
}

impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<14} {}", self.name, self.description)
    }
}

/// Every device that can be named here; those of a backend that is not compiled in are one line that says so.
pub fn devices() -> Vec<Listed> {
    let mut found = Vec::new();
    let mut tried = |name: &str| {
        let device = ComputeDevice::select(name, ComputeType::Auto);
        let description = match &device {
            Ok(device) => device.name.clone(),
            Err(error) => format!("not usable: {error:#}"),
        };
        found.push(Listed { name: name.to_owned(), description });
        device.is_ok()
    };
    tried("cpu");
    #[cfg(not(feature = "wgpu"))]
    tried("wgpu");
    // What is said of the first GPU that is not there holds for all.
    let mut number = 0;
    while tried(&format!("libtorch:{number}")) {
        number += 1;
    }
    if number > 0 {
        found.pop();
    }
    if cfg!(feature = "tch") {
        let description = "the CPU through libtorch".to_owned();
        found.push(Listed { name: "libtorch:cpu".to_owned(), description });
    }
    #[cfg(feature = "wgpu")]
    found.extend(wgpu_adapters());
    found
}

#[cfg(feature = "wgpu")]
fn wgpu_adapters() -> Vec<Listed> {
    let adapters = super::wgpu::adapters();
    if adapters.is_empty() {
        let description = format!("no adapter; hint: {}", super::wgpu::HINT_ON_DRIVERS);
        return vec![Listed { name: "wgpu".to_owned(), description }];
    }
    let listed = |(number, adapter): (usize, &super::wgpu::Adapter)| Listed {
        name: format!("wgpu:{number}"),
        description: adapter.to_string(),
    };
    adapters.iter().enumerate().map(listed).collect()
}
