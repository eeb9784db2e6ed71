//! Null devices: they accept and complete requests, and move no byte, so that benchmarks measure the software above
//! them.
//!
//! Bytes that are written to a null device are lost without an error. Therefore the backend has a name of its own, is
//! in no list of backends, and is opened only by code that constructs it.

mod domain;
mod endpoint;
mod switch;

use std::sync::Arc;

use multirail_spi::{Backend, DeviceInfo, Domain, DomainSetup, Error, ErrorKind, Probe, Result};

use crate::LinkModel;
use crate::config::group_of;
use crate::link_model::DeviceModel;
use domain::NullDomain;
pub use switch::Switch;

/// Devices that move no byte.
///
/// Every request completes at the next poll. To measure the receiving side, a device can report endless immediate
/// data of a connected peer.
///
/// ```
/// use std::sync::Arc;
/// use multirail_loopback::Null;
/// use transport_core::{Access, FabricBuilder, TransportConfig};
/// # fn main() -> multirail_spi::Result<()> {
/// let open = || {
///     let null = TransportConfig::new("null", Arc::new(Null::new(4)));
///     FabricBuilder::new().transport(null).caller_driven().open()
/// };
/// let (here, there) = (open()?, open()?);
/// let (peer, _) = here.connect_local(&there)?;
/// let source = here.alloc(64 << 10, Access::LOCAL)?;
/// let target = there.alloc(64 << 10, Access::REMOTE_WRITE)?;
/// let target = peer.import(&target.descriptor())?;
/// let mut op = peer.write(&source, 0..64 << 10, &target, 0)?;
/// assert_eq!(op.wait(std::time::Duration::from_secs(5))?.bytes, 64 << 10);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Null {
    devices: u32,
    groups: u32,
    imms_per_poll: u32,
    link: Option<LinkModel>,
    switch: Option<Switch>,
}

impl Null {
    /// `devices` devices, at least one.
    pub fn new(devices: u32) -> Self {
        Self { devices: devices.max(1), groups: 1, imms_per_poll: 0, link: None, switch: None }
    }

    /// Sets the number of rail groups, at most one per device. Devices with consecutive numbers share a group.
    pub fn groups(mut self, groups: u32) -> Self {
        self.groups = groups.max(1);
        self
    }

    /// Sets how many imms of its first peer a device reports at every poll. The default is 0.
    pub fn imms_per_poll(mut self, imms: u32) -> Self {
        self.imms_per_poll = imms;
        self
    }

    /// Sets a link model: requests take as long as on that device, instead of no time.
    pub fn link(mut self, link: LinkModel) -> Self {
        self.link = Some(link);
        self
    }

    /// Connects the devices to `switch`. Requests to other devices of the same switch arrive there after the modelled
    /// time, with their imms and without their bytes. Needs [`Null::link`] on both sides.
    pub fn switch(mut self, switch: &Switch) -> Self {
        self.switch = Some(switch.clone());
        self
    }

    /// The switch and the link model, if both are set.
    fn switch_and_link(&self) -> Option<(&Switch, &LinkModel)> {
        self.switch.as_ref().zip(self.link.as_ref())
    }
}

impl Backend for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    fn probe(&self) -> Probe {
        let device = |number| DeviceInfo {
            name: format!("null{number}"),
            about: "moves nothing: measures the software above it".into(),
            link_bits_per_s: self.link.as_ref().and_then(|link| link.bits_per_s),
            address: None,
            group: group_of(number, self.devices, self.groups),
        };
        Ok((0..self.devices).map(device).collect())
    }

    fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> Result<Arc<dyn Domain>> {
        let known = (0..self.devices).find(|number| device.name == format!("null{number}"));
        let number = known.ok_or_else(|| {
            let context = format!("no device {:?}: there are null0 to null{}", device.name, self.devices - 1);
            Error::new(ErrorKind::NotFound, "open", context)
        })?;
        let model = self.link.clone().map(|link| DeviceModel::new(link, setup.seed, number));
        Ok(Arc::new(NullDomain::open(setup, self, model)?))
    }
}
