//! Failures between two endpoints end in typed errors, within limits, and leak nothing: `ci/leaks` runs these tests
//! under valgrind.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::time::{Duration, Instant};

use multirail_spi::{Batch, Completions, ErrorKind, Event, PeerSlot, RemoteMemory};
use side::{LEN, LIMIT, PIECE, Side};

impl Side {
    /// Writes the whole region in pieces, and waits for the end of all of them. Also polls the other side; drops it
    /// once `posted_before_drop` pieces are posted. Returns the errors of the pieces that failed.
    fn write(
        &mut self,
        peer: PeerSlot,
        to: &dyn RemoteMemory,
        other: &mut Option<Self>,
        posted_before_drop: usize,
    ) -> Vec<ErrorKind> {
        let requests: Vec<_> = (0..LEN / PIECE).map(|number| self.request(peer, to, number)).collect();
        let (mut posted, mut ended, mut kinds, start) = (0, 0, Vec::new(), Instant::now());
        let mut completions = Completions::with_room(64);
        while ended < requests.len() {
            assert!(start.elapsed() < LIMIT, "{posted} posted, {ended} ended");
            if posted < requests.len() {
                let batch: Batch = requests[posted..].iter().copied().collect();
                // SAFETY: memory and import outlive the endpoint.
                let result = unsafe { self.endpoint.post(&batch) };
                assert_eq!(result.error, None);
                posted += result.accepted;
            }
            self.endpoint.poll(&mut completions);
            for event in completions.as_slice() {
                match event {
                    Event::Done { count, .. } => ended += *count as usize,
                    Event::Failed { status, .. } | Event::FailedUnconfirmed { status, .. } => {
                        ended += 1;
                        kinds.push(status.kind);
                        assert!(!self.endpoint.describe(*status).is_empty());
                    }
                    _ => {}
                }
            }
            completions.clear();
            if posted >= posted_before_drop {
                drop(other.take());
            }
            if let Some(other) = other {
                other.endpoint.poll(&mut completions);
                completions.clear();
            }
        }
        kinds
    }
}

/// The other side is not dropped.
const NEVER: usize = usize::MAX;

#[test]
fn a_wrong_key_is_refused_and_the_right_one_works_after_it() {
    let (Some(mut here), Some(there)) = (Side::open(), Side::open()) else { return };
    let (peer, _) = here.connect(&there);
    let (mut key, right) = (there.region.key(), there.region.key());
    key.key ^= 1;
    let mut other = Some(there);
    let wrong = here.domain.import(peer, &key, LIMIT).unwrap();
    let kinds = here.write(peer, &*wrong, &mut other, NEVER);
    assert_eq!(kinds, [ErrorKind::RemoteAccess; LEN / PIECE]);
    let right = here.domain.import(peer, &right, LIMIT).unwrap();
    assert_eq!(here.write(peer, &*right, &mut other, NEVER), []);
}

#[test]
fn a_domain_closed_in_the_middle_ends_every_request() {
    let (Some(mut here), Some(there)) = (Side::open(), Side::open()) else { return };
    let (peer, _) = here.connect(&there);
    let remote = here.domain.import(peer, &there.region.key(), LIMIT).unwrap();
    let kinds = here.write(peer, &*remote, &mut Some(there), 2);
    // There is no control connection here that would tell which of the two it is.
    let expected = [ErrorKind::RemoteAccess, ErrorKind::Unreachable];
    assert!(!kinds.is_empty() && kinds.iter().all(|kind| expected.contains(kind)), "{kinds:?}");
}

/// A provider over sockets has no room for requests until it is connected, so the engine's deadlines end them. Requests
/// that it accepts nevertheless must fail.
#[test]
fn an_address_without_an_endpoint_accepts_nothing() {
    let (Some(mut here), Some(there)) = (Side::open(), Side::open()) else { return };
    let (peer, _) = here.connect(&there);
    let remote = here.domain.import(peer, &there.region.key(), LIMIT).unwrap();
    drop(there);
    let request = here.request(peer, &*remote, 0);
    let (start, mut completions, mut accepted) = (Instant::now(), Completions::with_room(8), 0);
    while start.elapsed() < Duration::from_secs(1) {
        // SAFETY: memory and import outlive the endpoint.
        let result = unsafe { here.endpoint.post(&Batch::from_iter([request])) };
        assert_eq!(result.error, None);
        accepted += result.accepted;
        here.endpoint.poll(&mut completions);
    }
    let is_refusal = |event: &Event| matches!(event, Event::FailedUnconfirmed { status, .. } if status.kind == ErrorKind::Unreachable);
    assert!(completions.as_slice().len() <= accepted, "{completions:?}");
    assert!(completions.as_slice().iter().all(is_refusal), "{completions:?}");
}
