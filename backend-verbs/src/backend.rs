//! The backend: the ports that can be opened.

use std::path::Path;
use std::sync::Arc;

use multirail_spi::{Backend, DeviceInfo, Domain, DomainSetup, Error, ErrorKind, Probe, Result, Unavailable};

use crate::config::VerbsConfig;
use crate::device::{Device, names};
use crate::domain::{VerbsDomain, suffices};
use crate::gid::choose;
use crate::objects::{VARIABLE, library};
use crate::port::Port;

/// The backend for InfiniBand and RoCE cards. Each active port is a device.
#[derive(Debug, Clone, Default)]
pub struct Verbs {
    config: VerbsConfig,
}

impl Verbs {
    /// All ports, with the default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// All ports, with these options.
    pub fn with(config: VerbsConfig) -> Self {
        Self { config }
    }

    /// The active ports, and the reason against each other port.
    fn find(&self) -> Result<(Vec<DeviceInfo>, Vec<String>)> {
        let (mut active, mut others) = (Vec::new(), Vec::new());
        for name in names()? {
            let device = match Device::open(&name) {
                Ok(device) => device,
                Err(why) => {
                    others.push(format!("{name}: {}", why.context()));
                    continue;
                }
            };
            for number in 1..=device.limits.phys_port_cnt {
                let port = Port::query(&device, number)?;
                let name = match device.limits.phys_port_cnt {
                    1 => name.clone(),
                    _ => format!("{name}:{number}"),
                };
                match self.describe(&device, &port) {
                    Ok(about) => active.push(DeviceInfo {
                        address: address(&device.name),
                        link_bits_per_s: port.rate().filter(|_| !device.is_software()),
                        about,
                        name,
                        group: None,
                    }),
                    Err(why) => others.push(format!("{name}: {why}")),
                }
            }
        }
        Ok((active, others))
    }

    /// The description of a port for people. An error if the port cannot be used.
    fn describe(&self, device: &Device, port: &Port) -> Result<String, String> {
        if !port.is_active() {
            return Err("the port is not active".to_owned());
        }
        suffices(device).map_err(|why| why.context().to_owned())?;
        let gids = port.gids(device).map_err(|why| why.context().to_owned())?;
        let choice = choose(&gids, port.is_ethernet(), self.config.gid_index)
            .map_err(|why| why.context().to_owned())?;
        let others: Vec<_> = choice.others.iter().map(|(gid, why)| format!("{gid}: {why}")).collect();
        let layer = if port.is_ethernet() { "RoCE v2" } else { "InfiniBand" };
        let of = match others.is_empty() {
            true => String::new(),
            false => format!(" (not {})", others.join("; ")),
        };
        Ok(format!("{layer}, port active, MTU {}, GID {}{of}", 128 << port.attr.active_mtu, choice.gid))
    }
}

/// The PCI function of a card. A software device has none.
fn address(device: &str) -> Option<topology::Address> {
    function(&std::fs::canonicalize(format!("/sys/class/infiniband/{device}/device")).ok()?)
}

/// The last PCI function in the path of a device. A subfunction has a directory of its own below it.
fn function(place: &Path) -> Option<topology::Address> {
    place.iter().rev().find_map(|step| step.to_str()?.parse().ok())
}

/// The card and the port of a device name: `mlx5_0`, or `mlx5_0:2` if the card has several ports.
fn parts(name: &str) -> (&str, u8) {
    let port = name.rsplit_once(':').and_then(|(card, port)| Some((card, port.parse().ok()?)));
    port.unwrap_or((name, 1))
}

impl Backend for Verbs {
    fn name(&self) -> &'static str {
        "verbs"
    }

    fn probe(&self) -> Probe {
        if let Err(why) = library() {
            let remedy = format!("install libibverbs (Debian: libibverbs1), or name it by {VARIABLE}");
            return Err(Unavailable { reason: why.context().to_owned(), remedy });
        }
        let remedy =
            "load the card's driver, give the container /dev/infiniband, and bring the port's network \
                      interface up"
                .to_owned();
        match self.find() {
            Ok((active, others)) if !active.is_empty() => {
                others.iter().for_each(|why| tracing::info!(why, "a port cannot be used"));
                Ok(active)
            }
            Ok((_, others)) if others.is_empty() => {
                Err(Unavailable { reason: "this machine has no RDMA device".to_owned(), remedy })
            }
            Ok((_, others)) => Err(Unavailable { reason: others.join("; "), remedy }),
            Err(why) => Err(Unavailable { reason: why.to_string(), remedy }),
        }
    }

    fn drives(&self, card: &topology::Function) -> bool {
        card.kind == topology::Kind::Nic && !topology::is_efa(card.vendor, card.device)
    }

    fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> Result<Arc<dyn Domain>> {
        let (card, number) = parts(&device.name);
        let opened = Device::open(card)?;
        if number == 0 || number > opened.limits.phys_port_cnt {
            let context = format!("{card} has no port {number}");
            return Err(Error::new(ErrorKind::NotFound, "open", context));
        }
        let port = Port::query(&opened, number)?;
        Ok(Arc::new(VerbsDomain::open(opened, port, &self.config, setup)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_a_card_and_maybe_a_port() {
        assert_eq!(
            [parts("rxe0"), parts("mlx5_0:2"), parts("odd:x")],
            [("rxe0", 1), ("mlx5_0", 2), ("odd:x", 1)]
        );
    }

    #[test]
    fn a_subfunction_has_the_address_of_its_card() {
        let of = |place: &str| function(Path::new(place)).map(|address| address.to_string());
        assert_eq!(of("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0").as_deref(), Some("0000:3b:00.0"));
        let sub = of("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0/mlx5_core.sf.4");
        assert_eq!(sub.as_deref(), Some("0000:3b:00.0"));
        assert_eq!(of("/sys/devices/virtual/net/x"), None);
    }

    #[test]
    fn without_a_device_there_is_a_reason() {
        match Verbs::new().probe() {
            Ok(devices) => assert!(!devices.is_empty()),
            Err(why) => assert!(!why.reason.is_empty() && !why.remedy.is_empty()),
        }
    }
}
