//! Peer to peer: whether one PCI function's memory can be reached by another, as the kernel decides
//! (`calc_map_type_and_dist` in its `drivers/pci/p2pdma.c`).

use std::fmt;

use serde::Serialize;

use crate::{Address, Function, Machine};

/// The way between a function's memory and another function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeerToPeer {
    /// Bridges on the way, as the kernel counts: from either function up to what they share, else
    /// up to the root.
    pub distance: u32,
    /// What carries it.
    pub way: Way,
}

/// What carries peer to peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// A switch that both are behind: the kernel maps bus addresses.
    Switch,
    /// The root complex, which is known to forward.
    RootComplex(Why),
    /// None that the kernel would use: no processor or bridge is known to forward.
    Refused(Why),
}

/// Why it does not stay within a switch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// They share no bridge.
    NoSharedBridge,
    /// These bridges on the way redirect it up (ACS).
    Redirected(Vec<Address>),
}

impl PeerToPeer {
    /// From `memory`'s function to `device`; `forwards` as [`forwards_peers`] says.
    ///
    /// Bridges whose ACS is not shown to this user count as such that do not redirect.
    pub fn between(machine: &Machine, memory: &Function, device: &Function, forwards: bool) -> Self {
        let (up, down) = (&memory.bridges, &device.bridges);
        let shared = match memory.root == device.root {
            true => up.iter().zip(down).take_while(|(a, b)| a == b).count(),
            false => 0,
        };
        let is_itself = memory.address == device.address;
        if shared == 0 && !is_itself {
            // The kernel's count runs to the top on both sides.
            let distance = (up.len() + down.len()) as u32 + 2;
            return Self {
                distance,
                way: through_root(machine, memory, device, forwards, Why::NoSharedBridge),
            };
        }
        let distance = if is_itself { 0 } else { (up.len() + down.len() + 2 - 2 * shared) as u32 };
        // The bridge that turns it round counts as well, as it does for the kernel.
        let passed = up[shared.saturating_sub(1)..].iter().chain(&down[shared..]);
        let redirects =
            |at: &&Address| machine.function(**at).and_then(|bridge| bridge.redirects) == Some(true);
        let redirecting: Vec<Address> = passed.filter(redirects).copied().collect();
        let way = match redirecting.is_empty() || is_itself {
            true => Way::Switch,
            false => through_root(machine, memory, device, forwards, Why::Redirected(redirecting)),
        };
        Self { distance, way }
    }

    /// Whether the kernel maps it at all.
    pub fn is_possible(&self) -> bool {
        !matches!(self.way, Way::Refused(_))
    }
}

fn through_root(machine: &Machine, a: &Function, b: &Function, forwards: bool, why: Why) -> Way {
    let known = |function: &Function| host_bridge(machine, function).and_then(whitelisted);
    let by_bridges = match (known(a), known(b)) {
        (Some(_), Some(_)) if a.root == b.root => true,
        (Some(same_only), Some(also)) => !same_only && !also,
        _ => false,
    };
    if forwards || by_bridges { Way::RootComplex(why) } else { Way::Refused(why) }
}

/// The host bridge's own function: the first on its bus.
fn host_bridge<'a>(machine: &'a Machine, below: &Function) -> Option<&'a Function> {
    let is_it = |function: &&Function| {
        let at = function.address;
        function.root == below.root && (at.bus, at.device, at.function) == (below.root.bus, 0, 0)
    };
    machine.functions.iter().find(is_it)
}

/// Intel's host bridges that the kernel trusts to forward, and whether only to their own bus
/// (`pci_p2pdma_whitelist`).
fn whitelisted(bridge: &Function) -> Option<bool> {
    match (bridge.vendor, bridge.device) {
        (0x8086, 0x3c00 | 0x3c01 | 0x2f00 | 0x2f01) => Some(true),
        (0x8086, 0x2020 | 0x2030..=0x2033 | 0x09a2) => Some(false),
        _ => None,
    }
}

/// Whether a processor's root complex forwards peers' requests: AMD's since Zen (family 17h and
/// later; `cpu_supports_p2pdma`). `cpuinfo` is the text of `/proc/cpuinfo`.
pub fn forwards_peers(cpuinfo: &str) -> bool {
    let field = |name: &str| {
        let line =
            cpuinfo.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
        line.split_once(':').map(|(_, value)| value.trim())
    };
    let family = field("cpu family").and_then(|family| family.parse::<u32>().ok());
    field("vendor_id") == Some("AuthenticAMD") && family.is_some_and(|family| family >= 0x17)
}

impl fmt::Display for PeerToPeer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = |why: &Why| match why {
            Why::NoSharedBridge => "they share no PCIe switch".to_owned(),
            Why::Redirected(bridges) => {
                let bridges: Vec<String> = bridges.iter().map(ToString::to_string).collect();
                format!("ACS of {} redirects it", bridges.join(", "))
            }
        };
        match &self.way {
            Way::Switch => write!(out, "within the PCIe switch, distance {}", self.distance),
            Way::RootComplex(reason) => {
                write!(out, "by the root complex, distance {}: {}", self.distance, why(reason))
            }
            Way::Refused(reason) => {
                write!(out, "not possible: {}, and this root complex is not known to forward", why(reason))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Description;

    fn p5() -> Machine {
        Description::p5().machine().unwrap()
    }

    fn way(machine: &Machine, a: &str, b: &str, forwards: bool) -> PeerToPeer {
        let at = |address: &str| machine.function(address.parse().unwrap()).unwrap();
        PeerToPeer::between(machine, at(a), at(b), forwards)
    }

    #[test]
    fn a_switch_carries_it_and_counts_as_the_kernel_does() {
        // 53:00.0 - 46:01.4 - 45:00.0 - 46:01.0 - 4f:00.0: two up, two down.
        let near = way(&p5(), "0000:53:00.0", "0000:4f:00.0", false);
        assert_eq!(near, PeerToPeer { distance: 4, way: Way::Switch });
        assert!(near.is_possible());
        assert_eq!(way(&p5(), "0000:53:00.0", "0000:53:00.0", false).distance, 0);
    }

    #[test]
    fn beyond_the_switch_the_processor_decides() {
        let far = |forwards| way(&p5(), "0000:53:00.0", "0000:60:00.0", forwards);
        assert_eq!(far(true).way, Way::RootComplex(Why::NoSharedBridge));
        assert_eq!(far(false).way, Way::Refused(Why::NoSharedBridge));
        assert!(!far(false).is_possible() && far(false).to_string().contains("not known to forward"));
        assert_eq!(far(false).distance, 8);
    }

    #[test]
    fn acs_on_the_way_redirects() {
        let mut machine = p5();
        let port: Address = "0000:46:01.0".parse().unwrap();
        let redirect = |machine: &mut Machine, at: Address| {
            let bridge = machine.functions.iter_mut().find(|one| one.address == at);
            bridge.unwrap().redirects = Some(true);
        };
        redirect(&mut machine, port);
        let redirected = way(&machine, "0000:53:00.0", "0000:4f:00.0", true);
        assert_eq!(redirected.way, Way::RootComplex(Why::Redirected(vec![port])));
        assert_eq!(way(&machine, "0000:53:00.0", "0000:50:00.0", true).way, Way::Switch);
        let shared: Address = "0000:45:00.0".parse().unwrap();
        redirect(&mut machine, shared);
        let redirected = way(&machine, "0000:53:00.0", "0000:50:00.0", false);
        assert_eq!(redirected.way, Way::Refused(Why::Redirected(vec![shared])));
    }

    #[test]
    fn host_bridges_of_intel_are_known() {
        let mut machine = p5();
        for bridge in machine.functions.iter_mut().filter(|one| one.bridges.is_empty()) {
            (bridge.vendor, bridge.device) = (0x8086, 0x2030);
        }
        assert!(way(&machine, "0000:53:00.0", "0000:60:00.0", false).is_possible());
        for bridge in machine.functions.iter_mut().filter(|one| one.bridges.is_empty()) {
            bridge.device = 0x2f00;
        }
        assert!(!way(&machine, "0000:53:00.0", "0000:60:00.0", false).is_possible());
    }

    #[test]
    fn zen_forwards() {
        let cpu = |vendor: &str, family: u32| {
            format!("processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\n")
        };
        assert!(forwards_peers(&cpu("AuthenticAMD", 25)));
        assert!(!forwards_peers(&cpu("AuthenticAMD", 16)) && !forwards_peers(&cpu("GenuineIntel", 25)));
        assert!(!forwards_peers(""));
    }
}
