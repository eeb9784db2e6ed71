//! What a peer can write into a staging buffer, for the fuzzer alone (`cfg(fuzzing)`).

use std::sync::Arc;

use multirail_spi::{Access, ErrorKind, HostBuffer, Memory, MemoryRegion, Status};

use crate::both_sides::Side;
use crate::page_table::{GROUP_WORDS, PageGroup};
use crate::staging_buffer::SLOT_COUNT;
use crate::wire::{NumberedRequest, SlotImm, SlotImmKind};

/// Bytes of a region behind [`slots`].
const REGION: usize = 8192;
/// Bytes of one step of [`slots`].
const STEP: usize = 12;

/// A peer that writes any slot requests, page tables and other words into a staging buffer, and sends any imms. The target
/// serves it, and no byte of a region changes that the peer may not write.
pub fn slots(bytes: &[u8]) {
    let (mut here, _there) = Side::pair(true).expect("two sides");
    let open = |access| {
        let memory = Arc::new(HostBuffer::new(REGION).expect("memory"));
        (here.regions.add(memory.clone(), access, "fuzzing").expect("a key"), memory)
    };
    let (writable, _) = open(Access::REMOTE_WRITE);
    let (closed, untouched) = open(Access::REMOTE_READ);
    let key_of = |value: u64| match value & 3 {
        0 => writable.key().key,
        1 => closed.key().key,
        _ => value,
    };
    for step in bytes.chunks_exact(STEP) {
        let (what, slot, at) = (step[0], usize::from(step[1]) % SLOT_COUNT, usize::from(step[2]));
        let value = u64::from_le_bytes(step[4..].try_into().expect("eight bytes"));
        let buffer = &here.connection.buffer;
        match what % 5 {
            // A slot request with a valid checksum.
            0 => {
                let words = [
                    u64::from(step[3]) | (value & 3) << 32 | (value & 0x1ff) << 48 | value & 3 << 40,
                    key_of(value >> 9),
                    1 << 63 | value >> 12 & 0x3fff,
                    value >> 40,
                    value,
                    0,
                    0,
                    0,
                ];
                buffer.receive_request(slot, NumberedRequest::seal(words));
            }
            // A group of a table, and the offset of a page.
            1 => {
                let (len, offset) = (value >> 16 & 0x3_ffff, 1 << 63 | value >> 34 & 0x3fff);
                let (imm, is_skipped) = ((value & 4 != 0).then_some(1), value & 8 != 0);
                let pages = (value >> 48 & 0xff) as u32;
                let is_staged = value & 16 == 0;
                let group = PageGroup { pages, key: key_of(value), is_staged, len, imm, is_skipped };
                for (index, word) in group.to_words().into_iter().chain([offset]).enumerate() {
                    buffer.receive_word(slot, (GROUP_WORDS + 1) * at + index, word);
                }
            }
            // Any word of the page table.
            2 => buffer.receive_word(slot, at, value),
            // A completion or a failure of the device.
            3 => {
                let failed = Status { kind: ErrorKind::Io, code: 0 };
                let index = at.min(here.outbox.len().saturating_sub(1));
                here.complete(index, if value & 1 == 0 { Ok(()) } else { Err(failed) });
            }
            // An imm that announces the slot request of a slot, or the bytes of a read.
            _ => {
                let kind = if value & 1 == 0 { SlotImmKind::Request } else { SlotImmKind::Data };
                let tag = here.connection.imms.expect("a tag");
                here.on_imm(SlotImm::new(kind, slot, tag, step[3].into()).encode());
            }
        }
        here.advance();
        here.events.clear();
    }
    let mut left = vec![0; REGION];
    // SAFETY: both are `REGION` bytes, and nothing else uses them any more.
    unsafe { untouched.as_ptr().copy_to_nonoverlapping(left.as_mut_ptr(), REGION) };
    assert!(left.iter().all(|byte| *byte == 0), "a region that is not writable was written");
}
