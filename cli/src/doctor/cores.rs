//! Cores: the cores that this process may use, and the cores next to the cards.

use topology::Cpus;

use super::finding::{Check, CheckResult};
use super::host::{ExaminedHost, Unreadable};

const ONLINE: &str = "/sys/devices/system/cpu/online";
const CARDS: &str = "/sys/class/infiniband";

/// The CPUs that this process may use, or `None` if no file lists them.
pub fn allowed(host: &ExaminedHost) -> Result<Option<Cpus>, Unreadable> {
    let Some(text) = host.status("Cpus_allowed_list")? else { return Ok(None) };
    let malformed = || Unreadable::malformed("/proc/self/status", &format!("Cpus_allowed_list: {text}"));
    parse(&text).map(Some).ok_or_else(malformed)
}

fn parse(list: &str) -> Option<Cpus> {
    list.parse().ok()
}

/// Checks the number of cores, and whether the cores next to the cards are allowed.
pub fn cores(check: Check, host: &ExaminedHost) -> CheckResult {
    let (Some(allowed), Some(online)) = (allowed(host)?, host.parsed(ONLINE, parse)?) else {
        return Ok(vec![check.skipped(format!("/proc/self/status or {ONLINE} is missing"))]);
    };
    let value = format!("{} allowed of {} online", allowed.0.len(), online.0.len());
    let mut found = vec![match allowed.0.len() > 1 {
        true => check.ok(value),
        false => check.warning(
            value,
            "workers and callers share the core: each waits for the other's time slice",
            "give the process more cores: taskset, docker run --cpuset-cpus, cpuset.cpus of its control group",
        ),
    }];
    for card in host.names(CARDS)? {
        let near = host.parsed(&format!("{CARDS}/{card}/device/local_cpulist"), parse)?;
        if near.is_some_and(|near| !near.0.is_empty() && near.and(&allowed).0.is_empty()) {
            found.push(check.warning(
                format!("no core next to {card} is allowed"),
                "its worker runs on another socket, and each access crosses the sockets",
                format!("allow cores of {CARDS}/{card}/device/local_cpulist, or use other devices"),
            ));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::super::host::fake::Fake;
    use super::*;

    fn fake(allowed: &str, online: &str) -> Fake {
        let status = format!("Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n");
        Fake::new(&[("/proc/self/status", &status), (ONLINE, online)])
    }

    #[test]
    fn one_core_is_a_warning() {
        for (allowed, level) in [("0-7", Level::Ok), ("0,2", Level::Ok), ("5", Level::Warning)] {
            let found = cores(Check("it"), &fake(allowed, "0-7\n")).unwrap();
            assert_eq!(found[0].level, level, "{allowed}");
        }
        assert_eq!(cores(Check("it"), &Fake::new(&[])).unwrap()[0].level, Level::Skipped);
    }

    #[test]
    fn cores_of_another_socket_are_a_warning() {
        let near = |list: &[u8]| {
            fake("0-3", "0-7\n")
                .card("mlx5_0")
                .with("/sys/class/infiniband/mlx5_0/device/local_cpulist", list)
        };
        assert_eq!(cores(Check("it"), &near(b"4-7\n")).unwrap()[1].level, Level::Warning);
        for list in [&b"3-7\n"[..], b"\n"] {
            assert_eq!(cores(Check("it"), &near(list)).unwrap().len(), 1);
        }
    }

    #[test]
    fn malformed_lists_name_their_file() {
        for nonsense in ["all", "3-1", "0-99999999", "1-2-3", "-1"] {
            let said = cores(Check("it"), &fake("0", nonsense)).unwrap_err().to_string();
            assert!(said.contains(ONLINE), "{said}");
            let said = cores(Check("it"), &fake(nonsense, "0")).unwrap_err().to_string();
            assert!(said.contains("/proc/self/status"), "{said}");
        }
    }
}
