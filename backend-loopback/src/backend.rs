//! The backend. Its devices are names without hardware.

use std::sync::Arc;

use multirail_spi::{
    Backend, DeviceInfo, Domain, DomainSetup, Error, ErrorKind, HostSharing, Probe, Result, StagingPolicy,
    Unavailable, copy::StreamChoice,
};

use crate::config::{LoopbackConfig, group_of};
use crate::domain::LoopbackDomain;

/// Memory copies on one host.
#[derive(Debug, Clone, Default)]
pub struct Loopback {
    config: LoopbackConfig,
}

impl Loopback {
    /// One device without a link model.
    pub fn new() -> Self {
        Self::default()
    }

    /// Devices as `config` says.
    pub fn with(config: LoopbackConfig) -> Self {
        Self { config }
    }

    /// Sets when requests may go through shared memory and the target's worker.
    pub fn staging(mut self, staging: StagingPolicy) -> Self {
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

    fn about(&self) -> String {
        let copies = match self.config.link {
            Some(_) => "memory copies behind a link model",
            None => "memory copies on this host",
        };
        let is_portable = HostSharing::of_this_process().is_ok_and(HostSharing::is_portable);
        let path =
            if is_portable { ", between processes by the portable path (POSIX shared memory)" } else { "" };
        let staging = match self.config.staging {
            StagingPolicy::Never => "",
            StagingPolicy::WhereRefused if is_portable => ", staged where memory is not shared",
            StagingPolicy::WhereRefused => ", staged where the kernel refuses",
            StagingPolicy::Always => ", all staged",
        };
        // A link model may be in virtual time: its bytes are few, and its figures say nothing of this processor.
        let stream_loop = match (&self.config.link, StreamChoice::of_ranges()) {
            (None, Some(choice)) => format!("; cold copies by {choice}"),
            _ => String::new(),
        };
        format!("{copies}{path}{staging}{stream_loop}")
    }
}

impl Backend for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn probe(&self) -> Probe {
        HostSharing::of_this_process().and_then(|_| StreamChoice::check_setting()).map_err(|error| {
            Unavailable {
                reason: "an environment variable has an invalid value".into(),
                remedy: error.context().into(),
            }
        })?;
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
