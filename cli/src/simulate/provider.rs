//! What a write costs the EFA provider of libfabric, in instructions.

use crate::failure::{CommandFailure, CommandResult};

/// The payload of a packet in which libfabric 1.17 emulates writes: the card's MTU of 8760 bytes less headers.
const PACKET: u64 = 8700;

/// A provider whose instructions were counted.
///
/// Callgrind counted them on the simulated cards: `ci/efa-sim/run [--root trixie] target/dist/libfabric instructions
/// --size SIZE`, for writes of 1 KiB to 64 KiB. A figure is the sum of libfabric's own instructions and those of the C
/// library. Some of the latter are the simulated cards'; in return, the driver of a real card (libefa) is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub enum CountedProvider {
    /// The fabric `efa-direct` of libfabric 2.1.
    #[serde(rename = "efa-direct")]
    EfaDirect,
    /// The fabric `efa` of libfabric 2.1.
    #[serde(rename = "efa")]
    Efa,
    /// libfabric 1.17, which emulates writes by messages. The target's processor, which copies the bytes, is not
    /// counted.
    #[serde(rename = "efa-1.17")]
    Efa117,
}

impl CountedProvider {
    /// The provider that `--provider` names.
    pub fn named(name: &str) -> CommandResult<Self> {
        match name {
            "efa-direct" => Ok(Self::EfaDirect),
            "efa" => Ok(Self::Efa),
            "efa-1.17" => Ok(Self::Efa117),
            other => Err(CommandFailure::new(format!(
                "simulate does not know what the provider {other} costs: give efa-direct or efa (libfabric 2.1), or efa-1.17"
            ))),
        }
    }

    /// The instructions of a write of `bytes` bytes.
    pub fn instructions(self, bytes: u64) -> f64 {
        match self {
            // libfabric 341, the C library 393.
            Self::EfaDirect => 734.0,
            // 1167 and 500.
            Self::Efa => 1667.0,
            // One packet: 2067 and 873.
            Self::Efa117 if bytes <= PACKET => 2940.0,
            // 16 KiB, 2 packets: 3680 and 1499. 64 KiB, 8 packets: 8549 and 3634. The line through both.
            Self::Efa117 => 2845.0 + 1167.0 * bytes.div_ceil(PACKET) as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn emulated_writes_cost_by_the_packet() {
        for (bytes, counted) in [(4096, 2940.0), (16_384, 5179.0), (65_536, 12_183.0)] {
            let instructions = CountedProvider::Efa117.instructions(bytes);
            assert!((instructions / counted - 1.0).abs() < 0.001, "{bytes}: {instructions}");
        }
    }
}
