//! Loopback as the environment and this machine want it.

use std::sync::Arc;

use backend_loopback::{Loopback, LoopbackConfig};
use transport_core::Result;
use transport_core::spi::Backend;

use crate::environment::{given, rails};
use crate::registry::Absent;

/// The environment variable that says when loopback may stage.
const STAGING: &str = "MULTIRAIL_LOOPBACK_STAGING";

/// The environment variable that says how many threads copy.
const THREADS: &str = "MULTIRAIL_LOOPBACK_THREADS";

/// Threads that copy where nobody said how many: a second one moves a quarter more of
/// 64 KiB pages, and half again as many of 4 KiB, before memory is what is slow
/// (benches/README.md, Zen 4).
const USUAL_THREADS: usize = 2;

/// Loopback by the variables of this process; unavailable where one is not understood.
pub(crate) fn from_environment() -> Arc<dyn Backend> {
    configured(&given(STAGING).unwrap_or_default(), &given(THREADS).unwrap_or_default())
}

fn configured(staging: &str, threads: &str) -> Arc<dyn Backend> {
    let threads = match how_many(threads) {
        Ok(threads) => threads,
        Err(error) => return Absent::misunderstood("loopback", THREADS, &error),
    };
    match staging.parse() {
        Ok(staging) => {
            let config = LoopbackConfig::default().devices(threads).groups(threads);
            Arc::new(Loopback::with(config.staging(staging)))
        }
        Err(error) => Absent::misunderstood("loopback", STAGING, &error),
    }
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

    #[test]
    fn staging_is_for_the_environment_to_allow() {
        let about = |text: &str| configured(text, "").probe().map(|devices| devices[0].about.clone());
        assert_eq!(about("").unwrap(), "memory copies on this host");
        assert!(about("1").unwrap().contains("staged where the kernel refuses"));
        let why = about("perhaps").unwrap_err();
        assert!(why.reason.contains(STAGING) && why.remedy.contains("give 0, 1 or always"), "{why:?}");
    }

    #[test]
    fn a_device_and_a_group_for_every_thread() {
        let groups = |threads: &str| {
            configured("", threads)
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
