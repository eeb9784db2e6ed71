//! Huge pages: reserved ones, and transparent ones.

use super::finding::{Check, CheckResult};
use super::host::ExaminedHost;

const HUGE: &str = "/sys/kernel/mm/hugepages";
const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Checks the reserved huge pages.
pub fn huge(check: Check, host: &ExaminedHost) -> CheckResult {
    let (mut values, mut any_free, mut reserved) = (Vec::new(), false, false);
    for name in host.names(HUGE)? {
        let Some(size) = name.strip_prefix("hugepages-") else { continue };
        let total = host.number(&format!("{HUGE}/{name}/nr_hugepages"))?.unwrap_or(0);
        let free = host.number(&format!("{HUGE}/{name}/free_hugepages"))?.unwrap_or(0);
        if total > 0 || size == "2048kB" {
            values.push(format!("{free} free of {total} of {size}"));
        }
        any_free |= free > 0;
        reserved |= total > 0;
    }
    if values.is_empty() {
        return Ok(vec![check.skipped("this kernel has no huge pages")]);
    }
    let value = values.join(", ");
    if any_free || !host.has_cards_for("efa") {
        return Ok(vec![check.ok(value)]);
    }
    let cost = "libfabric's provider uses small pages for its buffers, so a card translates more addresses";
    let remedy = match reserved {
        true => "end the programs that use them, or reserve more: sysctl vm.nr_hugepages",
        false => "run sysctl -w vm.nr_hugepages=5128, AWS's setting for hosts with 32 cards",
    };
    Ok(vec![check.warning(value, cost, remedy)])
}

/// Checks transparent huge pages.
pub fn transparent(check: Check, host: &ExaminedHost) -> CheckResult {
    let chosen = |text: &str| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned());
    let Some(chosen) = host.parsed(TRANSPARENT, chosen)? else {
        return Ok(vec![check.skipped("this kernel has no huge pages")]);
    };
    if chosen != "never" || !host.has_hardware() {
        return Ok(vec![check.ok(chosen)]);
    }
    let cost = "your own buffers use small pages: registering them takes longer, and a card translates more \
                addresses; Fabric::alloc uses huge pages anyway from Linux 6.1 on";
    Ok(vec![check.warning(chosen, cost, format!("run echo madvise > {TRANSPARENT}"))])
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::super::host::fake::Fake;
    use super::*;

    fn aside(total: &str, free: &str) -> Fake {
        let of = |file: &str| format!("{HUGE}/hugepages-2048kB/{file}");
        Fake::new(&[(&of("nr_hugepages"), total), (&of("free_hugepages"), free)])
    }

    #[test]
    fn efa_cards_need_huge_pages() {
        for (total, free, without, with) in [
            ("0\n", "0\n", Level::Ok, Level::Warning),
            ("8\n", "0\n", Level::Ok, Level::Warning),
            ("8\n", "3\n", Level::Ok, Level::Ok),
        ] {
            let levels = [aside(total, free), aside(total, free).efa("rdmap0s6")]
                .map(|fake| huge(Check("it"), &fake).unwrap()[0].level);
            assert_eq!(levels, [without, with], "{total} {free}");
        }
        assert_eq!(huge(Check("it"), &Fake::new(&[])).unwrap()[0].level, Level::Skipped);
        let said = huge(Check("it"), &aside("many", "0")).unwrap_err().to_string();
        assert!(said.contains("hugepages-2048kB/nr_hugepages"), "{said}");
    }

    #[test]
    fn transparent_ones_are_chosen_in_brackets() {
        let level = |text: &str| {
            let fake = Fake::new(&[(TRANSPARENT, text)]).card("mlx5_0");
            transparent(Check("it"), &fake).map(|found| found[0].level)
        };
        assert_eq!(level("always [madvise] never\n"), Ok(Level::Ok));
        assert_eq!(level("always madvise [never]\n"), Ok(Level::Warning));
        assert!(level("always").unwrap_err().to_string().contains(TRANSPARENT));
    }
}
