//! The parsers of bytes that are not trusted, for the fuzzer alone (`cfg(fuzzing)`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use multirail_spi::{Access, HostBuffer, Memory};

use crate::lane::{ENTRIES, Inlet, MESSAGE, PAYLOADS};
use crate::offer::Offer;
use crate::region::Regions;
use crate::segment::{Layout, Segment};
use crate::stage::Stage;
use crate::wire::{Reply, Request, parse};

/// Bytes of one step of [`lane`] and [`stage`]: where, and what.
const STEP: usize = 10;
/// Bytes of the regions behind [`stage`].
const STAGED: usize = 4096;

/// A peer's offer.
pub fn offer(bytes: &[u8]) {
    if let Ok(offer) = Offer::parse(bytes) {
        let again = Offer::parse(&offer.to_bytes().expect("what was read can be written"));
        assert_eq!(again.expect("what was written can be read"), offer);
    }
}

/// Packets of the socket that hands memory out, from either side.
pub fn packet(bytes: &[u8]) {
    let _ = parse::<Request>(bytes);
    let _ = parse::<Reply>(bytes);
}

/// A peer that posts what it likes into a stage: the target serves it, and no byte of
/// what it did not open changes.
pub fn stage(bytes: &[u8]) {
    let stage = Segment::<Stage>::create().expect("a segment");
    let (stage, regions) = (stage.layout(), Regions::default());
    let open = |access| {
        let memory = Arc::new(HostBuffer::new(STAGED).expect("memory"));
        (regions.insert(memory.clone(), access).expect("a key"), memory)
    };
    let (writable, _) = open(Access::REMOTE_WRITE);
    let (closed, untouched) = open(Access::REMOTE_READ);
    let words = size_of_val(stage) / size_of::<AtomicU64>();
    let mut at = 0;
    for step in bytes.chunks_exact(STEP) {
        let (place, value) = step.split_at(2);
        let place = u16::from_le_bytes([place[0], place[1]]) as usize;
        let value = match u64::from_le_bytes(value.try_into().expect("eight bytes")) {
            // Keys that a fuzzer would not find.
            0xfffe => writable.to_wire(),
            0xffff => closed.to_wire(),
            value => value,
        };
        // The first words are the slots'; what follows is data, any of which is as good.
        // SAFETY: a stage is atomics and raw bytes, valid for any value, and aligned to lines.
        let word = unsafe { &*std::ptr::from_ref(stage).cast::<AtomicU64>().add(place % words.min(1024)) };
        word.store(value, Ordering::Release);
        at += stage.serve(at, &regions).0;
    }
    let mut bytes = vec![0; STAGED];
    // SAFETY: both are `STAGED` bytes, and nobody else's any more.
    unsafe { untouched.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), STAGED) };
    assert!(bytes.iter().all(|byte| *byte == 0), "a region that is not writable was written");
}

/// A peer that writes what it likes into its lane while we read it: each step stores
/// one word somewhere in the ring and takes what is then there.
pub fn lane(bytes: &[u8]) {
    let segment = Segment::<Layout>::create().expect("a segment");
    let (layout, mut inlet) = (segment.layout(), Inlet::default());
    let words = size_of_val(&layout.cells) / size_of::<AtomicU64>();
    let mut into = vec![0; MESSAGE];
    for step in bytes.chunks_exact(STEP) {
        let (place, value) = step.split_at(2);
        let place = u16::from_le_bytes([place[0], place[1]]) as usize % words;
        let value = u64::from_le_bytes(value.try_into().expect("eight bytes"));
        // SAFETY: the cells are `words` words, aligned to lines and valid for any value.
        let word = unsafe { &*layout.cells.as_ptr().cast::<AtomicU64>().add(place) };
        word.store(value, Ordering::Release);
        let mut taken = 0;
        while inlet.next_imm(layout).is_some() {
            taken += 1;
            assert!(taken <= ENTRIES, "a lane gave more than it holds");
        }
        let mut messages = 0;
        while let Some(message) = inlet.next_message() {
            messages += 1;
            assert!(messages <= PAYLOADS && message.len <= MESSAGE);
            // SAFETY: `into` is `MESSAGE` bytes and ours.
            unsafe { inlet.take_message(layout, into.as_mut_ptr(), message.len) };
        }
    }
}
