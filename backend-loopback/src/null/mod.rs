//! Devices that accept and complete, and move nothing: what is left is what the
//! software above them costs.
//!
//! Nothing written to a null device arrives anywhere, and nobody is told: so it has a
//! name of its own, is in no list of backends, and is opened only by who builds it.

mod domain;
mod endpoint;
mod landing;
mod switch;

use std::sync::Arc;

use multirail_spi::{Backend, DeviceInfo, Domain, DomainSetup, Error, ErrorKind, Probe, Result};

use crate::LinkModel;
use crate::backend::group_of;
use crate::model::Model;
use domain::NullDomain;
pub use switch::Switch;

/// Devices without a line.
///
/// Every request completes at the next poll. A connected peer can be made to send
/// immediate data without end, to measure the receiving side.
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

    /// The devices in `groups` rail groups, neighbours together, at most one per device.
    pub fn groups(mut self, groups: u32) -> Self {
        self.groups = groups.max(1);
        self
    }

    /// Every poll of a device reports so many imms of its first peer, 0 by default.
    pub fn imms_per_poll(mut self, imms: u32) -> Self {
        self.imms_per_poll = imms;
        self
    }

    /// Requests take as long as `link` says, instead of none: a simulation of devices
    /// that are not there.
    pub fn link(mut self, link: LinkModel) -> Self {
        self.link = Some(link);
        self
    }
}

impl Null {
    /// What is posted arrives, through `switch`, at devices behind the same one: no bytes,
    /// but in time, and imms. Needs [`Null::link`] on both sides.
    pub fn switch(mut self, switch: &Switch) -> Self {
        self.switch = Some(switch.clone());
        self
    }

    /// The switch and the links, if there are both.
    fn plugged(&self) -> Option<(&Switch, &LinkModel)> {
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
        let model = self.link.clone().map(|link| Model::new(link, setup.seed, number));
        Ok(Arc::new(NullDomain::open(setup, self, model)?))
    }
}
