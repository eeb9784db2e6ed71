//! RDMA devices: the cards, their ports, and the files a program opens them by.

use std::fs::OpenOptions;

use super::finding::{Check, Checked, Finding, abbreviated};
use super::host::{Host, Unreadable};
use super::pci::Function;

const CLASS: &str = "/sys/class/infiniband";
const FILES: &str = "/dev/infiniband";

/// The cards that the kernel drives, and EFA cards that it does not.
pub fn cards(check: Check, host: &Host) -> Checked {
    let names = host.names(CLASS)?;
    if !names.is_empty() {
        return Ok(vec![check.ok(format!("{}: {}", names.len(), abbreviated(&names)))]);
    }
    let is_efa = |function: &Function| {
        let numbers = u16::try_from(function.vendor).ok().zip(u16::try_from(function.device).ok());
        numbers.is_some_and(|(vendor, device)| topology::is_efa(vendor, device))
    };
    let idle: Vec<_> =
        Function::all(host)?.into_iter().filter(is_efa).map(|function| function.address).collect();
    if idle.is_empty() {
        let why = format!("there is no RDMA device: {CLASS} is empty or absent");
        return Ok(vec![check.skipped(why)]);
    }
    let value = format!("{} EFA cards without a driver: {}", idle.len(), abbreviated(&idle));
    let cost = "the backend efa has no card";
    Ok(vec![check.problem(value, cost, "modprobe efa; AWS's EFA installer brings the module")])
}

/// Which ports are up.
pub fn ports(check: Check, host: &Host) -> Checked {
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
        (_, true) => found.push(check.skipped("there is no RDMA device")),
        (false, _) => found.push(check.ok(format!("{} active: {}", active.len(), abbreviated(&active)))),
        (true, _) => found.push(check.problem(
            "no port is active",
            "no card can be used",
            "bring a link up: the cable, the switch, `ip link set DEV up`, a subnet manager on InfiniBand",
        )),
    }
    found.extend(others);
    Ok(found)
}

/// Whether a port is active, and what to say of it.
fn port(host: &Host, card: &str, number: &str) -> Result<(bool, String), Unreadable> {
    let of = |file: &str| format!("{CLASS}/{card}/ports/{number}/{file}");
    let word = |text: &str| Some(text.split_once(':')?.1.trim().to_owned());
    let state = host.parsed(&of("state"), word)?.unwrap_or_else(|| "of unknown state".to_owned());
    let layer = host.text(&of("link_layer"))?.unwrap_or_default();
    Ok((state == "ACTIVE", format!("{card}/{number} {state} {}", layer.trim()).trim_end().to_owned()))
}

fn down(check: Check, value: String) -> Finding {
    let remedy = "the cable, the switch, `ip link set DEV up` on Ethernet, a subnet manager on InfiniBand";
    check.warning(value, "this port carries nothing", remedy)
}

/// Whether this user may open the cards.
pub fn uverbs(check: Check, host: &Host) -> Checked {
    let cards = host.names(CLASS)?.len();
    let files: Vec<_> = host.names(FILES)?.into_iter().filter(|name| name.starts_with("uverbs")).collect();
    if files.is_empty() && cards == 0 {
        return Ok(vec![check.skipped(format!("there is no RDMA device, and no {FILES}/uverbs*"))]);
    }
    let (cost, container) =
        ("no program here can open the cards", "give the container --device=/dev/infiniband");
    if files.is_empty() {
        let value = format!("{cards} cards, and no {FILES}/uverbs*");
        return Ok(vec![check.problem(value, cost, format!("{container}; else modprobe ib_uverbs"))]);
    }
    let mut found = Vec::new();
    let mut opened = 0;
    for name in &files {
        let path = format!("{FILES}/{name}");
        // Opening is the only way to know: a container's control group refuses beyond the mode.
        match OpenOptions::new().read(true).write(true).open(host.path(&path)) {
            Ok(_) => opened += 1,
            Err(error) => found.push(check.problem(
                format!("{path} does not open: {error}"),
                "this card cannot be used",
                "a group of yours must own it (chgrp rdma; chmod 660), or 0666 by a udev rule; in a \
                 container start it with --device=/dev/infiniband",
            )),
        }
    }
    if opened > 0 && files.len() < cards {
        let value = format!("{} of {cards} cards have a file in {FILES}", files.len());
        found.push(check.warning(value, "the others cannot be used here", container));
    } else if opened > 0 {
        found.insert(0, check.ok(format!("{opened} of {} open for reading and writing", files.len())));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::super::finding::{Level, worst};
    use super::super::host::fake::Fake;
    use super::*;

    fn levels(found: &Checked) -> Vec<Level> {
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
        // A directory does not open for writing, whoever asks.
        let odd = both.with("/dev/infiniband/uverbs2/x", b"");
        let found = uverbs(Check("it"), &odd).unwrap();
        assert_eq!(
            found.iter().map(|finding| finding.level).collect::<Vec<_>>(),
            [Level::Ok, Level::Problem]
        );
        assert!(found[1].what.contains("/dev/infiniband/uverbs2"));
    }
}
