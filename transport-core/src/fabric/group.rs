//! A rail group: the devices next to one GPU or NUMA node, and the engine that has them.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::lock;
use crate::Time;
use crate::engine::{Engine, EngineHandle, StepReport};
use crate::spi::DeviceInfo;

pub(crate) struct Group {
    pub engine: Arc<EngineHandle>,
    /// Its rails among those of the transport.
    pub rails: Range<usize>,
    /// The engine itself, if callers drive it.
    pub driven: Option<Arc<Mutex<Engine>>>,
}

impl Group {
    #[inline]
    pub fn step(&self) -> Option<StepReport> {
        let turn = lock(self.driven.as_ref()?).step();
        // Between two turns: the hook may look at the engine.
        self.engine.stall_monitor.report();
        Some(turn)
    }

    /// When a caller-driven engine has something to do by itself.
    pub fn due(&self) -> Time {
        self.driven.as_ref().map_or(Time::NEVER, |engine| lock(engine).due())
    }
}

/// Sorts `devices` by their groups, first come first, and says which rails each has.
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
