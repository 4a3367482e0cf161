//! The adapters that wgpu finds: what a machine has, in the order in which `wgpu:N` counts them.

use super::trial;
use crate::device::facts::{GpuFacts, GpuMemory};
use cubecl::wgpu::{WgpuBackend, WgpuDevice, WgpuDeviceKind, wgpu};
use std::fmt;
use std::sync::OnceLock;
use wgpu::{Backend, DeviceType};

/// Interfaces to GPUs, best first: the first that has a GPU is taken, since a GPU that has several would be listed more than once.
const APIS: [(Backend, WgpuBackend); 3] =
    [(Backend::Vulkan, WgpuBackend::Vulkan), (Backend::Metal, WgpuBackend::Metal), (Backend::Dx12, WgpuBackend::Dx12)];

/// What an adapter is, real GPUs first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AdapterKind {
    /// A graphics card or an accelerator.
    Discrete,
    /// A GPU that shares the processor's memory.
    Integrated,
    /// A GPU that a virtual machine is given.
    Virtual,
    /// What the driver does not say.
    Unknown,
    /// A processor that computes what a GPU would.
    Software,
}

impl fmt::Display for AdapterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Discrete => "discrete GPU",
            Self::Integrated => "integrated GPU",
            Self::Virtual => "virtual GPU",
            Self::Unknown => "GPU of unknown kind",
            Self::Software => "software, on the CPU",
        })
    }
}

impl From<DeviceType> for AdapterKind {
    fn from(device_type: DeviceType) -> Self {
        match device_type {
            DeviceType::DiscreteGpu => Self::Discrete,
            DeviceType::IntegratedGpu => Self::Integrated,
            DeviceType::VirtualGpu => Self::Virtual,
            DeviceType::Cpu => Self::Software,
            DeviceType::Other => Self::Unknown,
        }
    }
}

/// An adapter as its driver describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Adapter {
    /// Such as `AMD Radeon 8060S (RADV GFX1151)`.
    pub name: String,
    /// The driver and its version.
    pub driver: String,
    /// What it is.
    pub kind: AdapterKind,
    /// The interface that it is reached through.
    pub api: WgpuBackend,
    /// Bytes of its largest memory, where the interface tells.
    pub memory: Option<u64>,
    /// Its place among those of its kind, as the interface lists them.
    place: usize,
}

impl Adapter {
    /// One that no machine has.
    #[cfg(test)]
    pub(super) fn stand_in(name: &str) -> Self {
        let driver = "driver 1.2".to_owned();
        Self {
            name: name.to_owned(),
            driver,
            kind: AdapterKind::Discrete,
            api: WgpuBackend::Vulkan,
            memory: None,
            place: 0,
        }
    }

    /// CubeCL's name for it.
    pub fn device(&self) -> WgpuDevice {
        let kind = match self.kind {
            AdapterKind::Discrete => WgpuDeviceKind::DiscreteGpu(self.place),
            AdapterKind::Integrated => WgpuDeviceKind::IntegratedGpu(self.place),
            AdapterKind::Virtual => WgpuDeviceKind::VirtualGpu(self.place),
            AdapterKind::Unknown => WgpuDeviceKind::Other(self.place),
            AdapterKind::Software => WgpuDeviceKind::Cpu,
        };
        WgpuDevice { kind, backend: self.api }
    }

    /// What is known of it, for `mfu` and for people.
    pub fn facts(&self, compiler: &str) -> GpuFacts {
        GpuFacts {
            name: self.name.clone(),
            architecture: None,
            memory: GpuMemory { by_driver: self.memory, by_kernel: None },
            through: format!("wgpu: {}, {:?}, {compiler}", self.kind, self.api),
        }
    }
}

/// Name, kind, memory and driver in one line.
impl fmt::Display for Adapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, driver, kind, api, memory, .. } = self;
        let memory = GpuMemory { by_driver: *memory, by_kernel: None };
        write!(f, "{name} ({kind}, {memory}{api:?}, {driver})")
    }
}

/// All adapters, real GPUs first: `wgpu:N` is number N, from 0. Drivers are asked once in a process, after another process came
/// out of that unharmed; none, with a warning, if it did not.
pub fn adapters() -> &'static [Adapter] {
    static FOUND: OnceLock<Vec<Adapter>> = OnceLock::new();
    FOUND.get_or_init(look_for_adapters)
}

fn look_for_adapters() -> Vec<Adapter> {
    if let Err(error) = trial::listing() {
        tracing::warn!("{error:#}");
        return Vec::new();
    }
    let mut software = Vec::new();
    for (backend, api) in APIS {
        let found = adapters_of(backend, api);
        if found.iter().any(|adapter| adapter.kind != AdapterKind::Software) {
            return found;
        }
        if software.is_empty() {
            software = found;
        }
    }
    software
}

fn adapters_of(backend: Backend, api: WgpuBackend) -> Vec<Adapter> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends: backend.into(),
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    let found = cubecl::future::block_on(instance.enumerate_adapters(backend.into()));
    let mut adapters: Vec<Adapter> = Vec::new();
    for adapter in &found {
        let info = adapter.get_info();
        let kind = AdapterKind::from(info.device_type);
        let place = adapters.iter().filter(|earlier| earlier.kind == kind).count();
        let driver = match (info.driver.trim(), info.driver_info.trim()) {
            ("", "") => "driver unknown".to_owned(),
            (name, version) => format!("{name} {version}").trim().to_owned(),
        };
        adapters.push(Adapter { name: info.name.trim().to_owned(), driver, kind, api, memory: memory(adapter), place });
    }
    // burn reaches the first software adapter only.
    adapters.retain(|adapter| adapter.kind != AdapterKind::Software || adapter.place == 0);
    adapters.sort_by_key(|adapter| adapter.kind);
    adapters
}

/// Bytes of the largest heap that the GPU calls its own; wgpu itself does not tell.
#[cfg(not(target_vendor = "apple"))]
fn memory(adapter: &wgpu::Adapter) -> Option<u64> {
    // SAFETY: the adapter is asked and nothing else, while it lives.
    let vulkan = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let instance = vulkan.shared_instance().raw_instance();
    // SAFETY: the physical device is of this instance.
    let properties = unsafe { instance.get_physical_device_memory_properties(vulkan.raw_physical_device()) };
    properties.memory_heaps_as_slice().iter().filter(|heap| is_own(heap.flags.as_raw())).map(|heap| heap.size).max()
}

/// Whether a heap of these flags is the GPU's own (Vulkan specification, `VK_MEMORY_HEAP_DEVICE_LOCAL_BIT`).
#[cfg(not(target_vendor = "apple"))]
fn is_own(flags: u32) -> bool {
    flags & 1 == 1
}

#[cfg(target_vendor = "apple")]
fn memory(_adapter: &wgpu::Adapter) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_gpus_come_first() {
        let kinds = [DeviceType::Cpu, DeviceType::Other, DeviceType::IntegratedGpu, DeviceType::DiscreteGpu];
        let mut kinds = kinds.map(AdapterKind::from);
        kinds.sort();
        assert_eq!(
            kinds,
            [AdapterKind::Discrete, AdapterKind::Integrated, AdapterKind::Unknown, AdapterKind::Software]
        );
    }

    #[test]
    fn an_adapter_is_described_in_one_line() {
        let adapter = Adapter { memory: Some(16 << 30), ..Adapter::stand_in("Some GPU") };
        assert_eq!(adapter.to_string(), "Some GPU (discrete GPU, 16.0 GiB by the driver, Vulkan, driver 1.2)");
        let facts = adapter.facts("SPIR-V").to_string();
        assert_eq!(facts, "Some GPU (16.0 GiB by the driver, wgpu: discrete GPU, Vulkan, SPIR-V)");
    }

    #[test]
    fn what_is_found_here_is_listed_in_the_order_of_its_kinds() {
        let found = adapters();
        assert!(found.is_sorted_by_key(|adapter| adapter.kind), "{found:?}");
        assert!(found.iter().all(|adapter| !adapter.name.is_empty() && !adapter.driver.is_empty()), "{found:?}");
    }
}
