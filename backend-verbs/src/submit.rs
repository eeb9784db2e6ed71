//! Posts runs of requests as chains of work requests. Each chain has one doorbell and one completion.

use std::mem::MaybeUninit;

use multirail_spi::{Piece, WorkKind, WorkRequest};
use rdma_sys as ib;

use crate::device_memory::is_device_memory;
use crate::posted::{CHAIN, PostedChains};
use crate::queue_pair::QueuePair;

/// Posts up to [`CHAIN`] pieces of a run to one queue pair. The first of them is the run's piece `first`. Returns the
/// number of accepted pieces, and the errno of the next one, or 0.
///
/// # Safety
/// As `Endpoint::post`.
#[inline]
pub(crate) unsafe fn submit(
    pair: &QueuePair,
    posted: &mut PostedChains,
    run: &WorkRequest,
    (first, pieces): (usize, &[Piece]),
) -> (usize, i32) {
    let count = pieces.len().min(CHAIN);
    let mut chain = [const { MaybeUninit::<ib::ibv_send_wr>::uninit() }; CHAIN];
    let mut spans = [const { MaybeUninit::<ib::ibv_sge>::uninit() }; CHAIN];
    let opcode = match (run.kind, run.imm) {
        (WorkKind::Write, None) => ib::IBV_WR_RDMA_WRITE,
        (WorkKind::Write, Some(_)) => ib::IBV_WR_RDMA_WRITE_WITH_IMM,
        (WorkKind::Send, None) => ib::IBV_WR_SEND,
        (WorkKind::Send, Some(_)) => ib::IBV_WR_SEND_WITH_IMM,
        (WorkKind::Read, _) => ib::IBV_WR_RDMA_READ,
    };
    // The processor cannot copy device memory into a request.
    let inline = match run.kind {
        WorkKind::Write | WorkKind::Send if !is_device_memory(run.lkey) => pair.inline(),
        _ => 0,
    };
    let (chain_start, spans_start): (*mut ib::ibv_send_wr, *mut ib::ibv_sge) =
        (chain.as_mut_ptr().cast(), spans.as_mut_ptr().cast());
    for (index, piece) in pieces[..count].iter().enumerate() {
        let (addr, length) = (piece.local as u64, piece.len as u32);
        spans[index].write(ib::ibv_sge { addr, length, lkey: run.lkey as u32 });
        // SAFETY: zero is a value of the structure.
        let request = chain[index].write(unsafe { std::mem::zeroed() });
        (request.wr_id, request.opcode) = (posted.id(index), opcode);
        request.sg_list = spans_start.wrapping_add(index);
        request.num_sge = i32::from(piece.len > 0);
        request.__bindgen_anon_1.imm_data = run.imm.unwrap_or(0).to_be();
        request.wr.rdma =
            ib::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: piece.remote, rkey: run.rkey as u32 };
        if (1..=inline).contains(&piece.len) {
            request.send_flags = ib::IBV_SEND_INLINE;
        }
        if index + 1 < count {
            request.next = chain_start.wrapping_add(index + 1);
        } else {
            request.send_flags |= ib::IBV_SEND_SIGNALED;
        }
    }
    let mut bad: *mut ib::ibv_send_wr = std::ptr::null_mut();
    // SAFETY: the queue pair is open, the call copies the chain, and the caller promises the memory that the chain
    // names.
    let code = unsafe { ib::ibv_post_send(pair.as_ptr(), chain_start, &raw mut bad) };
    let taken = match code {
        0 => count,
        // The requests before the refused one are posted. The completion of the next chain covers them too.
        _ => (bad as usize).saturating_sub(chain_start as usize) / size_of::<ib::ibv_send_wr>(),
    };
    let taken = taken.min(count);
    if taken > 0 {
        posted.push(run, first, &pieces[..taken]);
    }
    (taken, code)
}
