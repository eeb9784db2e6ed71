//! The configuration of loopback's devices.

use multirail_spi::{HostSharing, StagingPolicy};

use crate::gpu::{GpuConfig, GpuSide};
use crate::link_model::LinkModel;

/// The number of devices, and how they behave.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LoopbackConfig {
    /// Devices, at least one. Their names are `lo0`, `lo1` and so on.
    pub devices: u32,
    /// Rail groups. Devices with consecutive numbers share a group. Each group has a thread that copies.
    pub groups: u32,
    /// The device to model. With `None`, the posting thread copies at once.
    pub link: Option<LinkModel>,
    /// When requests may go through shared memory and the target's worker. The default is `Never`, and `WhereRefused`
    /// on the portable path (macOS), where nothing else reaches memory that was not allocated as shared.
    pub staging: StagingPolicy,
    /// Blocks of 1024 threads that copy pages at once, over all groups; at least one. A block takes one
    /// multiprocessor of the GPU. Fewer blocks leave more of the GPU to other work; as many as the GPU has
    /// multiprocessors, or more, leave none.
    pub gpu_blocks: u32,
    /// The GPU that copies from one GPU to another.
    pub gpu_side: GpuSide,
}

/// The default of blocks that copy pages. They reach 0.93 of NVLink's bandwidth between two H200s, with a quarter of
/// a GPU's 132 multiprocessors (docs/gpu.md).
const GPU_BLOCKS: u32 = 32;

impl Default for LoopbackConfig {
    fn default() -> Self {
        let is_portable = HostSharing::of_this_process().is_ok_and(HostSharing::is_portable);
        let staging = if is_portable { StagingPolicy::WhereRefused } else { StagingPolicy::Never };
        let gpu_side = GpuSide::Receiver;
        Self { devices: 1, groups: 1, link: None, staging, gpu_blocks: GPU_BLOCKS, gpu_side }
    }
}

impl LoopbackConfig {
    /// Sets the number of devices, at least one.
    pub fn devices(mut self, devices: u32) -> Self {
        self.devices = devices.max(1);
        self
    }

    /// Sets the number of rail groups, at least one and at most one per device.
    pub fn groups(mut self, groups: u32) -> Self {
        self.groups = groups.max(1);
        self
    }

    /// Sets the device to model.
    pub fn link(mut self, link: LinkModel) -> Self {
        self.link = Some(link);
        self
    }

    /// Sets when requests may go through shared memory and the target's worker.
    pub fn staging(mut self, staging: StagingPolicy) -> Self {
        self.staging = staging;
        self
    }

    /// Sets the number of blocks that copy pages at once, at least one.
    pub fn gpu_blocks(mut self, blocks: u32) -> Self {
        self.gpu_blocks = blocks.max(1);
        self
    }

    /// Sets the GPU that copies from one GPU to another.
    pub fn gpu_side(mut self, side: GpuSide) -> Self {
        self.gpu_side = side;
        self
    }

    /// The GPU configuration of one device. The groups share the blocks.
    pub(crate) fn gpus(&self) -> GpuConfig {
        let groups = self.groups.min(self.devices).max(1);
        GpuConfig { blocks: self.gpu_blocks, groups, side: self.gpu_side }
    }
}

/// The group of device `number`. `None` if there is only one group.
pub(crate) fn group_of(number: u32, devices: u32, groups: u32) -> Option<u32> {
    let groups = groups.min(devices);
    (groups > 1).then(|| (u64::from(number) * u64::from(groups) / u64::from(devices.max(1))) as u32)
}
