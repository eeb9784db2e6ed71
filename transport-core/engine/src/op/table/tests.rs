//! Which owner frees a slot, and when: exhaustively under loom, otherwise with threads.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use super::{OpId, OpTable};
use crate::Outcome;

fn outcome(bytes: u64) -> crate::Result<Outcome> {
    Ok(Outcome { bytes, ..Outcome::default() })
}

struct Nobody;

impl Wake for Nobody {
    fn wake(self: Arc<Self>) {}
}

fn waker() -> Waker {
    Waker::from(Arc::new(Nobody))
}

/// What the engine does: completes the operation, and then marks it quiesced.
fn engine_side(table: &OpTable, id: OpId) {
    table.complete(id, outcome(7));
    table.quiesce(id);
}

/// What the engine does with an operation that ends when no byte can move any more.
fn engine_side_at_once(table: &OpTable, id: OpId) {
    table.succeed(id, outcome(7).unwrap(), |notes| notes.set_shares(&[7], |bytes| Some(*bytes)));
}

const ENGINE_SIDES: [fn(&OpTable, OpId); 2] = [engine_side, engine_side_at_once];

/// What an impatient waiter does: polls once and then releases the slot in any case.
fn impatient_waiter(table: &OpTable, id: OpId) {
    let waker = waker();
    if let Poll::Ready(result) = table.poll_result(id, &mut Context::from_waker(&waker)) {
        assert_eq!(result.unwrap().bytes, 7);
    }
    table.release(id);
}

#[cfg(multirail_loom)]
mod exhaustive {
    use super::*;

    #[test]
    fn drop_races_complete_and_quiesce() {
        ENGINE_SIDES.into_iter().for_each(drop_races);
    }

    fn drop_races(engine_side: fn(&OpTable, OpId)) {
        loom::model(move || {
            let table = Arc::new(OpTable::new(1, 1));
            let id = table.insert().unwrap();
            let engine = Arc::clone(&table);
            let engine = loom::thread::spawn(move || engine_side(&engine, id));
            impatient_waiter(&table, id);
            engine.join().unwrap();
            assert_eq!(table.in_use(), 0, "the second to let go frees the slot");
            assert_ne!(table.insert().unwrap(), id, "a slot comes back with another generation");
        });
    }

    #[test]
    fn a_waiting_task_is_woken() {
        ENGINE_SIDES.into_iter().for_each(is_woken);
    }

    fn is_woken(engine_side: fn(&OpTable, OpId)) {
        loom::model(move || {
            let table = Arc::new(OpTable::new(1, 1));
            let id = table.insert().unwrap();
            let engine = Arc::clone(&table);
            let engine = loom::thread::spawn(move || engine_side(&engine, id));
            let waiting = Arc::clone(&table);
            let result = loom::future::block_on(std::future::poll_fn(move |cx| waiting.poll_result(id, cx)));
            assert_eq!(result.unwrap().bytes, 7);
            let waiting = Arc::clone(&table);
            loom::future::block_on(std::future::poll_fn(move |cx| waiting.poll_quiesced(id, cx)));
            table.release(id);
            engine.join().unwrap();
            assert_eq!(table.in_use(), 0);
        });
    }
}

#[cfg(not(multirail_loom))]
mod threaded {
    use super::*;
    use crate::{Error, ErrorKind};

    #[test]
    fn every_slot_comes_back() {
        let rounds = if cfg!(miri) { 20 } else { 20_000 };
        let table = Arc::new(OpTable::new(4, 1));
        let (send, receive) = std::sync::mpsc::channel::<OpId>();
        let engine = Arc::clone(&table);
        let sides = ENGINE_SIDES.into_iter().cycle();
        let run = move || receive.iter().zip(sides).for_each(|(id, side)| side(&engine, id));
        let engine = std::thread::spawn(run);
        for _ in 0..rounds {
            let id = loop {
                match table.insert() {
                    Some(id) => break id,
                    None => std::thread::yield_now(),
                }
            };
            send.send(id).unwrap();
            impatient_waiter(&table, id);
        }
        drop(send);
        engine.join().unwrap();
        assert_eq!(table.in_use(), 0);
    }

    #[test]
    fn the_first_result_stays_and_the_slot_is_held_until_quiesced() {
        let table = OpTable::new(1, 1);
        let id = table.insert().unwrap();
        table.complete(id, Err(Error::new(ErrorKind::DeadlineExceeded, "write", "late")));
        table.complete(id, outcome(7));
        assert_eq!(table.try_result(id).unwrap().unwrap_err().kind(), ErrorKind::DeadlineExceeded);
        table.release(id);
        assert_eq!(table.in_use(), 1, "completed and dropped, but the engine still holds memory");
        table.quiesce(id);
        assert_eq!(table.in_use(), 0);
    }

    #[test]
    fn a_full_table_says_so() {
        let table = OpTable::new(2, 1);
        let ids = [table.insert().unwrap(), table.insert().unwrap()];
        assert!(table.insert().is_none());
        table.release(ids[0]);
        engine_side(&table, ids[0]);
        assert_eq!(table.insert().unwrap().index, ids[0].index);
    }
}
