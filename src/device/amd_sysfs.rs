//! What the Linux kernel says of AMD GPUs: architecture and memory, also where the driver's libraries say less.

use std::fs;
use std::path::Path;

/// Where the kernel lists what ROCm may compute on.
pub const KFD_NODES: &str = "/sys/class/kfd/kfd/topology/nodes";
/// Where the kernel lists PCI devices.
pub const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// The name of the target that the kernel gives as a decimal number: major · 10000 + minor · 100 + stepping.
fn target_name(version: u32) -> Option<String> {
    let (major, minor, stepping) = (version / 10_000, version / 100 % 100, version % 100);
    // Names have one hexadecimal digit each for the last two; processors are nodes of version 0.
    (version != 0 && minor < 16 && stepping < 16).then(|| format!("gfx{major}{minor:x}{stepping:x}"))
}

/// A number of a node's file `properties`: lines of a key and a decimal value.
fn property(properties: &str, key: &str) -> Option<u32> {
    properties.lines().find_map(|line| line.strip_prefix(key)?.trim().parse().ok())
}

/// The `properties` of every node in `nodes`, in no special order.
fn all_properties(nodes: &Path) -> Vec<String> {
    let folders = fs::read_dir(nodes).into_iter().flatten().flatten();
    folders.filter_map(|folder| fs::read_to_string(folder.path().join("properties")).ok()).collect()
}

/// Architectures of all AMD GPUs in `nodes` ([`KFD_NODES`]), sorted.
pub fn architectures(nodes: &Path) -> Vec<String> {
    let versions = all_properties(nodes);
    let mut names: Vec<String> =
        versions.iter().filter_map(|node| target_name(property(node, "gfx_target_version ")?)).collect();
    names.sort();
    names
}

/// Architecture of the GPU at the PCI address `address`, such as `0000:c3:00.0`.
pub fn architecture(nodes: &Path, address: &str) -> Option<String> {
    let (domain, location) = location(address)?;
    all_properties(nodes).iter().find_map(|node| {
        let is_it = property(node, "domain ").unwrap_or(0) == domain
            // The upper bits number the partitions of one GPU.
            && property(node, "location_id ").map(|id| id & 0xffff) == Some(location);
        is_it.then(|| target_name(property(node, "gfx_target_version ")?)).flatten()
    })
}

/// Domain and location as the kernel numbers it: bus, device, function in 8, 5 and 3 bits.
fn location(address: &str) -> Option<(u32, u32)> {
    let hexadecimal = |digits: &str| u32::from_str_radix(digits, 16).ok();
    let (domain, rest) = address.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    Some((hexadecimal(domain)?, hexadecimal(bus)? << 8 | hexadecimal(device)? << 3 | hexadecimal(function)?))
}

/// Bytes of the GPU at `address`: its own ("VRAM"), and main memory that it may use ("GTT").
pub fn memory(pci_devices: &Path, address: &str) -> Option<(u64, u64)> {
    let folder = pci_devices.join(address.to_lowercase());
    let bytes = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok();
    Some((bytes("mem_info_vram_total")?, bytes("mem_info_gtt_total")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_version_is_read_as_its_name() {
        let names = [110_501, 90_402, 90_010, 110_000, 90_500, 120_001].map(|version| target_name(version).unwrap());
        assert_eq!(names, ["gfx1151", "gfx942", "gfx90a", "gfx1100", "gfx950", "gfx1201"]);
        assert_eq!(target_name(0), None);
        assert_eq!(target_name(119_999), None);
    }

    #[test]
    fn each_gpu_is_found_by_its_pci_address_among_processors_and_others() {
        let root = tempfile::tempdir().unwrap();
        let nodes = [
            ("0", "cpu_cores_count 32\nsimd_count 0\ngfx_target_version 0\nlocation_id 0\ndomain 0\n"),
            ("1", "simd_count 192\ngfx_target_version 110000\nlocation_id 26112\ndomain 0\n"),
            ("2", "simd_count 80\ngfx_target_version 110501\nlocation_id 49920\ndomain 0\n"),
            // The second partition of a GPU in another domain.
            ("3", "gfx_target_version 90402\nlocation_id 268486656\ndomain 2\n"),
        ];
        for (name, properties) in nodes {
            fs::create_dir(root.path().join(name)).unwrap();
            fs::write(root.path().join(name).join("properties"), properties).unwrap();
        }
        assert_eq!(architectures(root.path()), ["gfx1100", "gfx1151", "gfx942"]);
        let found = |address| architecture(root.path(), address);
        assert_eq!(found("0000:c3:00.0").as_deref(), Some("gfx1151"));
        assert_eq!(found("0000:66:00.0").as_deref(), Some("gfx1100"));
        assert_eq!(found("0002:C8:00.0").as_deref(), Some("gfx942"));
        for absent in ["0001:c3:00.0", "0000:c3:00.1", "0000:00:00.0", "c3:00.0", ""] {
            assert_eq!(found(absent), None, "{absent}");
        }
        assert!(architectures(&root.path().join("nowhere")).is_empty());
    }

    #[test]
    fn memory_is_the_gpus_own_and_the_shared() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("0000:c3:00.0");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("mem_info_vram_total"), "536870912\n").unwrap();
        assert_eq!(memory(root.path(), "0000:C3:00.0"), None);
        fs::write(folder.join("mem_info_gtt_total"), "66571993088\n").unwrap();
        assert_eq!(memory(root.path(), "0000:C3:00.0"), Some((536_870_912, 66_571_993_088)));
    }
}
