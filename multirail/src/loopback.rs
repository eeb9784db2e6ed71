//! Loopback as the environment and this machine want it.

use std::sync::Arc;

use backend_loopback::{Loopback, LoopbackConfig};
use transport_core::spi::Backend;
use transport_core::{Error, ErrorKind, Result};

use crate::environment::{given, rails};
use crate::registry::Absent;

/// The environment variable that says when loopback may stage.
const STAGING: &str = "MULTIRAIL_LOOPBACK_STAGING";

/// The environment variable that says how many threads copy.
const THREADS: &str = "MULTIRAIL_LOOPBACK_THREADS";

/// The environment variable that says how many processors of a GPU copy pages at once.
const GPU_BLOCKS: &str = "MULTIRAIL_GPU_BLOCKS";

/// The environment variable that says which GPU copies what goes from one to another.
const GPU_SIDE: &str = "MULTIRAIL_GPU_SIDE";

/// Threads that copy where nobody said how many: a second one moves a quarter more of
/// 64 KiB pages, and half again as many of 4 KiB, before memory is what is slow
/// (benches/README.md, Zen 4).
const USUAL_THREADS: usize = 2;

/// Loopback by the variables of this process; unavailable where one is not understood.
pub(crate) fn from_environment() -> Arc<dyn Backend> {
    configured(|name| given(name).unwrap_or_default())
}

fn configured(given: impl Fn(&str) -> String) -> Arc<dyn Backend> {
    match config(given) {
        Ok(config) => Arc::new(Loopback::with(config)),
        Err((variable, error)) => Absent::misunderstood("loopback", variable, &error),
    }
}

fn config(given: impl Fn(&str) -> String) -> Result<LoopbackConfig, (&'static str, Error)> {
    let of = |variable: &'static str| move |error| (variable, error);
    let threads = how_many(&given(THREADS)).map_err(of(THREADS))?;
    let mut config = LoopbackConfig::default().devices(threads).groups(threads);
    config = config.staging(given(STAGING).parse().map_err(of(STAGING))?);
    config = config.gpu_side(given(GPU_SIDE).parse().map_err(of(GPU_SIDE))?);
    match given(GPU_BLOCKS).trim() {
        "" => Ok(config),
        blocks => Ok(config.gpu_blocks(gpu_blocks(blocks).map_err(of(GPU_BLOCKS))?)),
    }
}

fn gpu_blocks(blocks: &str) -> Result<u32> {
    // No GPU has more processors.
    blocks.parse().ok().filter(|blocks| (1..=1024).contains(blocks)).ok_or_else(|| {
        let context = format!("{blocks:?} is no number of blocks: give 1 to 1024");
        Error::new(ErrorKind::InvalidRequest, "read the environment", context)
    })
}

fn how_many(threads: &str) -> Result<u32> {
    match threads.trim() {
        "" => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            Ok(cores.min(USUAL_THREADS) as u32)
        }
        number => rails(THREADS, number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(variable: &str, text: &str) -> Arc<dyn Backend> {
        configured(|name| if name == variable { text.into() } else { String::new() })
    }

    #[test]
    fn gpus_are_used_as_the_environment_says() {
        assert!(given(GPU_BLOCKS, "8").probe().is_ok() && given(GPU_SIDE, "sender").probe().is_ok());
        for wrong in ["0", "-1", "many", "1025"] {
            let why = given(GPU_BLOCKS, wrong).probe().unwrap_err();
            assert!(why.reason.contains(GPU_BLOCKS) && why.remedy.contains("give 1 to 1024"), "{why:?}");
        }
        let why = given(GPU_SIDE, "both").probe().unwrap_err();
        assert!(why.reason.contains(GPU_SIDE) && why.remedy.contains("receiver or sender"), "{why:?}");
    }

    #[test]
    fn staging_is_for_the_environment_to_allow() {
        let about = |text: &str| given(STAGING, text).probe().map(|devices| devices[0].about.clone());
        assert_eq!(about("").unwrap(), "memory copies on this host");
        assert!(about("1").unwrap().contains("staged where the kernel refuses"));
        let why = about("perhaps").unwrap_err();
        assert!(why.reason.contains(STAGING) && why.remedy.contains("give 0, 1 or always"), "{why:?}");
    }

    #[test]
    fn a_device_and_a_group_for_every_thread() {
        let groups = |threads: &str| {
            given(THREADS, threads)
                .probe()
                .map(|devices| devices.iter().map(|device| device.group).collect::<Vec<_>>())
        };
        assert_eq!(groups("1").unwrap(), [None]);
        assert_eq!(groups(" 3 ").unwrap(), [Some(0), Some(1), Some(2)]);
        assert!((1..=2).contains(&groups("").unwrap().len()));
        for wrong in ["0", "65", "-1", "many"] {
            let why = groups(wrong).unwrap_err();
            assert!(why.reason.contains(THREADS) && why.remedy.contains("give 1 to 64"), "{why:?}");
        }
    }
}
