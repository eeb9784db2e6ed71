//! Two domains of one process, as two tenants have them: a peer of one domain cannot reach the memory of the other,
//! with any key.

mod common;

use common::*;
use multirail_loopback::LoopbackConfig;
use multirail_spi::{ErrorKind, RemoteKey};

#[test]
fn keys_mean_nothing_in_another_domain() {
    let [a, b] = [1, 2].map(|seed| node(LoopbackConfig::default(), seed));
    let mut peer = node(LoopbackConfig::default(), 3);
    let (to_a, _) = connect(&peer, &a);
    let theirs: Vec<_> = (0..3).map(|_| b.register(4096, BOTH)).collect();
    let source = peer.register(4096, BOTH);
    source.fill(7);
    // While `a` has no region, it knows no key of `b`.
    for registered in &theirs {
        let error = peer.try_import(to_a, registered.region.key()).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::RemoteAccess, "{error}");
    }
    // If `a` has a region with the same key, the key means that region.
    let own = a.register(4096, BOTH);
    assert_eq!(own.region.key().key, theirs[0].region.key().key);
    for number in 0..1 << 12 {
        let key = RemoteKey { key: theirs[0].region.key().key ^ number, ..own.region.key() };
        if let Ok(import) = peer.try_import(to_a, key) {
            assert_eq!(peer.run(write(number, to_a, &source, Some(&import))), done(number, 1));
        }
    }
    assert_eq!(own.byte(0), 7);
    assert!(theirs.iter().all(|registered| (0..4096).all(|at| registered.byte(at) == 0)));
}
