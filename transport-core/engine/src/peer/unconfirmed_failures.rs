//! Failed requests whose status may mean that the peer refused the request, or that the peer died.
//!
//! A process that dies may lose its memory and its connections long before its control connection ends: the kernel
//! first frees gigabytes of memory, which takes seconds. So no fixed delay would be long enough. Instead, the engine
//! probes the peer over the control connection. If the peer answers a probe that was sent after the failure, it was
//! alive then, and its refusal is the reason. If it does not answer, the liveness limit declares it dead.

use std::sync::Arc;

use crate::PeerId;
use crate::spi::Status;
use crate::{Control, EngineHandle};

/// A failed request whose error the engine does not report yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct UnconfirmedFailure {
    pub rail: usize,
    pub id: u64,
    pub link: u32,
    /// The status of the request if the peer is alive.
    pub status: Status,
    /// Whether the probe that is under way was sent after the request failed.
    is_probed: bool,
}

/// All failed requests whose error the engine does not report yet, oldest first.
#[derive(Debug, Default)]
pub(crate) struct UnconfirmedFailures(Vec<UnconfirmedFailure>);

impl UnconfirmedFailures {
    /// Adds a failed request. Returns true if the engine has to probe the peer: there is at most one probe per link at
    /// a time.
    pub fn add(&mut self, rail: usize, id: u64, link: u32, status: Status) -> bool {
        let is_probed = self.0.iter().all(|failure| failure.link != link);
        self.0.push(UnconfirmedFailure { rail, id, link, status, is_probed });
        is_probed
    }

    /// Removes and returns the failures that the answer to a probe resolves. Also returns true if the engine has to
    /// probe the peer again, because of requests that failed after the probe was sent.
    pub fn on_answer(&mut self, link: u32) -> (Vec<UnconfirmedFailure>, bool) {
        let resolved = self.0.extract_if(.., |failure| failure.link == link && failure.is_probed).collect();
        let mut probe_again = false;
        for failure in self.0.iter_mut().filter(|failure| failure.link == link) {
            (failure.is_probed, probe_again) = (true, true);
        }
        (resolved, probe_again)
    }

    /// Removes and returns the failures of a link whose peer is gone.
    pub fn take_link(&mut self, link: u32) -> Vec<UnconfirmedFailure> {
        self.0.extract_if(.., |failure| failure.link == link).collect()
    }

    /// Drops the failures of a rail whose device is lost: all its requests end with that error.
    pub fn drop_rail(&mut self, rail: usize) {
        self.0.retain(|failure| failure.rail != rail);
    }
}

/// A probe: asks a peer over the control connection whether it is alive. However the probe ends, dropping it tells the
/// engine. If it ends because the peer is gone, the engine learns of that first.
pub struct PeerProbe {
    engine: Arc<EngineHandle>,
    link: u32,
    peer: PeerId,
}

impl PeerProbe {
    pub fn new(engine: Arc<EngineHandle>, link: u32, peer: PeerId) -> Self {
        Self { engine, link, peer }
    }
}

impl Drop for PeerProbe {
    fn drop(&mut self) {
        self.engine.control(Control::ProbeEnded { link: self.link, peer: self.peer });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn an_answer_resolves_the_failures_before_its_probe() {
        let refused = Status { kind: ErrorKind::RemoteAccess, code: 125 };
        let mut failures = UnconfirmedFailures::default();
        assert!(failures.add(0, 1, 7, refused) && failures.add(0, 2, 8, refused));
        assert!(!failures.add(1, 3, 7, refused));
        let ids = |(resolved, probe_again): (Vec<UnconfirmedFailure>, bool)| {
            (resolved.iter().map(|failure| (failure.rail, failure.id)).collect::<Vec<_>>(), probe_again)
        };
        // The third request failed after the probe was sent: the next probe is for it.
        assert_eq!(ids(failures.on_answer(7)), (vec![(0, 1)], true));
        assert_eq!(ids(failures.on_answer(7)), (vec![(1, 3)], false));
        assert_eq!(ids((failures.take_link(8), false)), (vec![(0, 2)], false));
        assert!(failures.add(0, 4, 7, refused) && failures.0.len() == 1);
        failures.drop_rail(0);
        assert_eq!(ids(failures.on_answer(7)), (vec![], false));
    }
}
