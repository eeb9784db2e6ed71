//! What lies between null devices: a port per device, which takes arrivals at its line's
//! rate and keeps immediate data for its device, as long as there is room.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use multirail_spi::{Event, PeerSlot, Time};

use crate::LinkModel;

/// Connects null devices, so that requests arrive: no bytes, but in time, and imms.
///
/// Each device takes what comes to it at its own line rate, whoever sends, and keeps imms
/// in a completion queue of [`LinkModel::cq_depth`]. As on some hardware, what comes to a
/// full queue is lost and the sender does not learn of it: [`Switch::overruns`] tells.
#[derive(Debug, Clone, Default)]
pub struct Switch(Arc<Mutex<HashMap<u64, Arc<Port>>>>);

impl Switch {
    /// Imms lost to full completion queues, over all devices.
    pub fn overruns(&self) -> u64 {
        self.lock().values().map(|port| port.lock().overruns).sum()
    }

    /// The most imms that one device's completion queue held at once.
    pub fn fullest(&self) -> usize {
        self.lock().values().map(|port| port.lock().fullest).max().unwrap_or(0)
    }

    pub(super) fn plug(&self, device: u64, link: LinkModel) -> Arc<Port> {
        let depth = link.cq_depth.map_or(usize::MAX, |depth| depth as usize);
        let port = Arc::new(Port { link, depth, arrivals: Mutex::default() });
        self.lock().insert(device, Arc::clone(&port));
        port
    }

    pub(super) fn port(&self, device: u64) -> Option<Arc<Port>> {
        self.lock().get(&device).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Port>>> {
        // No holder panics half way through a change: poison carries no news.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where requests to one device arrive.
#[derive(Debug)]
pub(super) struct Port {
    link: LinkModel,
    depth: usize,
    arrivals: Mutex<Arrivals>,
}

#[derive(Debug)]
struct Arrivals {
    /// When the line is free again.
    line: Time,
    queue: VecDeque<Event>,
    fullest: usize,
    overruns: u64,
}

impl Default for Arrivals {
    fn default() -> Self {
        Self { line: Time::ZERO, queue: VecDeque::new(), fullest: 0, overruns: 0 }
    }
}

impl Port {
    /// A request of `len` bytes reaches the port; when the last of them is in.
    pub(super) fn takes(&self, len: u64, now: Time) -> Time {
        let mut arrivals = self.lock();
        arrivals.line = arrivals.line.max(now).after(self.link.line_time(len));
        arrivals.line
    }

    /// It is in: its imm goes to the completion queue, if there is room.
    pub(super) fn arrives(&self, peer: PeerSlot, imm: u32) {
        let mut arrivals = self.lock();
        if arrivals.queue.len() >= self.depth {
            arrivals.overruns += 1;
            return;
        }
        arrivals.queue.push_back(Event::Imm { peer, imm });
        arrivals.fullest = arrivals.fullest.max(arrivals.queue.len());
    }

    /// The next entry of the completion queue.
    pub(super) fn next(&self) -> Option<Event> {
        self.lock().queue.pop_front()
    }

    fn lock(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
