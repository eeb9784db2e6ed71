//! The settings of the simulation, from the environment.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use crate::faults::Faults;
use crate::p5::CARDS;

/// The prefix of every variable.
const PREFIX: &str = "EFA_SIM_";

/// The settings of a process.
#[derive(Debug)]
pub(crate) struct Config {
    /// The number of cards of the host.
    pub(crate) devices: usize,
    /// The folder in which the processes of the simulation find each other.
    pub(crate) dir: PathBuf,
    /// The seed of the order in which requests are executed; 0 for the order of posting.
    pub(crate) seed: u64,
    /// Whether the cards write to remote memory by themselves (RDMA write).
    pub(crate) write: bool,
    /// Whether the cards read remote memory by themselves (RDMA read).
    pub(crate) read: bool,
    /// Whether a write with imm may arrive without a receive.
    pub(crate) unsolicited: bool,
    /// The rate of each card in Gbit/s; 0 for no limit.
    pub(crate) gbps: f64,
    /// The requests per second of each card, of any size; 0 for no limit.
    pub(crate) ops: u64,
    pub(crate) faults: Faults,
    /// Whether the end of every request is printed to standard error.
    pub(crate) trace: bool,
}

impl Config {
    /// Reads the settings among `variables`, and ignores all other variables.
    pub(crate) fn read(variables: impl Iterator<Item = (OsString, OsString)>) -> Result<Self, String> {
        let mut config = Self {
            devices: 1,
            dir: PathBuf::from("/dev/shm/efa-sim"),
            seed: 0,
            write: true,
            read: true,
            unsolicited: true,
            gbps: 0.0,
            ops: 0,
            faults: Faults::default(),
            trace: false,
        };
        for (name, value) in variables {
            let (name, value) = (name.to_string_lossy(), value.to_string_lossy());
            let Some(what) = name.strip_prefix(PREFIX) else { continue };
            config.set(what, &value).map_err(|why| format!("{name}={value}: {why}"))?;
        }
        Ok(config)
    }

    fn set(&mut self, what: &str, value: &str) -> Result<(), String> {
        match what {
            "DEVICES" => {
                let most = format!("a number of cards, 1 to {CARDS}, is expected");
                self.devices = value.parse().ok().filter(|count| (1..=CARDS).contains(count)).ok_or(most)?;
            }
            "DIR" if value.starts_with('/') => self.dir = value.into(),
            "DIR" => return Err("an absolute path is expected".into()),
            "SEED" => self.seed = value.parse().map_err(|_| "a number is expected, 0 for in order")?,
            "RDMA_WRITE" => self.write = switch(value)?,
            "RDMA_READ" => self.read = switch(value)?,
            "UNSOLICITED" => self.unsolicited = switch(value)?,
            "GBPS" => {
                let is_sane = |gbps: &f64| *gbps == 0.0 || (0.001..=1e6).contains(gbps);
                let gbps = value.parse().ok().filter(is_sane);
                self.gbps = gbps.ok_or("Gbit/s are expected, 0.001 to 1000000, or 0 for no limit")?;
            }
            "OPS" => {
                self.ops = value.parse().map_err(|_| "requests a second are expected, or 0 for no limit")?
            }
            "TRACE" => self.trace = switch(value)?,
            "FAULTS" => self.faults = Faults::parse(value)?,
            _ => {
                let known =
                    "DEVICES, DIR, SEED, RDMA_WRITE, RDMA_READ, UNSOLICITED, GBPS, OPS, FAULTS, TRACE";
                return Err(format!("no such setting; there are {known}"));
            }
        }
        Ok(())
    }

    /// The time for which a request of `len` bytes keeps a card busy. `None` if cards have no limits.
    pub(crate) fn occupancy(&self, len: u64) -> Option<Duration> {
        let wire = (self.gbps > 0.0).then(|| Duration::from_secs_f64(len as f64 * 8.0 / self.gbps / 1e9));
        let request = (self.ops > 0).then(|| Duration::from_secs_f64(1.0 / self.ops as f64));
        wire.max(request)
    }
}

fn switch(value: &str) -> Result<bool, String> {
    match value {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("0 or 1 is expected".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Config, String> {
        Config::read(variables.iter().map(|(name, value)| ((*name).into(), (*value).into())))
    }

    #[test]
    fn settings_are_read_and_others_left_alone() {
        let config = read(&[("PATH", "x"), ("EFA_SIM_DEVICES", "32"), ("EFA_SIM_RDMA_WRITE", "0")]);
        assert!(config.is_ok_and(|config| config.devices == 32 && !config.write && config.seed == 0));
    }

    #[test]
    fn wrong_settings_are_named() {
        for (name, value) in [
            ("EFA_SIM_DEVICES", "33"),
            ("EFA_SIM_DEVICES", ""),
            ("EFA_SIM_SEED", "-1"),
            ("EFA_SIM_DIR", "here"),
            ("EFA_SIM_GBPS", "NaN"),
            ("EFA_SIM_GBPS", "1e-300"),
            ("EFA_SIM_OPS", "-1"),
            ("EFA_SIM_OPS", "1e6"),
            ("EFA_SIM_RDMA_READ", "yes"),
            ("EFA_SIM_FAULTS", "die"),
            ("EFA_SIM_TYPO", "1"),
        ] {
            let why = read(&[(name, value)]).err();
            assert!(why.as_ref().is_some_and(|why| why.starts_with(name)), "{name}={value}: {why:?}");
        }
    }

    #[test]
    fn a_request_takes_the_longer_of_its_wire_time_and_the_card_s_time() {
        let occupancy = |variables: &[(&str, &str)], len| read(variables).map(|config| config.occupancy(len));
        let (gbps, ops) = (("EFA_SIM_GBPS", "8"), ("EFA_SIM_OPS", "1000000"));
        let micros = |micros| Ok(Some(Duration::from_micros(micros)));
        assert_eq!(occupancy(&[], 4000), Ok(None));
        assert_eq!(occupancy(&[gbps], 4000), micros(4));
        assert_eq!(occupancy(&[ops], 4000), micros(1));
        assert_eq!(occupancy(&[gbps, ops], 4000), micros(4));
        assert_eq!(occupancy(&[gbps, ops], 100), micros(1));
    }
}
