//! The switch between null devices. It has a port per device, which receives requests at the rate of the device's
//! link, and queues immediate data for the device as long as there is room.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use multirail_spi::{Event, PeerSlot, Time};

use crate::LinkModel;

/// Connects null devices: requests arrive at the modelled time, with their imms and without their bytes.
///
/// Each device receives the requests of all senders at its own link rate, and keeps imms in a completion queue of
/// [`LinkModel::cq_depth`]. As on some hardware, an imm that finds the queue full is lost, and its sender gets no
/// error: [`Switch::overruns`] counts them.
#[derive(Debug, Clone, Default)]
pub struct Switch(Arc<Mutex<HashMap<u64, Arc<SwitchPort>>>>);

impl Switch {
    /// The number of imms that were lost to full completion queues, over all devices.
    pub fn overruns(&self) -> u64 {
        self.lock().values().map(|port| port.lock().overruns).sum()
    }

    /// The largest number of imms that one device's completion queue held at once.
    pub fn fullest(&self) -> usize {
        self.lock().values().map(|port| port.lock().fullest).max().unwrap_or(0)
    }

    pub(super) fn plug(&self, device: u64, link: LinkModel) -> Arc<SwitchPort> {
        let depth = link.cq_depth.map_or(usize::MAX, |depth| depth as usize);
        let port = Arc::new(SwitchPort { link, depth, state: Mutex::default() });
        self.lock().insert(device, Arc::clone(&port));
        port
    }

    pub(super) fn port(&self, device: u64) -> Option<Arc<SwitchPort>> {
        self.lock().get(&device).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<SwitchPort>>> {
        // No holder of the lock panics in the middle of a change, so the table is consistent even if it is poisoned.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The port of one device, at which requests to it arrive.
#[derive(Debug)]
pub(super) struct SwitchPort {
    link: LinkModel,
    depth: usize,
    state: Mutex<PortState>,
}

#[derive(Debug)]
struct PortState {
    /// The time from which on the link is free.
    free_at: Time,
    queue: VecDeque<Event>,
    fullest: usize,
    overruns: u64,
}

impl Default for PortState {
    fn default() -> Self {
        Self { free_at: Time::ZERO, queue: VecDeque::new(), fullest: 0, overruns: 0 }
    }
}

impl SwitchPort {
    /// Receives a request of `len` bytes. Returns the time when its last byte has arrived.
    pub(super) fn receive(&self, len: u64, now: Time) -> Time {
        let mut state = self.lock();
        state.free_at = state.free_at.max(now).after(self.link.line_time(len));
        state.free_at
    }

    /// Puts the imm of a request that has arrived into the completion queue, if there is room.
    pub(super) fn deliver(&self, peer: PeerSlot, imm: u32) {
        let mut state = self.lock();
        if state.queue.len() >= self.depth {
            state.overruns += 1;
            return;
        }
        state.queue.push_back(Event::Imm { peer, imm });
        state.fullest = state.fullest.max(state.queue.len());
    }

    /// Takes the next entry of the completion queue.
    pub(super) fn next(&self) -> Option<Event> {
        self.lock().queue.pop_front()
    }

    fn lock(&self) -> MutexGuard<'_, PortState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
