//! The parsers of bytes that come from peers, for the fuzzer alone (`cfg(fuzzing)`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use multirail_spi::{Access, HostBuffer, Memory};

use crate::offer::LoopbackOffer;
use crate::other_process::protocol::{ServerReply, ServerRequest, parse};
use crate::regions::Regions;
use crate::segment::message_ring::{MAX_MESSAGE, PAYLOADS, RING_ENTRIES, RingReceiver};
use crate::segment::staging_buffer::SharedStagingBuffer;
use crate::segment::{ConnectionLayout, Segment};
use crate::staging::serve;

/// Bytes of one step of [`message_ring`] and [`staging_buffer`]: a position and a value.
const STEP: usize = 10;
/// Bytes of the regions behind [`staging_buffer`].
const STAGED: usize = 4096;

/// A peer's offer.
pub fn offer(bytes: &[u8]) {
    if let Ok(offer) = LoopbackOffer::parse(bytes) {
        let again = LoopbackOffer::parse(&offer.to_bytes().expect("what was read can be written"));
        assert_eq!(again.expect("what was written can be read"), offer);
    }
}

/// Packets of the server's socket, from either side.
pub fn packet(bytes: &[u8]) {
    let _ = parse::<ServerRequest>(bytes);
    let _ = parse::<ServerReply>(bytes);
}

/// A peer that stores any value anywhere in a staging buffer. The target serves it, and no byte of a region changes
/// that the peer may not write.
pub fn staging_buffer(bytes: &[u8]) {
    let buffer = Segment::<SharedStagingBuffer>::create().expect("a segment");
    let (buffer, regions) = (buffer.content(), Regions::default());
    let open = |access| {
        let memory = Arc::new(HostBuffer::new(STAGED).expect("memory"));
        (regions.insert(memory.clone(), access).expect("a key"), memory)
    };
    let (writable, _) = open(Access::REMOTE_WRITE);
    let (closed, untouched) = open(Access::REMOTE_READ);
    let words = size_of_val(buffer) / size_of::<AtomicU64>();
    let mut at = 0;
    for step in bytes.chunks_exact(STEP) {
        let (position, value) = step.split_at(2);
        let position = u16::from_le_bytes([position[0], position[1]]) as usize;
        let value = match u64::from_le_bytes(value.try_into().expect("eight bytes")) {
            // Keys that a fuzzer would not find.
            0xfffe => writable.to_wire(),
            0xffff => closed.to_wire(),
            value => value,
        };
        // The slots are the first words. Data follow, for which every value is as good.
        // SAFETY: a staging buffer is atomics and raw bytes, valid for any value, and aligned to lines.
        let word =
            unsafe { &*std::ptr::from_ref(buffer).cast::<AtomicU64>().add(position % words.min(1024)) };
        word.store(value, Ordering::Release);
        at += serve(buffer, at, &regions).0;
    }
    let mut bytes = vec![0; STAGED];
    // SAFETY: both are `STAGED` bytes, and nothing else uses them any more.
    unsafe { untouched.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), STAGED) };
    assert!(bytes.iter().all(|byte| *byte == 0), "a region that is not writable was written");
}

/// A peer that writes into its message ring while this side reads: each step stores one word somewhere in the ring,
/// and then takes the entries.
pub fn message_ring(bytes: &[u8]) {
    let segment = Segment::<ConnectionLayout>::create().expect("a segment");
    let (layout, mut receiver) = (segment.content(), RingReceiver::default());
    let words = size_of_val(&layout.cells) / size_of::<AtomicU64>();
    let mut into = vec![0; MAX_MESSAGE];
    for step in bytes.chunks_exact(STEP) {
        let (position, value) = step.split_at(2);
        let position = u16::from_le_bytes([position[0], position[1]]) as usize % words;
        let value = u64::from_le_bytes(value.try_into().expect("eight bytes"));
        // SAFETY: the cells are `words` words, aligned to lines and valid for any value.
        let word = unsafe { &*layout.cells.as_ptr().cast::<AtomicU64>().add(position) };
        word.store(value, Ordering::Release);
        let mut taken = 0;
        while receiver.next_imm(layout).is_some() {
            taken += 1;
            assert!(taken <= RING_ENTRIES, "a message ring gave more entries than it holds");
        }
        let mut messages = 0;
        while let Some(message) = receiver.pop_message() {
            let len = message.len;
            messages += 1;
            assert!(messages <= PAYLOADS + RING_ENTRIES && len <= MAX_MESSAGE);
            // SAFETY: `into` has `MAX_MESSAGE` bytes, and is this function's.
            unsafe { receiver.take_message(layout, &message, into.as_mut_ptr(), len) };
        }
    }
}
