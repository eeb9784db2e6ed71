//! The cores that the workers of this process run on.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use topology::{Machine, pick_core};

use super::{GroupLocation, Pinning};

/// A core that one worker runs on. While it is reserved, the workers of other fabrics prefer other cores.
#[derive(Debug)]
pub(crate) struct CoreReservation(u32);

/// The number of workers on each core.
fn reserved() -> MutexGuard<'static, BTreeMap<u32, usize>> {
    static RESERVED: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());
    RESERVED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CoreReservation {
    /// The core for worker number `worker`, which drives the rail groups at `locations`. `None` if the worker is not
    /// to be bound, or if no core is known.
    pub(crate) fn for_worker(
        pinning: &Pinning,
        worker: usize,
        locations: &[&GroupLocation],
        machine: Option<&Machine>,
    ) -> Option<Self> {
        match pinning {
            Pinning::Off => None,
            Pinning::Cores(cores) => {
                let cpu = cores.get(worker % cores.len().max(1))?;
                Some(Self::of(u32::try_from(*cpu).unwrap_or(u32::MAX)))
            }
            Pinning::Near => {
                let configured = locations.iter().find_map(|location| location.core).map(Self::of);
                let known = || locations.iter().find(|location| !location.cores.is_empty());
                configured.or_else(|| Self::near(machine?, known()?))
            }
        }
    }

    fn of(cpu: u32) -> Self {
        *reserved().entry(cpu).or_default() += 1;
        Self(cpu)
    }

    /// The best core for rail groups at `location`.
    fn near(machine: &Machine, location: &GroupLocation) -> Option<Self> {
        let mut reserved = reserved();
        let cpu = pick_core(machine, location.node, &location.cores, &reserved)?;
        *reserved.entry(cpu).or_default() += 1;
        Some(Self(cpu))
    }

    pub(crate) fn cpu(&self) -> u32 {
        self.0
    }
}

impl Drop for CoreReservation {
    fn drop(&mut self) {
        let mut reserved = reserved();
        let left = reserved.get_mut(&self.0).map_or(0, |count| {
            *count -= 1;
            *count
        });
        if left == 0 {
            reserved.remove(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_reserved_until_the_reservation_is_dropped() {
        // No other test's workers run on these cores.
        let machine = topology::Description::p5().machine().unwrap();
        let mut location = GroupLocation::default();
        (location.node, location.cores) = (Some(1), vec![90, 91]);
        let mut node = machine.clone();
        node.allowed = "90-91".parse().unwrap();
        let take = || CoreReservation::for_worker(&Pinning::Near, 0, &[&location], Some(&node)).unwrap();
        let (first, second) = (take(), take());
        assert_eq!((first.cpu(), second.cpu()), (90, 91));
        drop(first);
        assert_eq!(take().cpu(), 90);
        assert!(CoreReservation::for_worker(&Pinning::Off, 0, &[&location], Some(&node)).is_none());
        assert!(CoreReservation::for_worker(&Pinning::Cores(Vec::new()), 0, &[&location], None).is_none());
        assert_eq!(
            CoreReservation::for_worker(&Pinning::Cores(vec![4, 6]), 3, &[&location], None).unwrap().cpu(),
            6
        );
        drop(second);
        let asked = GroupLocation { core: Some(7), ..GroupLocation::default() };
        assert_eq!(CoreReservation::for_worker(&Pinning::Near, 0, &[&asked], None).unwrap().cpu(), 7);
    }
}
