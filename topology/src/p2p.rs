//! Peer to peer: whether one PCI function can reach the memory of another, as the kernel decides
//! (`calc_map_type_and_dist` in its `drivers/pci/p2pdma.c`).

use std::fmt;

use serde::Serialize;

use crate::{Address, Function, Machine};

/// How a PCI function reaches the memory of another function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeerToPeer {
    /// The number of bridges between them, as the kernel counts: from each function up to the bridge that they share,
    /// or else up to the root.
    pub distance: u32,
    /// What forwards the requests.
    pub route: Route,
}

/// What forwards requests from one function to the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Route {
    /// The PCIe switch that both are behind. The kernel maps bus addresses.
    Switch,
    /// The root complex, which is known to forward such requests.
    RootComplex(OffSwitch),
    /// Nothing: the kernel refuses, because the root complex is not known to forward.
    Refused(OffSwitch),
}

/// Why the requests do not stay within a switch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OffSwitch {
    /// The functions share no bridge.
    NoSharedBridge,
    /// These bridges redirect the requests to the root complex (ACS).
    Redirected(Vec<Address>),
}

impl PeerToPeer {
    /// How `device` reaches the memory of the function `memory`. `forwards` is the answer of [`forwards_peers`].
    ///
    /// A bridge whose ACS this user may not read is taken for one that does not redirect.
    pub fn between(machine: &Machine, memory: &Function, device: &Function, forwards: bool) -> Self {
        let (up, down) = (&memory.bridges, &device.bridges);
        let shared = match memory.root == device.root {
            true => up.iter().zip(down).take_while(|(a, b)| a == b).count(),
            false => 0,
        };
        let is_itself = memory.address == device.address;
        if shared == 0 && !is_itself {
            // The kernel counts up to the root on both sides.
            let distance = (up.len() + down.len()) as u32 + 2;
            return Self {
                distance,
                route: through_root(machine, memory, device, forwards, OffSwitch::NoSharedBridge),
            };
        }
        let distance = if is_itself { 0 } else { (up.len() + down.len() + 2 - 2 * shared) as u32 };
        // The shared bridge, at which the requests turn downwards, counts as well, as it does for the kernel.
        let passed = up[shared.saturating_sub(1)..].iter().chain(&down[shared..]);
        let redirects =
            |at: &&Address| machine.function(**at).and_then(|bridge| bridge.redirects) == Some(true);
        let redirecting: Vec<Address> = passed.filter(redirects).copied().collect();
        let route = match redirecting.is_empty() || is_itself {
            true => Route::Switch,
            false => through_root(machine, memory, device, forwards, OffSwitch::Redirected(redirecting)),
        };
        Self { distance, route }
    }

    /// Whether the kernel allows it at all.
    pub fn is_possible(&self) -> bool {
        !matches!(self.route, Route::Refused(_))
    }
}

fn through_root(machine: &Machine, a: &Function, b: &Function, forwards: bool, reason: OffSwitch) -> Route {
    let known = |function: &Function| host_bridge(machine, function).and_then(is_own_bus_only);
    let by_bridges = match (known(a), known(b)) {
        (Some(_), Some(_)) if a.root == b.root => true,
        (Some(same_only), Some(also)) => !same_only && !also,
        _ => false,
    };
    if forwards || by_bridges { Route::RootComplex(reason) } else { Route::Refused(reason) }
}

/// The PCI function of the host bridge itself: the first one on its bus.
fn host_bridge<'a>(machine: &'a Machine, below: &Function) -> Option<&'a Function> {
    let is_it = |function: &&Function| {
        let at = function.address;
        function.root == below.root && (at.bus, at.device, at.function) == (below.root.bus, 0, 0)
    };
    machine.functions.iter().find(is_it)
}

/// For Intel's host bridges that the kernel trusts to forward (`pci_p2pdma_whitelist`): whether they forward only
/// within their own bus. `None` for all other bridges.
fn is_own_bus_only(bridge: &Function) -> Option<bool> {
    match (bridge.vendor, bridge.device) {
        (0x8086, 0x3c00 | 0x3c01 | 0x2f00 | 0x2f01) => Some(true),
        (0x8086, 0x2020 | 0x2030..=0x2033 | 0x09a2) => Some(false),
        _ => None,
    }
}

/// Whether a processor's root complex forwards requests between functions: AMD's do since Zen (family 17h and later;
/// `cpu_supports_p2pdma`). `cpuinfo` is the text of `/proc/cpuinfo`.
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
        let text = |reason: &OffSwitch| match reason {
            OffSwitch::NoSharedBridge => "they share no PCIe switch".to_owned(),
            OffSwitch::Redirected(bridges) => {
                let bridges: Vec<String> = bridges.iter().map(ToString::to_string).collect();
                format!("ACS of {} redirects it", bridges.join(", "))
            }
        };
        match &self.route {
            Route::Switch => write!(out, "within the PCIe switch, distance {}", self.distance),
            Route::RootComplex(reason) => {
                write!(out, "by the root complex, distance {}: {}", self.distance, text(reason))
            }
            Route::Refused(reason) => {
                write!(out, "not possible: {}, and this root complex is not known to forward", text(reason))
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

    fn route(machine: &Machine, a: &str, b: &str, forwards: bool) -> PeerToPeer {
        let at = |address: &str| machine.function(address.parse().unwrap()).unwrap();
        PeerToPeer::between(machine, at(a), at(b), forwards)
    }

    #[test]
    fn the_distance_within_a_switch_is_the_kernels() {
        // 53:00.0 - 46:01.4 - 45:00.0 - 46:01.0 - 4f:00.0: two up, two down.
        let near = route(&p5(), "0000:53:00.0", "0000:4f:00.0", false);
        assert_eq!(near, PeerToPeer { distance: 4, route: Route::Switch });
        assert!(near.is_possible());
        assert_eq!(route(&p5(), "0000:53:00.0", "0000:53:00.0", false).distance, 0);
    }

    #[test]
    fn beyond_the_switch_the_processor_decides() {
        let far = |forwards| route(&p5(), "0000:53:00.0", "0000:60:00.0", forwards);
        assert_eq!(far(true).route, Route::RootComplex(OffSwitch::NoSharedBridge));
        assert_eq!(far(false).route, Route::Refused(OffSwitch::NoSharedBridge));
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
        let redirected = route(&machine, "0000:53:00.0", "0000:4f:00.0", true);
        assert_eq!(redirected.route, Route::RootComplex(OffSwitch::Redirected(vec![port])));
        assert_eq!(route(&machine, "0000:53:00.0", "0000:50:00.0", true).route, Route::Switch);
        let shared: Address = "0000:45:00.0".parse().unwrap();
        redirect(&mut machine, shared);
        let redirected = route(&machine, "0000:53:00.0", "0000:50:00.0", false);
        assert_eq!(redirected.route, Route::Refused(OffSwitch::Redirected(vec![shared])));
    }

    #[test]
    fn host_bridges_of_intel_are_known() {
        let mut machine = p5();
        for bridge in machine.functions.iter_mut().filter(|one| one.bridges.is_empty()) {
            (bridge.vendor, bridge.device) = (0x8086, 0x2030);
        }
        assert!(route(&machine, "0000:53:00.0", "0000:60:00.0", false).is_possible());
        for bridge in machine.functions.iter_mut().filter(|one| one.bridges.is_empty()) {
            bridge.device = 0x2f00;
        }
        assert!(!route(&machine, "0000:53:00.0", "0000:60:00.0", false).is_possible());
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
