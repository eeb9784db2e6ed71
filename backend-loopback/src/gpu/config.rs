//! The configuration of GPU copies.

use multirail_spi::{ErrorKind, Result};

/// The GPU that copies from one GPU to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum GpuSide {
    /// The GPU that receives the bytes. Its copies over NVLink are the faster ones. If another process uses that GPU,
    /// this process takes some 500 MiB of its memory for a context of its own, and its copies and the other process's
    /// kernels run one after the other.
    #[default]
    Receiver,
    /// The GPU that has the bytes.
    Sender,
}

impl std::str::FromStr for GpuSide {
    type Err = multirail_spi::Error;

    /// `receiver` or an empty text, or `sender`.
    fn from_str(text: &str) -> Result<Self> {
        match text.trim() {
            "" | "receiver" => Ok(Self::Receiver),
            "sender" => Ok(Self::Sender),
            other => {
                let context = format!("{other:?} does not say which GPU copies: use receiver or sender");
                Err(multirail_spi::Error::new(ErrorKind::InvalidRequest, "configure loopback", context))
            }
        }
    }
}

/// The configuration of one rail group's GPU copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GpuConfig {
    /// The blocks of all kernels together, over all groups, as configured.
    pub(crate) blocks: u32,
    pub(crate) groups: u32,
    pub(crate) side: GpuSide,
}

impl GpuConfig {
    /// The blocks of one group's kernels on a GPU with that many multiprocessors.
    pub(super) fn blocks_of_group(&self, processors: u32) -> u32 {
        // If the whole GPU may copy, a kernel has twice as many blocks as the GPU has room for, and blocks that wait
        // begin where others have ended. With twice as many, pages of 64 KiB within an H200 moved at 0.867 to 0.893
        // of the speed of one copy; with one block for each multiprocessor, at 0.847 to 0.873.
        let all = 2 * processors;
        let blocks = if self.blocks >= processors && all > 0 { all } else { self.blocks };
        (blocks / self.groups).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_share_the_blocks() {
        let share =
            |blocks, groups| GpuConfig { blocks, groups, side: GpuSide::Receiver }.blocks_of_group(132);
        assert_eq!([share(32, 1), share(32, 2), share(1, 2)], [32, 16, 1]);
        assert_eq!([share(131, 2), share(132, 2), share(1024, 1)], [65, 132, 264]);
    }

    #[test]
    fn the_values_of_the_environment_are_parsed() {
        assert_eq!("".parse::<GpuSide>().unwrap(), GpuSide::Receiver);
        assert_eq!(" sender ".parse::<GpuSide>().unwrap(), GpuSide::Sender);
        let refused = "both".parse::<GpuSide>().unwrap_err();
        assert!(refused.context().contains("receiver or sender"), "{refused}");
    }
}
