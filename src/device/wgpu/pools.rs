//! The pools through which CubeCL takes a device's memory.

use burn::tensor::Device;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the pools of a device hold, and the most that they were seen to hold.
#[derive(Clone, Debug)]
pub struct Pools {
    device: Device,
    most: Arc<AtomicU64>,
}

impl Pools {
    /// Those of `device`.
    pub fn of(device: Device) -> Self {
        Self { device, most: Arc::new(AtomicU64::new(0)) }
    }

    /// The most memory that the pools held when they were looked at, in MiB: what tensors take and what is kept for the next
    /// ones. Pools seldom give memory back, so that looking once a step is enough.
    pub fn peak_mib(&self) -> Option<f64> {
        let now = self.device.memory_pool_usage()?.bytes_reserved;
        let most = self.most.fetch_max(now, Ordering::Relaxed).max(now);
        Some(most as f64 / f64::from(1 << 20))
    }
}
