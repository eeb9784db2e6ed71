//! Fences between two simulated cards in one process. `ci/efa-sim/check` runs this test with each libfabric.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod side;

use std::task::Poll;
use std::time::{Duration, Instant};

use multirail_efa::EfaConfig;
use multirail_spi::{
    Batch, Completions, ErrorKind, Event, FenceKind, Memory, PeerSlot, RemoteMemory, Status,
};
use side::{LEN, LIMIT, PIECE, Side};

/// The time after which a card has ended its requests, one way or another (`EFA_GRACE` of the backend).
const CARD_LIMIT: Duration = Duration::from_secs(30);

/// Two cards that can reach each other.
fn cards() -> Option<(Side, Side)> {
    let card = |index| Side::of(EfaConfig::default().provider("efa"), index);
    Some((card(0)?, card(1)?))
}

fn polled(side: &mut Side) -> Vec<Event> {
    let mut completions = Completions::with_room(64);
    side.endpoint.poll(&mut completions);
    completions.as_slice().to_vec()
}

/// Posts the write of a piece. Polls both sides as long as the provider has no room, or no handshake. Returns the
/// events.
fn post(
    side: &mut Side,
    other: &mut Side,
    peer: PeerSlot,
    to: &dyn RemoteMemory,
    number: usize,
) -> Vec<Event> {
    let (batch, start): (Batch, _) = ([side.request(peer, to, number)].into_iter().collect(), Instant::now());
    let mut events = Vec::new();
    // SAFETY: memory and imports outlive the endpoint, in this test.
    while unsafe { side.endpoint.post(&batch) }.accepted == 0 {
        assert!(start.elapsed() < LIMIT, "no room: {events:?}");
        events.extend([polled(side), polled(other)].concat());
    }
    events
}

/// Writes every byte of a side's memory.
fn fill(side: &Side, byte: u8) {
    // SAFETY: allocated, with this length; nobody else reads or writes it meanwhile.
    unsafe { side.memory.as_ptr().write_bytes(byte, LEN) }
}

/// Once a fence is finished, no byte lands of the writes that were under way, although the peer and its card live on
/// and continue to write. libfabric 1.17 cannot close the target's endpoint, because a write that the target itself
/// has posted there never ends. With `FI_EFA_USE_DEVICE_RDMA=1`, 1.17 lets the target's card read what is written to
/// it: the fence of a path waits until the card has ended its reads.
fn fence(kind: FenceKind) {
    let Some((mut here, mut there)) = cards() else { return };
    let emulates = multirail_efa::libfabric_version().is_ok_and(|version| version < (1, 18));
    let card_reads = emulates && std::env::var_os("FI_EFA_USE_DEVICE_RDMA").is_some_and(|value| value == "1");
    let (to_there, to_here) = here.connect(&there);
    let (into_there, into_here) = (there.import_for(&here, to_there), here.import_for(&there, to_here));
    fill(&here, 0x11);
    // The handshakes of both directions.
    let mut events = post(&mut here, &mut there, to_there, &*into_there, 0);
    events.extend(post(&mut there, &mut here, to_here, &*into_here, 0));
    let start = Instant::now();
    while events.len() < 2 {
        assert!(start.elapsed() < LIMIT, "two writes are not done: {events:?}");
        events.extend([polled(&mut here), polled(&mut there)].concat());
    }
    assert!(events.iter().all(|event| matches!(event, Event::Done { .. })), "{events:?}");

    // `there` has begun to receive. Its own write does not end, because `here` does not answer it meanwhile.
    fill(&there, 0x22);
    for number in 1..LEN / PIECE {
        post(&mut here, &mut there, to_there, &*into_there, number);
    }
    let start = Instant::now();
    while there.bytes(PIECE..LEN).iter().all(|byte| *byte == 0x22) {
        assert!(start.elapsed() < LIMIT, "nothing arrives");
        polled(&mut there);
        polled(&mut here);
    }
    post(&mut there, &mut here, to_here, &*into_here, 0);

    // As the engine does: nobody waits for what `there` has posted over this pair.
    there.endpoint.abort(to_here);
    let (start, mut events) = (Instant::now(), Vec::new());
    loop {
        match there.domain.connector().fence(to_here, kind) {
            Poll::Ready(result) => break result.expect("the slot is fenced"),
            Poll::Pending => events.extend(polled(&mut there)),
        }
        assert!(start.elapsed() < LIMIT, "the fence does not end: {events:?}");
    }
    assert_eq!(there.domain.unclosed_endpoints(), usize::from(emulates));
    match card_reads {
        true => assert_eq!(
            start.elapsed() >= CARD_LIMIT,
            kind == FenceKind::PathLost,
            "the fence took {:?}",
            start.elapsed()
        ),
        false => {
            assert!(!emulates || there.bytes(PIECE..LEN).contains(&0x22), "every byte had arrived before")
        }
    }

    // `here` goes on writing.
    fill(&there, 0x33);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(500) {
        polled(&mut here);
        events.extend(polled(&mut there));
    }
    let late = there.bytes(0..LEN).iter().filter(|byte| **byte != 0x33).count();
    assert_eq!(late, 0, "bytes landed after the fence");
    let unreachable = |status: &Status| status.kind == ErrorKind::Unreachable;
    let is_failed = |event: &Event| matches!(event, Event::Failed { id: 0, status } if unreachable(status));
    assert!(events.contains(&Event::EndpointChanged), "{events:?}");
    assert!(!emulates || events.iter().any(is_failed), "the target's own write does not end: {events:?}");
    there.domain.connector().lift_fence(to_here).expect("the fence is lifted");
}

#[test]
fn no_byte_lands_after_a_fence_of_a_path() {
    fence(FenceKind::PathLost);
}

#[test]
fn no_byte_lands_after_a_fence_of_a_lost_device() {
    fence(FenceKind::DeviceLost);
}
