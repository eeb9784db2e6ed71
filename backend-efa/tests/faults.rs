//! What goes wrong between two endpoints ends in typed errors, within limits, and leaves nothing:
//! `ci/leaks` runs these under valgrind.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::time::{Duration, Instant};

use multirail_spi::{Batch, Completions, ErrorKind, Event, PeerSlot, RemoteMemory};
use side::{LEN, LIMIT, PIECE, Side};

impl Side {
    /// Writes the whole region in pieces, posting what there was no room for again; polls the
    /// other side as well, until `enough` are posted and then never again. How the failed ones ended.
    fn write(
        &mut self,
        peer: PeerSlot,
        to: &dyn RemoteMemory,
        other: &mut Option<Self>,
        enough: usize,
    ) -> Vec<ErrorKind> {
        let requests: Vec<_> = (0..LEN / PIECE).map(|number| self.request(peer, to, number)).collect();
        let (mut posted, mut ended, mut kinds, begun) = (0, 0, Vec::new(), Instant::now());
        let mut completions = Completions::with_room(64);
        while ended < requests.len() {
            assert!(begun.elapsed() < LIMIT, "{posted} posted, {ended} ended");
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
            if posted >= enough {
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

const ALWAYS: usize = usize::MAX;

#[test]
fn a_wrong_key_is_refused_and_a_right_one_goes_on() {
    let (Some(mut here), Some(there)) = (Side::open(), Side::open()) else { return };
    let (peer, _) = here.meet(&there);
    let (mut key, right) = (there.region.key(), there.region.key());
    key.key ^= 1;
    let mut other = Some(there);
    let wrong = here.domain.import(peer, &key, LIMIT).unwrap();
    let kinds = here.write(peer, &*wrong, &mut other, ALWAYS);
    assert_eq!(kinds, [ErrorKind::RemoteAccess; LEN / PIECE]);
    let right = here.domain.import(peer, &right, LIMIT).unwrap();
    assert_eq!(here.write(peer, &*right, &mut other, ALWAYS), []);
}

#[test]
fn a_domain_closed_in_the_middle_ends_every_request() {
    let (Some(mut here), Some(there)) = (Side::open(), Side::open()) else { return };
    let (peer, _) = here.meet(&there);
    let remote = here.domain.import(peer, &there.region.key(), LIMIT).unwrap();
    let kinds = here.write(peer, &*remote, &mut Some(there), 2);
    // The control connection, which knows, is not there.
    let usual = [ErrorKind::RemoteAccess, ErrorKind::Unreachable];
    assert!(!kinds.is_empty() && kinds.iter().all(|kind| usual.contains(kind)), "{kinds:?}");
}

/// A provider over sockets has no room for requests until it is connected; the engine's
/// deadlines end those. What it takes after all must fail.
#[test]
fn an_address_where_nobody_is_takes_nothing() {
    let (Some(mut here), Some(there)) = (Side::open(), Side::open()) else { return };
    let (peer, _) = here.meet(&there);
    let remote = here.domain.import(peer, &there.region.key(), LIMIT).unwrap();
    drop(there);
    let request = here.request(peer, &*remote, 0);
    let (begun, mut completions, mut accepted) = (Instant::now(), Completions::with_room(8), 0);
    while begun.elapsed() < Duration::from_secs(1) {
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
