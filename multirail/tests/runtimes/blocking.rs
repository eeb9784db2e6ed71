//! Callers without async: every wait has a limit, and a timeout is a typed error.

use std::time::Duration;

use multirail::{Access, ErrorKind, PeerGroup, wait};

use crate::{LIMIT, PAGE, TestDevices, TestPage, differing};

const SHORT: Duration = Duration::from_millis(3);

#[test]
fn from_listening_to_closing() {
    let (a, b) = (TestDevices::Late.open(1).unwrap(), TestDevices::Late.open(2).unwrap());
    let listener = wait(b.listen("127.0.0.1:0"), LIMIT).unwrap().unwrap();
    assert_eq!(wait(listener.accept(), SHORT).err().unwrap().kind(), ErrorKind::DeadlineExceeded);
    let address = listener.local_addr();
    let connecting = std::thread::spawn(move || (wait(a.connect(&address), LIMIT).unwrap().unwrap(), a));
    let to_a = wait(listener.accept(), LIMIT).unwrap().unwrap();
    let (to_b, a) = connecting.join().unwrap();

    let (src, dst) =
        (TestPage::new(&a, Access::LOCAL, 1).unwrap(), TestPage::new(&b, Access::all(), 2).unwrap());
    b.publish("dst", &dst.region).unwrap();
    let remote = wait(to_b.region("dst"), LIMIT).unwrap().unwrap();
    let write = || to_b.write(&src.region, 0..PAGE, &remote, 0).unwrap();
    assert_eq!(write().wait(LIMIT).unwrap().bytes as usize, PAGE);
    assert_eq!(differing(&dst.region, 1), 0);

    // The limit ends the wait, not the operation.
    let mut op = b.recv(&dst.region, 0..PAGE).unwrap();
    assert_eq!(wait(&mut op, Duration::ZERO).err().unwrap().kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(op.wait(Duration::ZERO).err().unwrap().kind(), ErrorKind::DeadlineExceeded);
    to_b.send(&src.region, 0..PAGE).unwrap().wait(LIMIT).unwrap();
    assert_eq!(wait(op, LIMIT).unwrap().unwrap().bytes as usize, PAGE);
    let mut cancel = write().cancel();
    let _ = cancel.wait(LIMIT);
    drop(write());
    to_b.drain().unwrap().wait(LIMIT).unwrap();

    assert_eq!(to_a.imm(1).expect(1).wait(SHORT).err().unwrap().kind(), ErrorKind::DeadlineExceeded);
    to_b.write_imm(1).unwrap().wait(LIMIT).unwrap();
    to_a.imm(1).expect(1).wait(LIMIT).unwrap();
    let mut arrivals = to_a.imm(1).arrivals();
    assert_eq!(arrivals.next().wait(LIMIT).unwrap(), 1);
    assert_eq!(arrivals.next().wait(SHORT).err().unwrap().kind(), ErrorKind::DeadlineExceeded);
    let (ours, theirs) = (PeerGroup::new([to_b.clone()]).unwrap(), PeerGroup::new([to_a.clone()]).unwrap());
    let late = ours.barrier("a", SHORT).unwrap().wait();
    assert_eq!(late.err().unwrap().kind(), ErrorKind::DeadlineExceeded);
    theirs.barrier("a", LIMIT).unwrap().wait().unwrap();
    ours.barrier("a", LIMIT).unwrap().wait().unwrap();
    to_b.warm_up().unwrap().wait(LIMIT).unwrap();
    let mut all = ours.write_imm(2).unwrap();
    all.wait(LIMIT).unwrap();
    let pool = b.recv_pool(1, 16).unwrap();
    assert_eq!(pool.next().wait(SHORT).err().unwrap().kind(), ErrorKind::DeadlineExceeded);
    to_b.send(&src.region, 0..16).unwrap().detach();
    assert_eq!(pool.next().wait(LIMIT).unwrap().len(), 16);
    dst.region.revoke().unwrap().wait(LIMIT).unwrap();

    assert_eq!(wait(to_a.closed(), SHORT).err().unwrap().kind(), ErrorKind::DeadlineExceeded);
    to_b.disconnect();
    assert_eq!(wait(to_a.closed(), LIMIT).unwrap().kind(), ErrorKind::Closed);
    wait(listener.close(), LIMIT).unwrap();
}

#[test]
fn without_workers_too() {
    let open = |seed| TestDevices::Late.builder(seed).caller_driven().open().unwrap();
    let (a, b) = (open(1), open(2));
    let listener = wait(b.listen("127.0.0.1:0"), LIMIT).unwrap().unwrap();
    let (both, address) = (futures::future::try_join, listener.local_addr());
    let (to_b, to_a) = wait(both(a.connect(&address), listener.accept()), LIMIT).unwrap().unwrap();
    let (src, dst) =
        (TestPage::new(&a, Access::LOCAL, 1).unwrap(), TestPage::new(&b, Access::all(), 2).unwrap());
    let remote = to_b.import(&dst.region.descriptor()).unwrap();
    let write = || to_b.write(&src.region, 0..PAGE, &remote, 0).unwrap();
    assert_eq!(wait(write(), LIMIT).unwrap().unwrap().bytes as usize, PAGE);
    assert_eq!(differing(&dst.region, 1), 0);
    drop(write());
    to_b.drain().unwrap().wait(LIMIT).unwrap();
    assert!(wait(write().cancel(), LIMIT).is_ok());
    // A wait may be inside the future of another wait, here on one thread.
    let inner = async { wait(write(), LIMIT).unwrap().unwrap().bytes };
    let (inner, outer) = wait(futures::future::join(inner, write()), LIMIT).unwrap();
    assert_eq!((inner as usize, outer.unwrap().bytes as usize), (PAGE, PAGE));
    assert_eq!(wait(to_a.imm(3).expect(1), SHORT).err().unwrap().kind(), ErrorKind::DeadlineExceeded);
    to_b.write_imm(3).unwrap().wait(LIMIT).unwrap();
    wait(to_a.imm(3).expect(1), LIMIT).unwrap().unwrap();
}

/// Each thread is woken for its own operation.
#[test]
fn from_many_threads_at_once() {
    let (a, b) = (TestDevices::Late.open(1).unwrap(), TestDevices::Late.open(2).unwrap());
    let (to_b, _to_a) = a.connect_local(&b).unwrap();
    let (src, dst) =
        (TestPage::new(&a, Access::LOCAL, 1).unwrap(), TestPage::new(&b, Access::all(), 2).unwrap());
    let remote = to_b.import(&dst.region.descriptor()).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let part = thread * PAGE / 8..(thread + 1) * PAGE / 8;
            let (to_b, src, remote) = (&to_b, &src, &remote);
            scope.spawn(move || {
                for _ in 0..20 {
                    let op = to_b.write(&src.region, part.clone(), remote, part.start).unwrap();
                    wait(op, LIMIT).unwrap().unwrap();
                }
            });
        }
    });
    assert_eq!(differing(&dst.region, 1), 0);
}
