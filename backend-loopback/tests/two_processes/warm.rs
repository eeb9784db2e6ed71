//! Memory that was warmed up takes no page fault at its first use. The test counts page faults, and measures no time.

use multirail_spi::{Access, *};

use crate::common::*;
use crate::process::Peer;

const TRIES: usize = 3;

/// The number of page faults of this thread while `run` ran.
fn faults(run: impl FnOnce()) -> u64 {
    let taken = || {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // The tenth field, of which the second is the thread's name in parentheses.
        let rest = stat.rsplit_once(") ").unwrap().1;
        rest.split(' ').nth(7).unwrap().parse::<u64>().unwrap()
    };
    let before = taken();
    run();
    taken() - before
}

/// Takes the best of several tries, since the kernel may take a page back at any time.
pub fn warm_memory_takes_no_page_fault() {
    let mut a = node(multirail_loopback::LoopbackConfig::default(), 1);
    let source = a.register(crate::LEN, Access::LOCAL);
    source.fill(1);
    let small = a.register(65536, Access::LOCAL);
    small.fill(2);
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for warmed in [false, true].repeat(TRIES) {
        let mut peer = Peer::start(&a);
        let import = a.try_import(peer.slot, peer.shared).unwrap();
        if warmed {
            import.warm_up();
            let touch = WorkRequest { id: 1, len: 0, ..write(1, peer.slot, &source, None) };
            assert_eq!(a.run(touch), done(1, 1));
        }
        let bytes = faults(|| assert_eq!(a.run(write(2, peer.slot, &source, Some(&import))), done(2, 1)));
        let message = WorkRequest { kind: WorkKind::Send, ..write(3, peer.slot, &small, None) };
        let message = faults(|| assert_eq!(a.run(message), done(3, 1)));
        if warmed { &mut warm } else { &mut cold }.push((bytes, message));
        // The warm-up request delivered no event.
        assert!(peer.ask("events 1").ends_with("len: 65536, imm: None }] 2"));
        assert_eq!(peer.ask("bytes 0").split(' ').next(), Some("1"));
        a.domain.connector().disconnect(peer.slot);
        assert_eq!(a.wait(1), [Event::PeerGone { peer: peer.slot }]);
    }
    let none = |of: fn(&(u64, u64)) -> u64, counts: &[(u64, u64)]| counts.iter().any(|count| of(count) == 0);
    let what = format!("cold {cold:?}, warm {warm:?}");
    assert!(none(|count| count.0, &warm) && !none(|count| count.0, &cold), "bytes: {what}");
    // If the message ring is in a huge page, the connection has touched all of it.
    assert!(none(|count| count.1, &warm), "messages: {what}");
}
