use std::sync::Arc;

use multirail_spi::{HostBuffer, Memory};

use super::*;
use crate::segment::Segment;

fn region(regions: &Regions, len: usize, access: Access) -> (Arc<HostBuffer>, Key) {
    let buffer = Arc::new(HostBuffer::new(len).unwrap());
    let key = regions.insert(buffer.clone(), access).unwrap();
    (buffer, key)
}

fn byte(buffer: &HostBuffer, at: usize) -> u8 {
    assert!(at < buffer.len());
    // SAFETY: in bounds of memory that only this thread touches.
    unsafe { buffer.as_ptr().add(at).read() }
}

#[test]
fn slots_carry_bytes_both_ways() {
    let (stage, regions) = (Segment::<Stage>::create().unwrap(), Regions::default());
    let stage = stage.layout();
    let (buffer, key) = region(&regions, 100, Access::REMOTE_READ | Access::REMOTE_WRITE);
    let ask = Ask { kind: WorkKind::Write, key, remote: 90, len: 10 };
    // SAFETY: slots hold more than ten bytes, and nobody else has this stage.
    unsafe { stage.bytes(0).write_bytes(7, 10) };
    stage.post(0, &ask);
    stage.post(1, &Ask { kind: WorkKind::Read, remote: 89, len: 2, ..ask });
    assert!(stage.is_due(0) && stage.arm(0) && !stage.is_free(1));
    assert_eq!(stage.serve(0, &regions), (2, true), "the initiator asked to be rung");
    assert_eq!([0, 1].map(|at| stage.progress(at)), [Progress::Answered(Ok(())); 2]);
    assert!(!stage.arm(0), "an answer is there already");
    assert_eq!([89, 90, 99].map(|at| byte(&buffer, at)), [0, 7, 7]);
    // SAFETY: as above.
    assert_eq!(unsafe { [stage.bytes(1).read(), stage.bytes(1).add(1).read()] }, [0, 7]);
    stage.release(0);
    assert!(stage.is_free(0) && stage.is_free(SLOTS as u64));
}

#[test]
fn forged_requests_are_refused() {
    let (stage, regions) = (Segment::<Stage>::create().unwrap(), Regions::default());
    let stage = stage.layout();
    let (closed, old) = region(&regions, 100, Access::REMOTE_WRITE);
    regions.close(old);
    let (buffer, key) = region(&regions, 100, Access::REMOTE_WRITE);
    let (secret, local) = region(&regions, 100, Access::empty());
    let good = Ask { kind: WorkKind::Write, key, remote: 0, len: 8 };
    let denied = Err(ErrorKind::RemoteAccess);
    let forged = [
        (Ask { remote: 93, ..good }, denied),
        (Ask { remote: u64::MAX - 3, ..good }, denied),
        (Ask { len: SLOT + 1, ..good }, denied),
        (Ask { len: u32::MAX as usize, ..good }, denied),
        (Ask { kind: WorkKind::Read, ..good }, denied),
        (Ask { key: Key { slot: 77, ..key }, ..good }, denied),
        (Ask { key: Key { slot: u32::MAX, ..key }, ..good }, denied),
        (Ask { key: Key { generation: 9, ..key }, ..good }, denied),
        (Ask { key: local, ..good }, denied),
        (Ask { key: old, ..good }, Err(ErrorKind::Revoked)),
        (good, Ok(())),
    ];
    for (at, (ask, want)) in forged.iter().enumerate() {
        let at = at as u64;
        // SAFETY: a slot's bytes, ours.
        unsafe { stage.bytes(at).write_bytes(9, SLOT) };
        stage.post(at, ask);
        assert_eq!(stage.serve(at, &regions), (1, false));
        assert_eq!(stage.progress(at), Progress::Answered(*want), "{ask:?}");
    }
    assert!((0..100).all(|at| byte(&closed, at) == 0 && byte(&secret, at) == 0));
    assert!((0..100).all(|at| byte(&buffer, at) == if at < 8 { 9 } else { 0 }));
}

#[test]
fn a_slot_is_taken_back_or_served_never_both() {
    let (stage, regions) = (Segment::<Stage>::create().unwrap(), Regions::default());
    let stage = stage.layout();
    let (buffer, key) = region(&regions, 8, Access::REMOTE_WRITE);
    let ask = Ask { kind: WorkKind::Write, key, remote: 0, len: 8 };
    for round in 0..if cfg!(miri) { 10 } else { 1000 } {
        // SAFETY: a slot's bytes, ours until they are posted.
        unsafe { stage.bytes(0).write_bytes(round as u8, 8) };
        let before = byte(&buffer, 0);
        stage.post(0, &ask);
        let (taken, (served, _)) = std::thread::scope(|scope| {
            let target = scope.spawn(|| stage.serve(0, &regions));
            (stage.take_back(0), target.join().unwrap())
        });
        assert_eq!(u64::from(taken) + served, 1);
        assert_eq!(byte(&buffer, 0), if taken { before } else { round as u8 });
        stage.release(0);
    }
}

#[test]
fn nonsense_is_seen() {
    let (stage, regions) = (Segment::<Stage>::create().unwrap(), Regions::default());
    let stage = stage.layout();
    assert_eq!(stage.progress(0), Progress::Nonsense, "nothing was posted");
    for (state, answer) in [(9, 0), (ANSWERED, 77), (FREE, 0)] {
        stage.slots[0].state.store(state, Ordering::Relaxed);
        stage.slots[0].answer.store(answer, Ordering::Relaxed);
        assert_eq!(stage.progress(0), Progress::Nonsense);
        assert!(!stage.is_due(0) && stage.serve(0, &regions) == (0, false));
    }
}
