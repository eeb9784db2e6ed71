//! The kernel: its version, whether processes may access each other's memory, and whether the IOMMU translates the
//! addresses of cards and GPUs.

use super::finding::{Check, CheckResult};
use super::host::{CAP_SYS_PTRACE, ExaminedHost, Unreadable};

/// The first kernel with DMA-BUF registration (`ibv_reg_dmabuf_mr`).
pub const DMA_BUF: (u32, u32) = (5, 12);
/// The first kernel that makes huge pages on request (`MADV_COLLAPSE`).
const COLLAPSE: (u32, u32) = (6, 1);
/// The first kernel where sysfs can allocate device memory (`p2pmem/allocate`).
const P2PMEM: (u32, u32) = (6, 2);

const RELEASE: &str = "/proc/sys/kernel/osrelease";
const YAMA: &str = "/proc/sys/kernel/yama/ptrace_scope";
const IOMMU_GROUPS: &str = "/sys/kernel/iommu_groups";

/// The major and minor version, or `None` if the file does not exist.
pub fn version(host: &ExaminedHost) -> Result<Option<(u32, u32)>, Unreadable> {
    host.parsed(RELEASE, |text| {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    })
}

/// The text of a version.
pub fn description(version: Option<(u32, u32)>) -> String {
    version.map_or("Linux, unknown version".to_owned(), |(major, minor)| format!("Linux {major}.{minor}"))
}

/// Checks for features that need a newer kernel.
pub fn age(check: Check, host: &ExaminedHost) -> CheckResult {
    let Some(version) = version(host)? else {
        return Ok(vec![check.skipped(format!("{RELEASE} is missing"))]);
    };
    let features = [(DMA_BUF, "DMA-BUF"), (COLLAPSE, "huge pages on request"), (P2PMEM, "p2pmem")];
    let lacking: Vec<_> = features
        .into_iter()
        .filter(|(since, _)| version < *since)
        .map(|((major, minor), what)| format!("{what} ({major}.{minor})"))
        .collect();
    let mut value = description(Some(version));
    if !lacking.is_empty() {
        value.push_str(&format!("; too old for {}", lacking.join(", ")));
    }
    if version >= DMA_BUF {
        return Ok(vec![check.ok(value)]);
    }
    let cost = "GPU memory can be registered with nvidia_peermem only; large buffers use small pages";
    Ok(vec![check.warning(value, cost, "boot Linux 6.2 or later; 5.12 is enough for DMA-BUF")])
}

/// Checks whether Yama keeps processes from accessing each other's memory.
pub fn yama(check: Check, host: &ExaminedHost) -> CheckResult {
    let Some(scope) = host.number(YAMA)? else {
        return Ok(vec![check.ok("this kernel has no Yama")]);
    };
    let value = format!("kernel.yama.ptrace_scope is {scope}");
    let cost = "loopback cannot write to memory of another process that Fabric::alloc did not allocate \
                (process_vm_writev): importing it fails";
    let staging = "set MULTIRAIL_LOOPBACK_STAGING=1 in both processes";
    Ok(vec![match scope {
        0 => check.ok(value),
        1 => check.ok(format!("{value}: loopback's targets allow their peers")),
        2 if host.has_capability(CAP_SYS_PTRACE)? => {
            check.ok(format!("{value}; this process has CAP_SYS_PTRACE"))
        }
        2 => check.warning(
            value,
            cost,
            format!(
                "run sysctl -w kernel.yama.ptrace_scope=1, give the process CAP_SYS_PTRACE, or {staging}"
            ),
        ),
        _ => check.warning(value, cost, format!("boot with kernel.yama.ptrace_scope=1, or {staging}")),
    }])
}

/// Checks whether the IOMMU translates the addresses of cards and GPUs.
pub fn iommu(check: Check, host: &ExaminedHost) -> CheckResult {
    let groups = host.names(IOMMU_GROUPS)?;
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
        let kind = host.text(&format!("{IOMMU_GROUPS}/{group}/type"))?;
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

    #[test]
    fn old_kernels_lack_something() {
        for (release, level, lacks) in [
            ("5.4.0-200-generic\n", Level::Warning, "DMA-BUF (5.12)"),
            ("5.15.0-1\n", Level::Ok, "huge pages on request (6.1)"),
            ("6.1.0-18-amd64\n", Level::Ok, "p2pmem (6.2)"),
            ("6.18.44\n", Level::Ok, ""),
        ] {
            let found = age(Check("it"), &Fake::new(&[(RELEASE, release)])).unwrap();
            assert_eq!(found[0].level, level, "{release}");
            assert!(found[0].what.contains(lacks), "{found:?}");
        }
        assert_eq!(age(Check("it"), &Fake::new(&[])).unwrap()[0].level, Level::Skipped);
        for nonsense in ["", "rolling", "6", "6.", "99999999999.1"] {
            let said = age(Check("it"), &Fake::new(&[(RELEASE, nonsense)])).unwrap_err();
            assert!(said.to_string().contains(RELEASE), "{nonsense:?}");
        }
    }

    #[test]
    fn yama_from_2_on_keeps_peers_out() {
        let level = |scope: &str, capabilities: &str| {
            let status = format!("CapEff:\t{capabilities}\n");
            let fake = Fake::new(&[(YAMA, scope), ("/proc/self/status", &status)]);
            yama(Check("it"), &fake).map(|found| found[0].level)
        };
        let (none, ptrace) = ("0000000000000000", "0000000000080000");
        for (scope, expected) in
            [("0\n", Level::Ok), ("1\n", Level::Ok), ("2\n", Level::Warning), ("3\n", Level::Warning)]
        {
            assert_eq!(level(scope, none), Ok(expected), "{scope}");
        }
        assert_eq!((level("2", ptrace), level("3", ptrace)), (Ok(Level::Ok), Ok(Level::Warning)));
        assert!(level("strict", none).unwrap_err().to_string().contains(YAMA));
        assert_eq!(yama(Check("it"), &Fake::new(&[])).unwrap()[0].level, Level::Ok);
    }

    fn level_of_iommu(files: &[(&str, &str)]) -> Level {
        iommu(Check("it"), &Fake::new(files).card("mlx5_0")).expect("readable")[0].level
    }

    #[test]
    fn translation_costs_and_passing_through_does_not() {
        let kind = |kind| ("/sys/kernel/iommu_groups/0/type", kind);
        let group = ("/sys/kernel/iommu_groups/0/devices/0000:00:01.0", "");
        assert_eq!(level_of_iommu(&[]), Level::Ok);
        assert_eq!(level_of_iommu(&[("/sys/class/iommu/dmar0", "")]), Level::Ok);
        assert_eq!(level_of_iommu(&[kind("identity\n")]), Level::Ok);
        assert_eq!(level_of_iommu(&[kind("DMA-FQ\n"), ("/proc/cmdline", "iommu=pt")]), Level::Warning);
        assert_eq!(level_of_iommu(&[group, ("/proc/cmdline", "quiet iommu=pt\n")]), Level::Ok);
        assert_eq!(level_of_iommu(&[group, ("/proc/cmdline", "quiet\n")]), Level::Warning);
        let bare = Fake::new(&[kind("DMA\n")]);
        assert_eq!(iommu(Check("it"), &bare).unwrap()[0].level, Level::Ok);
    }
}
