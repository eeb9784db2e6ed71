//! How GPUs are used.

use multirail_spi::{ErrorKind, Result};

/// Which GPU copies what goes from one to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum GpuSide {
    /// The one that receives: the faster of the two over NVLink. Where it is another process's, this process
    /// takes some 500 MiB of its memory for a context there, and its copies and that process's kernels take
    /// turns.
    #[default]
    Receiver,
    /// The one that has the bytes.
    Sender,
}

impl std::str::FromStr for GpuSide {
    type Err = multirail_spi::Error;

    /// `receiver` or nothing, `sender`.
    fn from_str(text: &str) -> Result<Self> {
        match text.trim() {
            "" | "receiver" => Ok(Self::Receiver),
            "sender" => Ok(Self::Sender),
            other => {
                let context = format!("{other:?} does not say which GPU copies: give receiver or sender");
                Err(multirail_spi::Error::new(ErrorKind::InvalidRequest, "configure loopback", context))
            }
        }
    }
}

/// How GPUs are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GpuConfig {
    /// Blocks of all kernels at once, over all groups, as configured.
    pub(crate) blocks: u32,
    pub(crate) groups: u32,
    pub(crate) side: GpuSide,
}

impl GpuConfig {
    /// Blocks of one group's kernels on a GPU of so many processors.
    pub(super) fn blocks_of_group(&self, processors: u32) -> u32 {
        // Where all of the GPU is to copy, twice as many as have room are launched: those that wait begin where others
        // have ended. Within an H200 pages of 64 KiB moved at 0.867 to 0.893 of one copy, else at 0.847 to 0.873.
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
    fn the_words_of_the_environment() {
        assert_eq!("".parse::<GpuSide>().unwrap(), GpuSide::Receiver);
        assert_eq!(" sender ".parse::<GpuSide>().unwrap(), GpuSide::Sender);
        let refused = "both".parse::<GpuSide>().unwrap_err();
        assert!(refused.context().contains("receiver or sender"), "{refused}");
    }
}
