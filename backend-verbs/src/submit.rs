//! Runs of requests as chains of work requests, each with one doorbell and one completion.

use std::mem::MaybeUninit;

use multirail_spi::{Piece, WorkKind, WorkRequest};
use rdma_sys as ib;

use crate::far::is_far;
use crate::posted::{CHAIN, PostedChains};
use crate::queue_pair::QueuePair;

/// Posts up to [`CHAIN`] pieces of a run, the first of which is its `first`-th, to one queue pair: how
/// many were taken, and the errno of the next, 0 if there is none.
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
    // The processor cannot put what lies in a GPU into a request.
    let inline = match run.kind {
        WorkKind::Write | WorkKind::Send if !is_far(run.lkey) => pair.inline(),
        _ => 0,
    };
    let (chain_start, spans_start): (*mut ib::ibv_send_wr, *mut ib::ibv_sge) =
        (chain.as_mut_ptr().cast(), spans.as_mut_ptr().cast());
    for (place, piece) in pieces[..count].iter().enumerate() {
        let (addr, length) = (piece.local as u64, piece.len as u32);
        spans[place].write(ib::ibv_sge { addr, length, lkey: run.lkey as u32 });
        // SAFETY: zero is a value of the structure.
        let request = chain[place].write(unsafe { std::mem::zeroed() });
        (request.wr_id, request.opcode) = (posted.id(place), opcode);
        request.sg_list = spans_start.wrapping_add(place);
        request.num_sge = i32::from(piece.len > 0);
        request.__bindgen_anon_1.imm_data = run.imm.unwrap_or(0).to_be();
        request.wr.rdma =
            ib::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr: piece.remote, rkey: run.rkey as u32 };
        if (1..=inline).contains(&piece.len) {
            request.send_flags = ib::IBV_SEND_INLINE;
        }
        if place + 1 < count {
            request.next = chain_start.wrapping_add(place + 1);
        } else {
            request.send_flags |= ib::IBV_SEND_SIGNALED;
        }
    }
    let mut bad: *mut ib::ibv_send_wr = std::ptr::null_mut();
    // SAFETY: the queue pair is open; the chain is copied before this returns, and what it names is
    // the caller's promise.
    let code = unsafe { ib::ibv_post_send(pair.as_ptr(), chain_start, &raw mut bad) };
    let taken = match code {
        0 => count,
        // The requests before the refused one are posted. The next chain tells of them, too.
        _ => (bad as usize).saturating_sub(chain_start as usize) / size_of::<ib::ibv_send_wr>(),
    };
    let taken = taken.min(count);
    if taken > 0 {
        posted.push(run, first, &pieces[..taken]);
    }
    (taken, code)
}
