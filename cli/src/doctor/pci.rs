//! PCI functions, and whether bridges redirect peer-to-peer traffic to the root complex.

use topology::acs::redirects;

use super::finding::{Check, CheckResult, abbreviated};
use super::host::{ExaminedHost, Unreadable, hex};

const DEVICES: &str = "/sys/bus/pci/devices";

/// A PCI function.
pub struct PciFunction {
    /// The address, such as `0000:00:1e.0`.
    pub address: String,
    pub vendor: u32,
    pub device: u32,
    /// Base class, subclass and interface.
    pub class: u32,
}

impl PciFunction {
    /// All functions of the host.
    pub fn all(host: &ExaminedHost) -> Result<Vec<Self>, Unreadable> {
        let of = |address: String| {
            let field = |name| host.parsed(&format!("{DEVICES}/{address}/{name}"), hex);
            let (vendor, device, class) = (field("vendor")?, field("device")?, field("class")?);
            let [vendor, device, class] = [vendor, device, class].map(Option::unwrap_or_default);
            Ok(Self { address, vendor, device, class })
        };
        host.names(DEVICES)?.into_iter().map(of).collect()
    }

    /// Returns true if the function is a PCI-to-PCI bridge.
    fn is_bridge(&self) -> bool {
        self.class >> 8 == 0x0604
    }
}

/// Checks whether bridges redirect peer-to-peer traffic of their devices.
pub fn acs(check: Check, host: &ExaminedHost) -> CheckResult {
    let (mut redirecting, mut hidden, mut bridges) = (Vec::new(), 0, 0);
    for bridge in PciFunction::all(host)?.into_iter().filter(PciFunction::is_bridge) {
        bridges += 1;
        let path = format!("{DEVICES}/{}/config", bridge.address);
        let config = host.bytes(&path)?.unwrap_or_default();
        match redirects(&config).map_err(|why| Unreadable::malformed(&path, why))? {
            None => hidden += 1,
            Some(true) => redirecting.push(bridge.address),
            Some(false) => {}
        }
    }
    if bridges == 0 {
        return Ok(vec![check.skipped("no PCI bridge")]);
    }
    if redirecting.is_empty() && hidden > 0 {
        let why =
            format!("reading the ACS state of {hidden} of {bridges} bridges needs root (CAP_SYS_ADMIN)");
        return Ok(vec![check.skipped(why)]);
    }
    if redirecting.is_empty() {
        return Ok(vec![check.ok(format!("none of {bridges} bridges redirects peer-to-peer traffic"))]);
    }
    let value = format!(
        "{} of {bridges} bridges redirect peer-to-peer traffic: {}",
        redirecting.len(),
        abbreviated(&redirecting)
    );
    if !host.has_hardware() && !host.has_gpu() {
        return Ok(vec![check.ok(format!("{value}; no card or GPU is behind them"))]);
    }
    let cost = "traffic between GPUs and cards goes through the root complex: it is slower or fails";
    let remedy = format!(
        "turn ACS off in the firmware, or until the next boot for each bridge: setpci -s {} ECAP_ACS+6.w=0; keep \
         it if virtual machines need it",
        redirecting[0]
    );
    Ok(vec![check.warning(value, cost, remedy)])
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::super::host::fake::Fake;
    use super::*;

    /// A bridge's configuration with these bits in the control register of its ACS.
    fn config(bits: u32) -> Vec<u8> {
        let mut config = vec![0; 4096];
        config[0x100..0x104].copy_from_slice(&0x0001_000d_u32.to_le_bytes());
        config[0x104..0x108].copy_from_slice(&(bits << 16 | 0x7f).to_le_bytes());
        config
    }

    fn bridge(config: &[u8]) -> Fake {
        let of = |file: &str| format!("{DEVICES}/0000:00:01.0/{file}");
        let ids = [(of("vendor"), "0x8086\n"), (of("device"), "0x1234\n"), (of("class"), "0x060400\n")];
        let files: Vec<_> = ids.iter().map(|(path, content)| (path.as_str(), *content)).collect();
        Fake::new(&files).with(&of("config"), config)
    }

    #[test]
    fn redirection_matters_where_there_are_cards() {
        for (bits, level) in [(0x1d, Level::Warning), (0x51, Level::Ok)] {
            let carded = bridge(&config(bits)).card("mlx5_0");
            assert_eq!(acs(Check("it"), &carded).unwrap()[0].level, level, "{bits:#x}");
            assert_eq!(acs(Check("it"), &bridge(&config(bits))).unwrap()[0].level, Level::Ok);
        }
    }

    #[test]
    fn short_and_strange_configurations() {
        let found = acs(Check("it"), &bridge(&[0; 64]).card("mlx5_0")).unwrap();
        assert!(found[0].level == Level::Skipped && found[0].what.contains("needs root"));
        let mut circle = vec![0; 4096];
        circle[0x100..0x104].copy_from_slice(&0x1001_0001_u32.to_le_bytes());
        let said = acs(Check("it"), &bridge(&circle)).unwrap_err().to_string();
        assert!(said.contains("0000:00:01.0/config"), "{said}");
        assert_eq!(acs(Check("it"), &Fake::new(&[])).unwrap()[0].level, Level::Skipped);
        let odd = Fake::new(&[(&format!("{DEVICES}/0000:00:01.0/class"), "bridge")]);
        assert!(acs(Check("it"), &odd).unwrap_err().to_string().contains("0000:00:01.0/class"));
    }
}
