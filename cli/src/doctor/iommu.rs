//! The IOMMU: whether it translates the addresses of cards and GPUs.

use super::finding::{Check, CheckResult};
use super::host::ExaminedHost;

const GROUPS: &str = "/sys/kernel/iommu_groups";

/// Checks the mode of the IOMMU.
pub fn mode(check: Check, host: &ExaminedHost) -> CheckResult {
    let groups = host.names(GROUPS)?;
    let command = host.text("/proc/cmdline")?.unwrap_or_default();
    let passes = command.split_whitespace().any(|word| word == "iommu=pt" || word == "iommu.passthrough=1");
    if groups.is_empty() {
        let value = match host.names("/sys/class/iommu")?.is_empty() {
            true => "off, or hidden from this machine",
            false => "present without a group: it translates nothing",
        };
        return Ok(vec![check.ok(value)]);
    }
    let mut translated = 0;
    for group in &groups {
        // Kernels before 5.11 have no type per group.
        let kind = host.text(&format!("{GROUPS}/{group}/type"))?;
        translated += usize::from(kind.map_or(!passes, |kind| kind.trim() != "identity"));
    }
    let value = format!("the IOMMU translates for {translated} of {} groups", groups.len());
    if translated == 0 || !(host.has_hardware() || host.has_gpu()) {
        return Ok(vec![check.ok(value)]);
    }
    let cost = "each access of a card or GPU is translated, peer-to-peer traffic goes through the root complex, and \
                registering takes longer";
    let remedy = "boot with iommu=pt (Intel: intel_iommu=on iommu=pt; ARM: iommu.passthrough=1)";
    Ok(vec![check.warning(value, cost, remedy)])
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::super::host::fake::Fake;
    use super::*;

    fn level(files: &[(&str, &str)]) -> Level {
        mode(Check("it"), &Fake::new(files).card("mlx5_0")).expect("readable")[0].level
    }

    #[test]
    fn translation_costs_and_passing_through_does_not() {
        let kind = |kind| ("/sys/kernel/iommu_groups/0/type", kind);
        let group = ("/sys/kernel/iommu_groups/0/devices/0000:00:01.0", "");
        assert_eq!(level(&[]), Level::Ok);
        assert_eq!(level(&[("/sys/class/iommu/dmar0", "")]), Level::Ok);
        assert_eq!(level(&[kind("identity\n")]), Level::Ok);
        assert_eq!(level(&[kind("DMA-FQ\n"), ("/proc/cmdline", "iommu=pt")]), Level::Warning);
        assert_eq!(level(&[group, ("/proc/cmdline", "quiet iommu=pt\n")]), Level::Ok);
        assert_eq!(level(&[group, ("/proc/cmdline", "quiet\n")]), Level::Warning);
        let bare = Fake::new(&[kind("DMA\n")]);
        assert_eq!(mode(Check("it"), &bare).unwrap()[0].level, Level::Ok);
    }
}
