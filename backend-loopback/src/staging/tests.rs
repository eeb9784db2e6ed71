use std::sync::Arc;

use multirail_spi::staging::{SlotRequest, SlotRequestKind};
use multirail_spi::{Access, HostBuffer, Memory};

use super::*;
use crate::segment::Segment;
use crate::segment::lease_table::RegionKey;
use crate::segment::staging_buffer::{SLOT_LEN, SLOTS, SlotStatus};

fn region(regions: &Regions, len: usize, access: Access) -> (Arc<HostBuffer>, RegionKey) {
    let memory = Arc::new(HostBuffer::new(len).unwrap());
    let key = regions.insert(memory.clone(), access).unwrap();
    (memory, key)
}

fn write_request(key: RegionKey, offset: u64, len: u64) -> SlotRequest {
    SlotRequest { kind: SlotRequestKind::Write, key: key.to_wire(), offset, len }
}

fn byte(memory: &HostBuffer, at: usize) -> u8 {
    assert!(at < memory.len());
    // SAFETY: in bounds of memory that only this thread touches.
    unsafe { memory.as_ptr().add(at).read() }
}

#[test]
fn slots_carry_bytes_both_ways() {
    let (buffer, regions) = (Segment::<SharedStagingBuffer>::create().unwrap(), Regions::default());
    let buffer = buffer.content();
    let (memory, key) = region(&regions, 100, Access::REMOTE_READ | Access::REMOTE_WRITE);
    let request = write_request(key, 90, 10);
    // SAFETY: slots hold more than ten bytes, and only this test has the buffer.
    unsafe { buffer.bytes(0).write_bytes(7, 10) };
    buffer.post(0, &request);
    buffer.post(1, &SlotRequest { kind: SlotRequestKind::Read, offset: 89, len: 2, ..request });
    assert!(buffer.is_posted(0) && buffer.arm(0) && !buffer.is_free(1));
    assert_eq!(serve(buffer, 0, &regions), (2, true), "the initiator asked to be woken");
    assert_eq!([0, 1].map(|at| buffer.status(at)), [SlotStatus::Done(Ok(())); 2]);
    assert!(!buffer.arm(0), "a response is there already");
    assert_eq!([89, 90, 99].map(|at| byte(&memory, at)), [0, 7, 7]);
    // SAFETY: as above.
    assert_eq!(unsafe { [buffer.bytes(1).read(), buffer.bytes(1).add(1).read()] }, [0, 7]);
    buffer.release(0);
    assert!(buffer.is_free(0) && buffer.is_free(SLOTS as u64));
}

#[test]
fn forged_requests_are_refused() {
    let (buffer, regions) = (Segment::<SharedStagingBuffer>::create().unwrap(), Regions::default());
    let buffer = buffer.content();
    let (closed, old) = region(&regions, 100, Access::REMOTE_WRITE);
    regions.close(old);
    let (memory, key) = region(&regions, 100, Access::REMOTE_WRITE);
    let (secret, local) = region(&regions, 100, Access::empty());
    let good = write_request(key, 0, 8);
    let denied = Err(ErrorKind::RemoteAccess);
    let forged = [
        (SlotRequest { offset: 93, ..good }, denied),
        (SlotRequest { offset: u64::MAX - 3, ..good }, denied),
        (SlotRequest { len: SLOT_LEN as u64 + 1, ..good }, denied),
        (SlotRequest { len: u64::MAX, ..good }, denied),
        (SlotRequest { kind: SlotRequestKind::Read, ..good }, denied),
        (SlotRequest { kind: SlotRequestKind::Imm, ..good }, denied),
        (SlotRequest { kind: SlotRequestKind::Cancel, ..good }, denied),
        (write_request(RegionKey { slot: 77, ..key }, 0, 8), denied),
        (write_request(RegionKey { slot: u32::MAX, ..key }, 0, 8), denied),
        (write_request(RegionKey { generation: 9, ..key }, 0, 8), denied),
        (write_request(local, 0, 8), denied),
        (write_request(old, 0, 8), Err(ErrorKind::Revoked)),
        (good, Ok(())),
    ];
    for (at, (request, want)) in forged.iter().enumerate() {
        let at = at as u64;
        // SAFETY: the bytes of a slot that this test owns.
        unsafe { buffer.bytes(at).write_bytes(9, SLOT_LEN) };
        buffer.post(at, request);
        assert_eq!(serve(buffer, at, &regions), (1, false));
        assert_eq!(buffer.status(at), SlotStatus::Done(*want), "{request:?}");
    }
    assert!((0..100).all(|at| byte(&closed, at) == 0 && byte(&secret, at) == 0));
    assert!((0..100).all(|at| byte(&memory, at) == if at < 8 { 9 } else { 0 }));
}

#[test]
fn a_slot_is_taken_back_or_served_never_both() {
    let (buffer, regions) = (Segment::<SharedStagingBuffer>::create().unwrap(), Regions::default());
    let buffer = buffer.content();
    let (memory, key) = region(&regions, 8, Access::REMOTE_WRITE);
    let request = write_request(key, 0, 8);
    for round in 0..if cfg!(miri) { 10 } else { 1000 } {
        // SAFETY: the bytes of a slot that this test owns, until they are posted.
        unsafe { buffer.bytes(0).write_bytes(round as u8, 8) };
        let before = byte(&memory, 0);
        buffer.post(0, &request);
        let (taken, (served, _)) = std::thread::scope(|scope| {
            let target = scope.spawn(|| serve(buffer, 0, &regions));
            (buffer.take_back(0), target.join().unwrap())
        });
        assert_eq!(u64::from(taken) + served, 1);
        assert_eq!(byte(&memory, 0), if taken { before } else { round as u8 });
        buffer.release(0);
    }
}
