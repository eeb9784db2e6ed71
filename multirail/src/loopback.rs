//! The backend `loopback`, configured by environment variables and this machine.

use std::sync::Arc;

use backend_loopback::{Loopback, LoopbackConfig};
use transport_core::spi::Backend;
use transport_core::{Error, ErrorKind, Result};

use crate::environment::{given, rails};
use crate::registry::UnavailableBackend;

/// The variable that enables loopback's staging.
const STAGING: &str = "MULTIRAIL_LOOPBACK_STAGING";

/// The variable with the number of copying threads.
const THREADS: &str = "MULTIRAIL_LOOPBACK_THREADS";

/// The variable with the number of GPU blocks that copy pages at once.
const GPU_BLOCKS: &str = "MULTIRAIL_GPU_BLOCKS";

/// The variable that chooses which GPU copies between two GPUs.
const GPU_SIDE: &str = "MULTIRAIL_GPU_SIDE";

/// The default number of copying threads. A second thread moves a quarter more pages of 64 KiB, and half again as many
/// of 4 KiB, before memory is the limit (benches/README.md, Zen 4).
const DEFAULT_THREADS: usize = 2;

/// The backend with this process's settings. It is unavailable if a value is invalid.
pub(crate) fn from_environment() -> Arc<dyn Backend> {
    configured(|name| given(name).unwrap_or_default())
}

fn configured(given: impl Fn(&str) -> String) -> Arc<dyn Backend> {
    match config(given) {
        Ok(config) => Arc::new(Loopback::with(config)),
        Err((variable, error)) => UnavailableBackend::invalid_setting("loopback", variable, &error),
    }
}

fn config(given: impl Fn(&str) -> String) -> Result<LoopbackConfig, (&'static str, Error)> {
    let of = |variable: &'static str| move |error| (variable, error);
    let threads = thread_count(&given(THREADS)).map_err(of(THREADS))?;
    let mut config = LoopbackConfig::default().devices(threads).groups(threads);
    // The default depends on the path between processes.
    let staging = given(STAGING);
    if !staging.trim().is_empty() {
        config = config.staging(staging.parse().map_err(of(STAGING))?);
    }
    config = config.gpu_side(given(GPU_SIDE).parse().map_err(of(GPU_SIDE))?);
    match given(GPU_BLOCKS).trim() {
        "" => Ok(config),
        blocks => Ok(config.gpu_blocks(gpu_blocks(blocks).map_err(of(GPU_BLOCKS))?)),
    }
}

fn gpu_blocks(blocks: &str) -> Result<u32> {
    // No GPU has more multiprocessors.
    blocks.parse().ok().filter(|blocks| (1..=1024).contains(blocks)).ok_or_else(|| {
        let context = format!("invalid number of blocks {blocks:?}; use 1 to 1024");
        Error::new(ErrorKind::InvalidRequest, "read the environment", context)
    })
}

fn thread_count(threads: &str) -> Result<u32> {
    match threads.trim() {
        "" => {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            Ok(cores.min(DEFAULT_THREADS) as u32)
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
    fn gpu_settings_come_from_the_environment() {
        assert!(given(GPU_BLOCKS, "8").probe().is_ok() && given(GPU_SIDE, "sender").probe().is_ok());
        for wrong in ["0", "-1", "many", "1025"] {
            let why = given(GPU_BLOCKS, wrong).probe().unwrap_err();
            assert!(why.reason.contains(GPU_BLOCKS) && why.remedy.contains("use 1 to 1024"), "{why:?}");
        }
        let why = given(GPU_SIDE, "both").probe().unwrap_err();
        assert!(why.reason.contains(GPU_SIDE) && why.remedy.contains("receiver or sender"), "{why:?}");
    }

    #[test]
    fn staging_comes_from_the_environment() {
        let about = |text: &str| given(STAGING, text).probe().map(|devices| devices[0].about.clone());
        assert!(about("").unwrap().starts_with("memory copies on this host"));
        assert!(about("1").unwrap().contains("staged where the kernel refuses"));
        let why = about("perhaps").unwrap_err();
        assert!(why.reason.contains(STAGING) && why.remedy.contains("give 0, 1 or always"), "{why:?}");
    }

    #[test]
    fn every_thread_has_a_device_and_a_group() {
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
            assert!(why.reason.contains(THREADS) && why.remedy.contains("use 1 to 64"), "{why:?}");
        }
    }
}
