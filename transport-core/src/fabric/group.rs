//! A rail group: the devices next to one GPU or NUMA node, and the engine that drives them.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::lock;
use crate::Time;
use crate::engine::{Engine, EngineHandle, StepReport};
use crate::spi::DeviceInfo;

/// A rail group of an opened transport.
pub(crate) struct Group {
    pub engine: Arc<EngineHandle>,
    /// The group's range among the transport's rails.
    pub rails: Range<usize>,
    /// The engine itself, if the caller drives it.
    pub driven: Option<Arc<Mutex<Engine>>>,
}

impl Group {
    /// Runs a step of the engine if the caller drives it.
    #[inline]
    pub fn step(&self) -> Option<StepReport> {
        let report = lock(self.driven.as_ref()?).step();
        // After the engine's lock is open again: the hook may take a dump of the engine.
        self.engine.stall_monitor.report();
        Some(report)
    }

    /// The next time at which a caller-driven engine has work of its own.
    pub fn due(&self) -> Time {
        self.driven.as_ref().map_or(Time::NEVER, |engine| lock(engine).due())
    }
}

/// Sorts `devices` by their groups, in the order in which the groups first appear. Returns the range of each group.
pub(super) fn grouped(devices: &mut [DeviceInfo]) -> Vec<Range<usize>> {
    let mut order: Vec<Option<u32>> = Vec::new();
    for device in devices.iter() {
        if !order.contains(&device.group) {
            order.push(device.group);
        }
    }
    devices.sort_by_key(|device| order.iter().position(|group| *group == device.group));
    let mut start = 0;
    let ranges = devices.chunk_by(|a, b| a.group == b.group).map(|group| {
        let rails = start..start + group.len();
        start = rails.end;
        rails
    });
    ranges.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_come_together_in_the_order_they_were_found() {
        let device = |name: &str, group| DeviceInfo {
            name: name.into(),
            about: String::new(),
            link_bits_per_s: None,
            address: None,
            group,
        };
        let mut devices =
            vec![device("a", Some(7)), device("b", None), device("c", Some(7)), device("d", Some(1))];
        assert_eq!(grouped(&mut devices), [0..2, 2..3, 3..4]);
        let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["a", "c", "b", "d"]);
        assert!(grouped(&mut []).is_empty());
    }
}
