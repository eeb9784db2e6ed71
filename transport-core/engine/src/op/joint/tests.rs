//! Joint operations over an op table whose engine is the test.

use std::time::Duration;

use limit::{Woken, poll};

use super::*;
use crate::ErrorKind;

const SHORT: Duration = Duration::from_millis(2);

/// Submits `count` operations to the engine. Returns their ids too.
fn submitted(engine: &Arc<EngineHandle>, count: usize) -> (Vec<OpId>, Vec<Op>) {
    let ids: Vec<_> = (0..count).map(|_| engine.insert("test").unwrap()).collect();
    let ops = ids.iter().map(|id| Op::pending(Arc::clone(engine), *id)).collect();
    (ids, ops)
}

fn outcome(bytes: u64, work_requests: u32) -> Result<Outcome> {
    Ok(Outcome { bytes, work_requests, ..Outcome::default() })
}

fn error(kind: ErrorKind) -> Result<Outcome> {
    Err(Error::new(kind, "test", ""))
}

fn kind(result: Result<Outcome>) -> ErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn resolves_with_the_last_part_and_adds_up() {
    let engine = EngineHandle::without_engine();
    let (ids, mut ops) = submitted(&engine, 2);
    ops.insert(1, Op::ready(outcome(100, 0)));
    let woken = Arc::<Woken>::default();
    let mut all = Op::all(ops);
    assert_eq!(all.id(), Some(ids[0]));
    assert!(poll(&mut all, &woken).is_pending());
    engine.table.finish(ids[1], outcome(20, 2));
    assert!(woken.take() > 0);
    assert!(poll(&mut all, &woken).is_pending());
    // The parts that succeeded have receipts.
    assert_eq!((engine.table.in_use(), all.receipt()), (2, None));
    assert_eq!(kind(all.wait(SHORT)), ErrorKind::DeadlineExceeded);
    assert!(poll(&mut all, &woken).is_pending());
    engine.table.finish(ids[0], outcome(3, 1));
    assert!(woken.take() > 0);
    let Poll::Ready(result) = poll(&mut all, &woken) else { panic!("pending") };
    assert_eq!(result.unwrap(), outcome(123, 3).unwrap());
    assert_eq!(all.id(), Some(ids[0]));
    assert!(all.try_result().is_none());
    assert_eq!(kind(all.wait(SHORT)), ErrorKind::Closed);
    drop(all);
    assert_eq!(engine.table.in_use(), 0);
}

#[test]
fn an_error_waits_for_the_others_and_the_first_stays() {
    let engine = EngineHandle::without_engine();
    let (ids, ops) = submitted(&engine, 3);
    let mut all = Op::all(ops);
    engine.table.complete(ids[2], error(ErrorKind::PeerDied));
    assert!(all.try_result().is_none());
    engine.table.finish(ids[0], error(ErrorKind::DeadlineExceeded));
    assert!(all.try_result().is_none());
    engine.table.finish(ids[1], outcome(1, 1));
    assert_eq!(kind(all.wait(SHORT)), ErrorKind::PeerDied);
    // Part 2 is completed, but not quiesced.
    let mut cancel = all.cancel();
    assert_eq!(kind(cancel.wait(SHORT)), ErrorKind::DeadlineExceeded);
    engine.table.quiesce(ids[2]);
    assert_eq!(kind(cancel.wait(SHORT)), ErrorKind::Closed);
    assert_eq!(engine.table.in_use(), 0);
}

#[test]
fn what_is_there_already_is_ready() {
    let engine = EngineHandle::without_engine();
    let mut all = Op::all(vec![Op::ready(outcome(1, 0)), Op::ready(outcome(2, 0))]);
    assert!(matches!(all.0, State::Ready(_)));
    assert_eq!(all.wait(SHORT).unwrap().bytes, 3);
    assert_eq!(Op::all(Vec::new()).wait(SHORT).unwrap(), Outcome::default());
    let (ids, mut ops) = submitted(&engine, 1);
    ops.push(Op::ready(error(ErrorKind::Revoked)));
    let mut all = Op::all(ops);
    assert!(all.try_result().is_none());
    engine.table.finish(ids[0], outcome(1, 1));
    assert_eq!(kind(all.try_result().unwrap()), ErrorKind::Revoked);
}

#[test]
fn joint_operations_join() {
    let engine = EngineHandle::without_engine();
    let (ids, mut ops) = submitted(&engine, 3);
    let inner = Op::all(ops.drain(..2).collect());
    ops.push(inner);
    let mut all = Op::all(ops);
    assert_eq!(all.id(), Some(ids[2]));
    ids.iter().for_each(|id| engine.table.finish(*id, outcome(1, 1)));
    assert_eq!(all.wait(SHORT).unwrap(), outcome(3, 3).unwrap());
}

/// The ids of the cancels that were requested since the last call.
fn cancels(engine: &EngineHandle) -> Vec<OpId> {
    std::iter::from_fn(|| engine.controls.pop())
        .map(|control| match control {
            crate::Control::Cancel(id) => id,
            _ => panic!("another command"),
        })
        .collect()
}

#[test]
fn a_drop_cancels_what_is_under_way_and_a_detach_does_not() {
    let engine = EngineHandle::without_engine();
    let (ids, ops) = submitted(&engine, 3);
    let mut all = Op::all(ops);
    engine.table.finish(ids[1], outcome(1, 1));
    assert!(all.try_result().is_none());
    drop(all);
    assert_eq!(cancels(&engine), [ids[0], ids[2]]);
    let (detached, ops) = submitted(&engine, 2);
    Op::all(ops).detach();
    assert_eq!(cancels(&engine), []);
    ids.iter().step_by(2).chain(&detached).for_each(|id| engine.table.finish(*id, outcome(1, 1)));
    assert_eq!(engine.table.in_use(), 0);
}

#[test]
fn a_cancel_resolves_when_every_part_is_quiesced() {
    let engine = EngineHandle::without_engine();
    let (ids, ops) = submitted(&engine, 2);
    let mut cancel = Op::all(ops).cancel();
    assert_eq!(cancels(&engine), ids);
    let woken = Arc::<Woken>::default();
    assert!(poll(&mut cancel, &woken).is_pending());
    engine.table.finish(ids[1], error(ErrorKind::Cancelled));
    assert!(poll(&mut cancel, &woken).is_pending());
    engine.table.complete(ids[0], outcome(9, 1));
    assert!(poll(&mut cancel, &woken).is_pending());
    woken.take();
    engine.table.quiesce(ids[0]);
    assert!(woken.take() > 0);
    assert!(matches!(poll(&mut cancel, &woken), Poll::Ready(Err(e)) if e.kind() == ErrorKind::Cancelled));
    // If the operations end before the cancel, the cancel returns the outcome.
    let (ids, ops) = submitted(&engine, 2);
    let all = Op::all(ops);
    ids.iter().for_each(|id| engine.table.finish(*id, outcome(4, 1)));
    assert_eq!(all.cancel().wait(SHORT).unwrap(), outcome(8, 2).unwrap());
    assert_eq!(engine.table.in_use(), 0);
}
