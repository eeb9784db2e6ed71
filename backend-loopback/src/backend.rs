//! The backend: devices that are nothing but a name.

use std::sync::Arc;

use multirail_spi::{Backend, DeviceInfo, Domain, DomainSetup, Error, ErrorKind, Probe, Result, Staging};

use crate::domain::LoopbackDomain;
use crate::gpu::{GpuConfig, GpuSide};
use crate::link::LinkModel;

/// How many devices there are and how they behave.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LoopbackConfig {
    /// Devices, named `lo0` and so on; at least one.
    pub devices: u32,
    /// Rail groups they are dealt into, neighbours together: as many threads copy.
    pub groups: u32,
    /// A device to impersonate; `None` copies at once, in the posting thread.
    pub link: Option<LinkModel>,
    /// When bytes may go through shared memory and the target's worker.
    pub staging: Staging,
    /// Blocks of 1024 threads, one to a processor of the GPU, that copy pages at once, over all groups;
    /// at least one. Fewer leave more of the GPU to others; as many as it has processors, or more, leave none.
    pub gpu_blocks: u32,
    /// Which GPU copies what goes from one to another.
    pub gpu_side: GpuSide,
}

/// Blocks that copy pages where nobody said how many: 0.93 of what NVLink carries between two H200s, with a
/// quarter of a GPU's 132 processors (docs/gpu.md).
const GPU_BLOCKS: u32 = 32;

impl Default for LoopbackConfig {
    fn default() -> Self {
        let (staging, gpu_side) = (Staging::Never, GpuSide::Receiver);
        Self { devices: 1, groups: 1, link: None, staging, gpu_blocks: GPU_BLOCKS, gpu_side }
    }
}

impl LoopbackConfig {
    /// `devices` devices.
    pub fn devices(mut self, devices: u32) -> Self {
        self.devices = devices.max(1);
        self
    }

    /// `groups` rail groups, at most one per device.
    pub fn groups(mut self, groups: u32) -> Self {
        self.groups = groups.max(1);
        self
    }

    /// Devices that behave like `link`.
    pub fn link(mut self, link: LinkModel) -> Self {
        self.link = Some(link);
        self
    }

    /// Bytes go through shared memory when `staging` says so.
    pub fn staging(mut self, staging: Staging) -> Self {
        self.staging = staging;
        self
    }

    /// Pages are copied by `blocks` processors of a GPU at once.
    pub fn gpu_blocks(mut self, blocks: u32) -> Self {
        self.gpu_blocks = blocks.max(1);
        self
    }

    /// The GPU on that side copies what goes from one to another.
    pub fn gpu_side(mut self, side: GpuSide) -> Self {
        self.gpu_side = side;
        self
    }

    /// What one device does with GPUs: the groups share the blocks.
    pub(crate) fn gpus(&self) -> GpuConfig {
        let groups = self.groups.min(self.devices).max(1);
        GpuConfig { blocks: self.gpu_blocks, groups, side: self.gpu_side }
    }
}

/// Memory copies on one host.
#[derive(Debug, Clone, Default)]
pub struct Loopback {
    config: LoopbackConfig,
}

impl Loopback {
    /// One device, no link model.
    pub fn new() -> Self {
        Self::default()
    }

    /// As `config` says.
    pub fn with(config: LoopbackConfig) -> Self {
        Self { config }
    }

    /// The same, with bytes going through shared memory when `staging` says so.
    pub fn staging(mut self, staging: Staging) -> Self {
        self.config.staging = staging;
        self
    }

    fn device(&self, number: u32) -> DeviceInfo {
        DeviceInfo {
            name: format!("lo{number}"),
            about: self.about(),
            link_bits_per_s: self.config.link.as_ref().and_then(|link| link.bits_per_s),
            address: None,
            group: group_of(number, self.config.devices, self.config.groups),
        }
    }
}

/// The group of device `number`: none where there is but one.
pub(crate) fn group_of(number: u32, devices: u32, groups: u32) -> Option<u32> {
    let groups = groups.min(devices);
    (groups > 1).then(|| (u64::from(number) * u64::from(groups) / u64::from(devices.max(1))) as u32)
}

impl Loopback {
    fn about(&self) -> String {
        let way = match self.config.link {
            Some(_) => "memory copies behind a link model",
            None => "memory copies on this host",
        };
        let staging = match self.config.staging {
            Staging::Never => "",
            Staging::WhereRefused => ", staged where the kernel refuses",
            Staging::Always => ", all staged",
        };
        format!("{way}{staging}")
    }
}

impl Backend for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn probe(&self) -> Probe {
        Ok((0..self.config.devices.max(1)).map(|number| self.device(number)).collect())
    }

    fn open(&self, device: &DeviceInfo, setup: &DomainSetup) -> Result<Arc<dyn Domain>> {
        let number = device.name.strip_prefix("lo").and_then(|number| number.parse().ok());
        let known = |number: &u32| *number < self.config.devices && device.name == format!("lo{number}");
        let number = number.filter(known).ok_or_else(|| {
            let context = format!(
                "loopback has no device {:?}: it has lo0 to lo{}",
                device.name,
                self.config.devices - 1
            );
            Error::new(ErrorKind::NotFound, "open", context)
        })?;
        Ok(Arc::new(LoopbackDomain::open(number, setup, &self.config)?))
    }
}
