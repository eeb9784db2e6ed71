//! Two domains of one process, as two tenants have them: a peer of one cannot reach
//! the other's memory, whatever key it shows.

mod common;

use common::*;
use multirail_loopback::LoopbackConfig;
use multirail_spi::{ErrorKind, KeyMaterial};

#[test]
fn keys_mean_nothing_in_another_domain() {
    let [a, b] = [1, 2].map(|seed| node(LoopbackConfig::default(), seed));
    let mut peer = node(LoopbackConfig::default(), 3);
    let (to_a, _) = connect(&peer, &a);
    let theirs: Vec<_> = (0..3).map(|_| b.held(4096, BOTH)).collect();
    let source = peer.held(4096, BOTH);
    source.fill(7);
    // As long as `a` has no region, no key of `b` is one there.
    for held in &theirs {
        let error = peer.try_import(to_a, held.region.key()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::RemoteAccess, "{error}");
    }
    // Where `a` has a region of the same number, that is what the key means.
    let own = a.held(4096, BOTH);
    assert_eq!(own.region.key().key, theirs[0].region.key().key);
    for number in 0..1 << 12 {
        let key = KeyMaterial { key: theirs[0].region.key().key ^ number, ..own.region.key() };
        if let Ok(import) = peer.try_import(to_a, key) {
            assert_eq!(peer.run(write(number, to_a, &source, Some(&import))), done(number, 1));
        }
    }
    assert_eq!(own.byte(0), 7);
    assert!(theirs.iter().all(|held| (0..4096).all(|at| held.byte(at) == 0)));
}
