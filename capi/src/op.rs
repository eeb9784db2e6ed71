//! Operations: looking, waiting, cancelling, and their results.

use std::future::Future;

use multirail::{Error, Op, RailReceipt, Receipt};

use crate::abi::*;
use crate::arguments::{Out, OutText};
use crate::fabric::not_text;
use crate::failure::{Answer, Failure};
use crate::handles::{OPERATIONS, PEERS, REMOTES};
use crate::operation::{Operation, Value};
use crate::transfer_options::limit;

/// Makes a handle of a submitted operation. If the program wants none, the operation runs to its end alone.
#[inline]
pub fn submitted(op: Out<mr_op>, operation: Op) -> Answer {
    if op.is_null() {
        operation.detach();
        return Ok(MR_OK);
    }
    op.check("op")?;
    op.set(OPERATIONS.insert(Operation::of(operation))?);
    Ok(MR_OK)
}

/// Begins an operation that is no transfer, and makes a handle of it. `op` was checked.
pub fn begun(op: Out<mr_op>, task: impl Future<Output = Result<Value, Error>> + Send + 'static) -> Answer {
    op.set(OPERATIONS.insert(Operation::of_task(task))?);
    Ok(MR_OK)
}

entry_points! {
    fn mr_op_test(op: mr_op) {
        OPERATIONS.find(op)?.test()
    }

    fn mr_op_wait(op: mr_op, timeout_ns: u64) {
        OPERATIONS.find(op)?.wait(limit(timeout_ns))
    }

    fn mr_op_cancel(op: mr_op) {
        OPERATIONS.find(op)?.cancel();
        Ok(MR_OK)
    }

    fn mr_op_release(op: mr_op) {
        OPERATIONS.take(op)?.abandon();
        Ok(MR_OK)
    }

    fn mr_op_detach(op: mr_op) {
        OPERATIONS.take(op)?.detach();
        Ok(MR_OK)
    }

    fn mr_op_error(op: mr_op, buf: OutText, len: usize, needed: Out<usize>) {
        buf.write(len, needed, &OPERATIONS.find(op)?.error().unwrap_or_default())
    }

    fn mr_op_take_peer(op: mr_op, peer: Out<mr_peer>) {
        peer.check("peer")?;
        OPERATIONS.find(op)?.with_value(|value| match std::mem::replace(value, Value::Nothing) {
            Value::Peer(new) => {
                let taken = new.take().ok_or_else(|| no_result("peer"))?;
                peer.set(PEERS.insert(taken)?);
                Ok(MR_OK)
            }
            other => {
                *value = other;
                Err(no_result("peer"))
            }
        })
    }

    fn mr_op_take_remote(op: mr_op, remote: Out<mr_remote>) {
        remote.check("remote")?;
        OPERATIONS.find(op)?.with_value(|value| match std::mem::replace(value, Value::Nothing) {
            Value::Remote(found) => {
                remote.set(REMOTES.insert(found)?);
                Ok(MR_OK)
            }
            other => {
                *value = other;
                Err(no_result("region"))
            }
        })
    }

    fn mr_op_outcome(op: mr_op, outcome: Out<mr_outcome>) {
        let given = outcome.read_versioned("outcome")?;
        OPERATIONS.find(op)?.with_value(|value| {
            let found = match value {
                Value::Outcome(outcome) => *outcome,
                _ => multirail::Outcome::default(),
            };
            let peer = if found.peer.is_some() { MR_OUTCOME_PEER } else { 0 };
            let imm = if found.imm.is_some() { MR_OUTCOME_IMM } else { 0 };
            outcome.set(mr_outcome {
                size: given.size,
                flags: peer | imm,
                bytes: found.bytes,
                work_requests: found.work_requests,
                merged: found.merged,
                peer: found.peer.map_or(0, |peer| peer.number()),
                imm: found.imm.unwrap_or(0),
                reserved: 0,
            });
            Ok(MR_OK)
        })
    }

    fn mr_op_receipt(
        op: mr_op,
        receipt: Out<mr_receipt>,
        rails: Out<mr_rail_receipt>,
        capacity: usize,
        count: Out<usize>,
    ) {
        let given = receipt.read_versioned("receipt")?;
        if given.rail_size as usize != size_of::<mr_rail_receipt>() {
            let why = format!("receipt.rail_size is {}; begin with MR_RECEIPT_INIT", given.rail_size);
            return Err(Failure::invalid(why));
        }
        if capacity > 0 {
            rails.check("rails")?;
        }
        OPERATIONS.find(op)?.with_receipt(|found| {
            receipt.set(mr_receipt {
                size: given.size,
                rail_size: given.rail_size,
                bytes: found.bytes,
                work_requests: found.work_requests,
                merged: found.merged,
                post_ns: nanoseconds(found.post),
                transfer_ns: nanoseconds(found.transfer),
            });
            rails.set_all(capacity, found.rails.iter().map(rail_receipt));
            count.set(found.rails.len());
            Ok(MR_OK)
        })
    }

    fn mr_op_receipt_json(op: mr_op, buf: OutText, len: usize, needed: Out<usize>) {
        OPERATIONS.find(op)?.with_receipt(|receipt| {
            buf.write(len, needed, &serde_json::to_string(&json(receipt)).map_err(not_text)?)
        })
    }
}

#[cold]
fn no_result(what: &str) -> Failure {
    Failure::invalid(format!("the operation has no {what}, or it was taken already"))
}

fn nanoseconds(span: std::time::Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

fn rail_receipt(rail: &RailReceipt) -> mr_rail_receipt {
    mr_rail_receipt {
        bytes: rail.bytes,
        rail: rail.rail,
        paths: rail.path.bits(),
        transport: padded(rail.transport.as_deref().unwrap_or_default()),
        device: padded(&rail.device),
    }
}

/// Text with at least one NUL behind it, cut if it is longer.
fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut padded = [0; N];
    let mut length = text.len().min(N - 1);
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    padded[..length].copy_from_slice(&text.as_bytes()[..length]);
    padded
}

fn json(receipt: &Receipt) -> serde_json::Value {
    let rail = |rail: &RailReceipt| {
        serde_json::json!({
            "transport": rail.transport,
            "rail": rail.rail,
            "device": rail.device,
            "bytes": rail.bytes,
            "path": rail.path.to_string(),
        })
    };
    serde_json::json!({
        "bytes": receipt.bytes,
        "work_requests": receipt.work_requests,
        "merged": receipt.merged,
        "post_ns": nanoseconds(receipt.post),
        "transfer_ns": nanoseconds(receipt.transfer),
        "rails": receipt.rails.iter().map(rail).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_cut_at_a_character() {
        assert_eq!(padded::<4>("lo"), *b"lo\0\0");
        assert_eq!(padded::<4>("lo1ä"), *b"lo1\0");
        assert_eq!(padded::<4>("loä"), *b"lo\0\0");
    }
}
