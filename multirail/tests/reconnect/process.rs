//! The peer's process is killed and started again at the same address.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use multirail::{Access, ErrorKind, LocalList, RemoteList, WriteOptions, wait};

use crate::child::PeerProcess;
use crate::{LAYERS, LEN, LIMIT, PAGE, builder, connect, connected, content, gone, hooked, next, patient};

const CHUNK: usize = 4096;

/// Two restarts: each time there is a new peer, with the regions and transfers of the former one.
#[test]
fn killed_and_restarted() {
    let fabric = builder().open().unwrap();
    let mut process = PeerProcess::start(&limit::own_address());
    let handle = connect(&fabric, &process.address, patient());
    let calls = hooked(&handle);
    let first = handle.peer().unwrap();
    assert_eq!((handle.reconnects(), first.id()), (0, connected(&handle).unwrap().id()));

    let page = wait(handle.region(PAGE), LIMIT).unwrap().unwrap();
    let layers = wait(handle.catalogue(LAYERS), LIMIT).unwrap().unwrap();
    let source = fabric.alloc(LEN, Access::LOCAL).unwrap();
    let pages: Vec<u32> = (0..(LEN / CHUNK) as u32).rev().collect();
    let to_page =
        handle.prepare_write_pages(&source, &pages, &page, &pages, CHUNK, &WriteOptions::new()).unwrap();
    // Half of the second layer and half of the third.
    let (mut local, mut remote) = (LocalList::new(), RemoteList::new());
    for layer in [1, 2] {
        local.push(&source, LEN / 4 * layer, LEN / 4).unwrap();
        remote.push(layers.region(layer).unwrap(), LEN / 4 * layer, LEN / 4).unwrap();
    }
    let to_layers = handle.prepare_write_list(&local, .., &remote, .., &WriteOptions::new()).unwrap();
    source.copy_in(0, &content(1, LEN)).unwrap();
    to_page.current().unwrap().post().unwrap().wait(LIMIT).unwrap();
    assert_eq!(process.wrong(0, 1), 0);

    let mut former = first;
    for round in 1..=2_u8 {
        // An operation that waits for a signal is under way when the process dies.
        let signal = Arc::<AtomicU32>::default();
        let stale = to_page.current().unwrap();
        let mut waiting = stale.post_when(signal.clone(), 1).unwrap();
        let address = process.kill();
        assert_eq!(waiting.wait(LIMIT).unwrap_err().kind(), ErrorKind::PeerDied);
        assert_eq!(gone(&former).kind(), ErrorKind::PeerDied);
        assert_eq!(stale.post().err().unwrap().kind(), ErrorKind::PeerDied);

        process = PeerProcess::start(&address);
        let back = connected(&handle).unwrap();
        assert_eq!(next(&calls), back.id());
        assert_eq!(handle.reconnects(), u64::from(round));
        assert_eq!(handle.peer().unwrap().id(), back.id());
        assert!(back.id() != former.id() && back.incarnation() != former.incarnation());
        assert!(!former.is_alive(), "a peer that has died stays dead");
        assert_eq!(stale.post().err().unwrap().kind(), ErrorKind::PeerDied);

        // Nothing is repeated in the new process, even if the signal comes now.
        signal.store(1, Ordering::Release);
        let now = wait(handle.region(PAGE), LIMIT).unwrap().unwrap();
        assert_eq!(now.peer(), back.id());
        let probe = fabric.alloc(LEN, Access::LOCAL).unwrap();
        back.read(&probe, 0..LEN, &now, 0).unwrap().wait(LIMIT).unwrap();
        let mut bytes = vec![1; LEN];
        probe.copy_out(0, &mut bytes).unwrap();
        assert_eq!(bytes, vec![0; LEN], "the page of the new process is new");

        source.copy_in(0, &content(round + 1, LEN)).unwrap();
        let rebound = to_page.current().unwrap();
        assert!(!Arc::ptr_eq(&rebound, &stale) && Arc::ptr_eq(&rebound, &to_page.current().unwrap()));
        rebound.post().unwrap().wait(LIMIT).unwrap();
        assert_eq!(process.wrong(0, round + 1), 0);
        to_layers.current().unwrap().post().unwrap().wait(LIMIT).unwrap();
        let mut layer = vec![0; LEN];
        for number in [1, 2] {
            let layers = wait(handle.catalogue(LAYERS), LIMIT).unwrap().unwrap();
            let region = layers.region(number).unwrap();
            back.read(&probe, 0..LEN, region, 0).unwrap().wait(LIMIT).unwrap();
            probe.copy_out(0, &mut layer).unwrap();
            let half = LEN / 4 * number..LEN / 4 * (number + 1);
            assert_eq!(layer[half.clone()], content(round + 1, LEN)[half.clone()]);
            assert!(layer[..half.start].iter().chain(&layer[half.end..]).all(|byte| *byte == 0));
        }
        former = back;
    }
    assert!(calls.try_recv().is_err(), "the function is called once for each new connection");
}

/// Without a policy nothing comes back.
#[test]
fn off_by_default() {
    let fabric = builder().open().unwrap();
    let process = PeerProcess::start(&limit::own_address());
    let handle = connect(&fabric, &process.address, Default::default());
    let calls = hooked(&handle);
    let peer = handle.peer().unwrap();
    let address = process.kill();
    assert_eq!(gone(&peer).kind(), ErrorKind::PeerDied);
    let restarted = PeerProcess::start(&address);
    assert_eq!(connected(&handle).err().unwrap().kind(), ErrorKind::PeerDied);
    assert_eq!(handle.peer().err().unwrap().kind(), ErrorKind::PeerDied);
    assert_eq!(handle.reconnects(), 0);
    drop((handle, restarted));
    assert!(calls.recv().is_err(), "never called");
}
