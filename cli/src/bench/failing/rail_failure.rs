//! The failure of one rail: when it happens, and what has to be told afterwards.

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use multirail::spi::PeerSlot;
use multirail::{Clock, Time};

/// The value of `--fail-rail`: a device, and the time from the start of the measurement to its loss.
#[derive(Debug, Clone, PartialEq)]
pub struct FailRail {
    pub device: String,
    pub after: Duration,
}

impl FromStr for FailRail {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "write a rail's device and seconds, like lo1@0.5".to_owned();
        let (device, seconds) = text.rsplit_once('@').ok_or_else(wrong)?;
        let seconds: f64 = seconds.parse().map_err(|_| wrong())?;
        match device {
            "" => Err(wrong()),
            _ if !(0.0..=24.0 * 3600.0).contains(&seconds) => {
                Err("the seconds must be between 0 and a day".to_owned())
            }
            device => Ok(Self { device: device.to_owned(), after: Duration::from_secs_f64(seconds) }),
        }
    }
}

/// The state that the measurement shares with the failing device.
pub struct RailFailure {
    rail: FailRail,
    /// The fabric's clock. Set when the device is opened.
    clock: OnceLock<Arc<dyn Clock>>,
    /// The earliest time of the loss. Set when the measurement begins.
    at: OnceLock<Time>,
    is_lost: AtomicBool,
    /// The slots that were disconnected, and whose last event has not come.
    leaving: Mutex<Vec<PeerSlot>>,
}

impl RailFailure {
    /// The failure of this rail.
    pub fn new(rail: FailRail) -> Arc<Self> {
        let (clock, at) = (OnceLock::new(), OnceLock::new());
        Arc::new(Self { rail, clock, at, is_lost: AtomicBool::new(false), leaving: Mutex::default() })
    }

    /// The rail that fails.
    pub fn rail(&self) -> &FailRail {
        &self.rail
    }

    /// Begins to count the time. Later calls do nothing.
    pub fn begin(&self) {
        if let Some(clock) = self.clock.get() {
            self.at.get_or_init(|| clock.now().after(self.rail.after));
        }
    }

    /// Returns true once the device is lost.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Notes that the device was opened by a fabric with this clock.
    pub(super) fn opened(&self, clock: &Arc<dyn Clock>) {
        let _ = self.clock.set(Arc::clone(clock));
    }

    /// Returns true once the time of the loss has come.
    pub(super) fn is_due(&self) -> bool {
        let clock = self.clock.get();
        self.at.get().zip(clock).is_some_and(|(at, clock)| clock.now() >= *at)
    }

    /// Notes that the device is lost.
    pub(super) fn lose(&self) {
        self.is_lost.store(true, Ordering::Release);
    }

    /// The slots that were disconnected, and whose last event has not come.
    pub(super) fn leaving(&self) -> MutexGuard<'_, Vec<PeerSlot>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_a_device_and_seconds() {
        let rail = |device: &str, millis| {
            Ok(FailRail { device: device.to_owned(), after: Duration::from_millis(millis) })
        };
        assert_eq!("lo1@0.5".parse(), rail("lo1", 500));
        assert_eq!("a@b@2".parse(), rail("a@b", 2000));
        for wrong in ["lo1", "@1", "lo1@", "lo1@soon"] {
            assert!(wrong.parse::<FailRail>().unwrap_err().contains("like lo1@0.5"), "{wrong}");
        }
        for wrong in ["lo1@-1", "lo1@1e9", "lo1@NaN"] {
            assert!(wrong.parse::<FailRail>().unwrap_err().contains("between 0 and a day"), "{wrong}");
        }
    }
}
