//! Mirrors: counts that a GPU kernel can poll and a CUDA stream can wait for. Each arrival is stored into a signal.

use std::fmt;
use std::sync::Arc;

use super::ImmCounter;
use crate::peer::PeerInner;
use crate::{Error, Signal};

/// What a mirror does with its signal when the peer is closed. A waiter that sees the signal alone, such as a CUDA
/// stream, learns of the close by nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnPeerClosed {
    /// The signal keeps its value. Waits for more arrivals go on until the program writes the signal itself.
    /// [`Peer::closed`](crate::Peer::closed) and [`Mirror::close_reason`] tell the program when to do so.
    Keep,
    /// The signal advances by [`Mirror::PASS`]. So every wait for up to 2^29 more arrivals ends. If the signal is then
    /// at least 2^29 and less than 2^30 past the awaited value, arrivals are missing.
    Pass,
}

/// A mirror of a count, from [`ImmCounter::mirror`]. Dropping it ends the mirroring. The signal keeps its value.
#[must_use = "dropping it ends the mirroring"]
pub struct Mirror {
    peer: Arc<PeerInner>,
    imm: u32,
    id: u64,
}

impl Mirror {
    /// How far the signal advances when the peer is closed, with [`OnPeerClosed::Pass`].
    pub const PASS: u32 = 1 << 30;

    pub(super) fn new(counter: ImmCounter, signal: Arc<dyn Signal>, on_peer_closed: OnPeerClosed) -> Self {
        let ImmCounter { peer, imm } = counter;
        let is_closed = || peer.close_reason().is_some();
        let id = peer.imms.mirror(imm, signal, on_peer_closed.advance(), is_closed);
        Self { peer, imm, id }
    }

    /// The number of arrivals that were counted. Its low 32 bits are the last value of the signal, without
    /// [`PASS`](Self::PASS).
    pub fn total(&self) -> u64 {
        self.peer.imms.mirrored_total(self.imm, self.id)
    }

    /// The reason why the peer is gone, once it is. The signal advances right after. Arrivals that were under way may
    /// still come.
    pub fn close_reason(&self) -> Option<Error> {
        self.peer.close_reason()
    }
}

impl fmt::Debug for Mirror {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mirror").field("imm", &self.imm).field("total", &self.total()).finish()
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        self.peer.imms.end_mirror(self.imm, self.id);
    }
}

impl OnPeerClosed {
    /// How far the signal advances when the peer is closed.
    fn advance(self) -> u32 {
        match self {
            Self::Keep => 0,
            Self::Pass => Mirror::PASS,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::{ErrorKind, Peer};

    fn word() -> (Arc<AtomicU32>, impl Fn() -> u32) {
        let word = Arc::new(AtomicU32::new(99));
        (Arc::clone(&word), move || word.load(Ordering::Acquire))
    }

    #[test]
    fn counts_what_was_there_and_what_comes() {
        let (peer, (word, now)) = (Peer::alone(), word());
        (0..3).for_each(|_| peer.0.imms.arrived(7));
        assert!(peer.imm(7).try_take(1));
        let mirror = peer.imm(7).mirror(word.clone(), OnPeerClosed::Keep);
        assert_eq!((now(), mirror.total()), (2, 2));
        peer.0.imms.arrived(8);
        peer.0.imms.arrived(7);
        assert!(peer.imm(7).try_take(3));
        assert_eq!((now(), mirror.total()), (3, 3));
        peer.0.imms.arrived(7);
        assert_eq!((now(), peer.imm(7).count()), (4, 1));
        assert_eq!(Arc::strong_count(&word), 3);
        drop(mirror);
        assert_eq!(Arc::strong_count(&word), 2);
        peer.0.imms.arrived(7);
        assert_eq!((now(), peer.imm(7).count()), (4, 2));
    }

    #[test]
    fn several_mirror_one_count_and_others_another() {
        let (peer, (one, first), (two, second), (three, third)) = (Peer::alone(), word(), word(), word());
        let mirror = peer.imm(7).mirror(one, OnPeerClosed::Keep);
        peer.0.imms.arrived(7);
        let _others =
            [peer.imm(7).mirror(two, OnPeerClosed::Keep), peer.imm(8).mirror(three, OnPeerClosed::Keep)];
        peer.0.imms.arrived(7);
        drop(mirror);
        peer.0.imms.arrived(7);
        peer.0.imms.arrived(8);
        assert_eq!((first(), second(), third()), (2, 3, 1));
    }

    /// Several threads count arrivals while mirrors come and go. Each mirror counts all arrivals of its time.
    #[test]
    fn loses_none_and_counts_none_twice() {
        const EACH: u32 = if cfg!(miri) { 20 } else { 20_000 };
        let (peer, (word, now)) = (Peer::alone(), word());
        let mirror = peer.imm(7).mirror(word, OnPeerClosed::Keep);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..EACH).for_each(|_| peer.0.imms.arrived(7)));
            }
            scope.spawn(|| {
                let mut before = 0;
                for _ in 0..EACH {
                    let (late, total) = (Arc::new(AtomicU32::new(0)), now());
                    assert!(total >= before, "went back from {before} to {total}");
                    before = total;
                    let mirror = peer.imm(7).mirror(late.clone(), OnPeerClosed::Keep);
                    assert!(u64::from(late.load(Ordering::Acquire)) <= mirror.total());
                }
            });
        });
        assert_eq!(
            (now(), mirror.total(), peer.imm(7).count()),
            (2 * EACH, 2 * EACH as u64, 2 * EACH as u64)
        );
    }

    #[test]
    fn the_end_lets_waits_pass_and_tells_what_is_missing() {
        let (peer, (word, now), (other, kept)) = (Peer::alone(), word(), word());
        let mirror = peer.imm(7).mirror(word, OnPeerClosed::Pass);
        let keeping = peer.imm(7).mirror(other, OnPeerClosed::Keep);
        (0..3).for_each(|_| peer.0.imms.arrived(7));
        assert!(mirror.close_reason().is_none());
        peer.disconnect();
        assert_eq!(keeping.close_reason().unwrap().kind(), ErrorKind::Closed);
        assert_eq!((kept(), now(), mirror.total()), (3, 3 + Mirror::PASS, 3));
        let is_missing = |awaited: u32| {
            let past = now().wrapping_sub(awaited);
            assert!(past as i32 >= 0, "a wait for {awaited} goes on");
            (1 << 29..1 << 30).contains(&past)
        };
        assert!(!is_missing(1) && !is_missing(3));
        assert!(is_missing(4) && is_missing(3 + (1 << 29)));
        // Arrivals that were under way may still come.
        peer.0.imms.arrived(7);
        assert!(!is_missing(4) && is_missing(5));
        // A mirror that is made after the close is advanced too.
        let late = Arc::new(AtomicU32::new(0));
        let mirror = peer.imm(7).mirror(late.clone(), OnPeerClosed::Pass);
        assert_eq!((late.load(Ordering::Acquire), mirror.total()), (4 + Mirror::PASS, 4));
    }
}
