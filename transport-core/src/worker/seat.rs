//! The CPUs that workers of this process keep to.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use topology::{Machine, pick_core};

use crate::fabric::{Pinning, Place};

/// A CPU that a worker keeps to, counted while it lives: other fabrics' workers then take others.
#[derive(Debug)]
pub(crate) struct Seat(u32);

/// Workers on each CPU.
fn taken() -> MutexGuard<'static, BTreeMap<u32, usize>> {
    static TAKEN: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seat {
    fn of(cpu: u32) -> Self {
        *taken().entry(cpu).or_default() += 1;
        Self(cpu)
    }

    /// The best CPU for groups in that place.
    fn near(machine: &Machine, place: &Place) -> Option<Self> {
        let mut taken = taken();
        let cpu = pick_core(machine, place.node, &place.cores, &taken)?;
        *taken.entry(cpu).or_default() += 1;
        Some(Self(cpu))
    }

    pub(crate) fn cpu(&self) -> u32 {
        self.0
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = taken();
        let left = taken.get_mut(&self.0).map_or(0, |count| {
            *count -= 1;
            *count
        });
        if left == 0 {
            taken.remove(&self.0);
        }
    }
}

impl Pinning {
    /// The CPU for worker `turn`, which drives the groups in those places.
    pub(crate) fn seat(&self, turn: usize, places: &[&Place], machine: Option<&Machine>) -> Option<Seat> {
        match self {
            Self::Off => None,
            Self::Cores(cores) => {
                let cpu = cores.get(turn % cores.len().max(1))?;
                Some(Seat::of(u32::try_from(*cpu).unwrap_or(u32::MAX)))
            }
            Self::Near => {
                let asked = places.iter().find_map(|place| place.core).map(Seat::of);
                let known = || places.iter().find(|place| !place.cores.is_empty());
                asked.or_else(|| Seat::near(machine?, known()?))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seats_are_counted_while_they_live() {
        // CPUs that no other test's workers are on.
        let machine = topology::Description::p5().machine().unwrap();
        let mut place = Place::default();
        (place.node, place.cores) = (Some(1), vec![90, 91]);
        let mut node = machine.clone();
        node.allowed = "90-91".parse().unwrap();
        let take = || Pinning::Near.seat(0, &[&place], Some(&node)).unwrap();
        let (first, second) = (take(), take());
        assert_eq!((first.cpu(), second.cpu()), (90, 91));
        drop(first);
        assert_eq!(take().cpu(), 90);
        assert!(Pinning::Off.seat(0, &[&place], Some(&node)).is_none());
        assert!(Pinning::Cores(Vec::new()).seat(0, &[&place], None).is_none());
        assert_eq!(Pinning::Cores(vec![4, 6]).seat(3, &[&place], None).unwrap().cpu(), 6);
        drop(second);
        let asked = Place { core: Some(7), ..Place::default() };
        assert_eq!(Pinning::Near.seat(0, &[&asked], None).unwrap().cpu(), 7);
    }
}
