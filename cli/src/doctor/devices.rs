//! RDMA devices: the cards, their ports, and their device files.

use std::fs::OpenOptions;

use super::finding::{Check, CheckResult, Finding, abbreviated};
use super::host::{ExaminedHost, Unreadable};
use super::pci::PciFunction;

const CLASS: &str = "/sys/class/infiniband";
const FILES: &str = "/dev/infiniband";

/// Lists the cards with a kernel driver, and EFA cards without one.
pub fn cards(check: Check, host: &ExaminedHost) -> CheckResult {
    let names = host.names(CLASS)?;
    if !names.is_empty() {
        return Ok(vec![check.ok(format!("{}: {}", names.len(), abbreviated(&names)))]);
    }
    let is_efa = |function: &PciFunction| {
        let numbers = u16::try_from(function.vendor).ok().zip(u16::try_from(function.device).ok());
        numbers.is_some_and(|(vendor, device)| topology::is_efa(vendor, device))
    };
    let idle: Vec<_> =
        PciFunction::all(host)?.into_iter().filter(is_efa).map(|function| function.address).collect();
    if idle.is_empty() {
        let why = format!("no RDMA device: {CLASS} is empty or missing");
        return Ok(vec![check.skipped(why)]);
    }
    let value = format!("{} EFA cards without a driver: {}", idle.len(), abbreviated(&idle));
    let cost = "the backend efa has no device";
    Ok(vec![check.problem(value, cost, "run modprobe efa; AWS's EFA installer has the module")])
}

/// Lists the ports that are up.
pub fn ports(check: Check, host: &ExaminedHost) -> CheckResult {
    let (mut active, mut others) = (Vec::new(), Vec::new());
    let names = host.names(CLASS)?;
    for card in &names {
        for number in host.names(&format!("{CLASS}/{card}/ports"))? {
            match port(host, card, &number) {
                Ok((true, value)) => active.push(value),
                Ok((false, value)) => others.push(down(check, value)),
                Err(file) => others.push(check.unreadable(&file)),
            }
        }
    }
    let mut found = Vec::new();
    match (active.is_empty(), names.is_empty()) {
        (_, true) => found.push(check.skipped("no RDMA device")),
        (false, _) => found.push(check.ok(format!("{} active: {}", active.len(), abbreviated(&active)))),
        (true, _) => found.push(check.problem(
            "no port is active",
            "no card can be used",
            "bring a link up: check the cable, the switch, `ip link set DEV up`, a subnet manager on InfiniBand",
        )),
    }
    found.extend(others);
    Ok(found)
}

/// Returns whether a port is active, and its description.
fn port(host: &ExaminedHost, card: &str, number: &str) -> Result<(bool, String), Unreadable> {
    let of = |file: &str| format!("{CLASS}/{card}/ports/{number}/{file}");
    let word = |text: &str| Some(text.split_once(':')?.1.trim().to_owned());
    let state = host.parsed(&of("state"), word)?.unwrap_or_else(|| "in an unknown state".to_owned());
    let layer = host.text(&of("link_layer"))?.unwrap_or_default();
    Ok((state == "ACTIVE", format!("{card}/{number} {state} {}", layer.trim()).trim_end().to_owned()))
}

fn down(check: Check, value: String) -> Finding {
    let remedy =
        "check the cable, the switch, `ip link set DEV up` on Ethernet, a subnet manager on InfiniBand";
    check.warning(value, "this port carries nothing", remedy)
}

/// Checks whether this user may open the cards.
pub fn uverbs(check: Check, host: &ExaminedHost) -> CheckResult {
    let cards = host.names(CLASS)?.len();
    let files: Vec<_> = host.names(FILES)?.into_iter().filter(|name| name.starts_with("uverbs")).collect();
    if files.is_empty() && cards == 0 {
        return Ok(vec![check.skipped(format!("no RDMA device, and no {FILES}/uverbs*"))]);
    }
    let (cost, container) =
        ("no program on this host can open the cards", "start the container with --device=/dev/infiniband");
    if files.is_empty() {
        let value = format!("{cards} cards, and no {FILES}/uverbs*");
        return Ok(vec![check.problem(
            value,
            cost,
            format!("{container}; on a host run modprobe ib_uverbs"),
        )]);
    }
    let mut found = Vec::new();
    let mut opened = 0;
    for name in &files {
        let path = format!("{FILES}/{name}");
        // Only opening the file shows it, because a container's control group may refuse what the mode allows.
        match OpenOptions::new().read(true).write(true).open(host.path(&path)) {
            Ok(_) => opened += 1,
            Err(error) => found.push(check.problem(
                format!("cannot open {path}: {error}"),
                "this card cannot be used",
                "give it a group of this user (chgrp rdma; chmod 660), or mode 0666 by a udev rule; start \
                 a container with --device=/dev/infiniband",
            )),
        }
    }
    if opened > 0 && files.len() < cards {
        let value = format!("{} of {cards} cards have a file in {FILES}", files.len());
        found.push(check.warning(value, "the other cards cannot be used", container));
    } else if opened > 0 {
        found.insert(
            0,
            check.ok(format!("{opened} of {} files can be opened for reading and writing", files.len())),
        );
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::finding::{Level, worst};
    use super::super::host::fake::Fake;
    use super::*;

    fn levels(found: &CheckResult) -> Vec<Level> {
        found.as_ref().expect("readable").iter().map(|finding| finding.level).collect()
    }

    #[test]
    fn without_a_card_all_is_skipped() {
        let host = Fake::new(&[]);
        for check in [cards, ports, uverbs] {
            assert_eq!(levels(&check(Check("it"), &host)), [Level::Skipped]);
        }
    }

    #[test]
    fn an_efa_card_without_a_driver_is_a_problem() {
        let of = |file: &str| format!("/sys/bus/pci/devices/0000:00:06.0/{file}");
        let host =
            Fake::new(&[(&of("vendor"), "0x1d0f"), (&of("device"), "0xefa2"), (&of("class"), "0x020000")]);
        assert_eq!(levels(&cards(Check("it"), &host)), [Level::Problem]);
        assert_eq!(levels(&cards(Check("it"), &host.card("rdmap0s6"))), [Level::Ok]);
    }

    #[test]
    fn ports_that_are_down_are_named() {
        let state = "/sys/class/infiniband/mlx5_1/ports/1/state";
        let both = Fake::new(&[(state, "1: DOWN\n")]).card("mlx5_0");
        let found = ports(Check("it"), &both).unwrap();
        assert_eq!(found[0].what, "1 active: mlx5_0/1 ACTIVE Ethernet");
        assert_eq!((found[1].level, found[1].what.as_str()), (Level::Warning, "mlx5_1/1 DOWN"));
        let none = ports(Check("it"), &Fake::new(&[(state, "1: DOWN\n")])).unwrap();
        assert_eq!(worst(&none), Level::Problem);
        let odd = ports(Check("it"), &Fake::new(&[(state, "up")]).card("mlx5_0")).unwrap();
        assert!(odd[1].level == Level::Warning && odd[1].what.contains(state), "{odd:?}");
    }

    #[test]
    fn files_that_do_not_open_are_named() {
        let carded = || Fake::new(&[]).card("mlx5_0").card("mlx5_1");
        assert_eq!(levels(&uverbs(Check("it"), &carded())), [Level::Problem]);
        let one = carded().with("/dev/infiniband/uverbs0", b"");
        assert_eq!(levels(&uverbs(Check("it"), &one)), [Level::Warning]);
        let both = one.with("/dev/infiniband/uverbs1", b"");
        assert_eq!(levels(&uverbs(Check("it"), &both)), [Level::Ok]);
        // No user can open a directory for writing.
        let odd = both.with("/dev/infiniband/uverbs2/x", b"");
        let found = uverbs(Check("it"), &odd).unwrap();
        assert_eq!(
            found.iter().map(|finding| finding.level).collect::<Vec<_>>(),
            [Level::Ok, Level::Problem]
        );
        assert!(found[1].what.contains("/dev/infiniband/uverbs2"));
    }
}
