//! The kernel: its version, and whom it lets into a process' memory.

use super::finding::{Check, Checked};
use super::host::{CAP_SYS_PTRACE, Host, Unreadable};

/// From here on a card takes memory by its DMA-BUF (`ibv_reg_dmabuf_mr`).
pub const DMA_BUF: (u32, u32) = (5, 12);
/// From here on memory of 2 MiB and more comes in huge pages (`MADV_COLLAPSE`).
const COLLAPSE: (u32, u32) = (6, 1);
/// From here on memory of a device can be allocated through sysfs (`p2pmem/allocate`).
const P2PMEM: (u32, u32) = (6, 2);

const RELEASE: &str = "/proc/sys/kernel/osrelease";
const YAMA: &str = "/proc/sys/kernel/yama/ptrace_scope";

/// Major and minor; `None` where there is no such file.
pub fn version(host: &Host) -> Result<Option<(u32, u32)>, Unreadable> {
    host.parsed(RELEASE, |text| {
        let mut numbers = text.split(|c: char| !c.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    })
}

/// A version as people say it.
pub fn description(version: Option<(u32, u32)>) -> String {
    version.map_or("Linux of unknown version".to_owned(), |(major, minor)| format!("Linux {major}.{minor}"))
}

/// What the kernel is too old for.
pub fn age(check: Check, host: &Host) -> Checked {
    let Some(version) = version(host)? else {
        return Ok(vec![check.skipped(format!("there is no {RELEASE}"))]);
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
    let cost = "GPU memory is registered by nvidia_peermem, or not at all; large buffers lie in small pages";
    Ok(vec![check.warning(value, cost, "boot 6.2 or later; 5.12 is enough for DMA-BUF")])
}

/// Whether Yama keeps processes out of each other's memory.
pub fn yama(check: Check, host: &Host) -> Checked {
    let Some(scope) = host.number(YAMA)? else {
        return Ok(vec![check.ok("this kernel has no Yama")]);
    };
    let value = format!("kernel.yama.ptrace_scope is {scope}");
    let cost = "loopback cannot write to memory of another process that Fabric::alloc did not make \
                (process_vm_writev): importing it is refused";
    let staging = "MULTIRAIL_LOOPBACK_STAGING=1 in both processes";
    Ok(vec![match scope {
        0 => check.ok(value),
        1 => check.ok(format!("{value}: loopback's targets permit their peers")),
        2 if host.has_capability(CAP_SYS_PTRACE)? => {
            check.ok(format!("{value}; this process holds CAP_SYS_PTRACE"))
        }
        2 => check.warning(
            value,
            cost,
            format!("sysctl -w kernel.yama.ptrace_scope=1, CAP_SYS_PTRACE, or {staging}"),
        ),
        _ => check.warning(value, cost, format!("boot with kernel.yama.ptrace_scope=1, or {staging}")),
    }])
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
}
