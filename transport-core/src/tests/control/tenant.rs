//! Tenants: fabrics that share a listener and nothing else.

use std::time::Duration;

use super::raw::Raw;
use super::{builder, gets_through, hasty, peer_timeout, served, token, wait};
use crate::control::frame::Frame;
use crate::control::handshake::limits::HANDSHAKES;
use crate::{Access, ErrorKind, Fabric, Listener, Peer};

fn client(name: &str) -> Fabric {
    builder("null").token(token(name)).open().unwrap()
}

fn landlord() -> (Fabric, Listener, String) {
    served(builder("null").token(token("landlord")))
}

#[test]
fn one_accept_loop_serves_all_and_tells_them_apart() {
    let (parent, listener, _) = landlord();
    let (a, b) = (parent.tenant("a", token("a")).unwrap(), parent.tenant("b", token("b")).unwrap());
    let (clients, pairs): (Vec<_>, Vec<_>) = ["a", "landlord", "b", "a"]
        .map(|name| {
            let client = client(name);
            let pair = gets_through(&client, &listener);
            (client, pair)
        })
        .into_iter()
        .unzip();
    let tenants: Vec<_> = pairs.iter().map(|(_, here)| here.tenant()).collect();
    assert_eq!(tenants, ["a", "", "b", "a"]);
    let met: Vec<_> = pairs.iter().map(|(there, _)| there.incarnation()).collect();
    assert_eq!(met, [a.incarnation(), parent.incarnation(), b.incarnation(), a.incarnation()]);
    // A client does not know which tenant it belongs to.
    assert!(pairs.iter().all(|(there, _)| there.tenant().is_empty()));
    let stranger = client("nobody");
    assert_eq!(wait(stranger.connect(&listener.local_addr())).err().unwrap().kind(), ErrorKind::Permission);
    drop(clients);
}

#[test]
fn names_and_descriptors_are_each_tenants_own() {
    let (parent, listener, _) = landlord();
    let (a, b) = (parent.tenant("a", token("a")).unwrap(), parent.tenant("b", token("b")).unwrap());
    for fabric in [&parent, &a, &b] {
        let region = fabric.alloc(4096, Access::REMOTE_WRITE).unwrap();
        fabric.publish("kv", &region).unwrap();
    }
    let secret = b.alloc(8192, Access::all()).unwrap();
    b.publish("secret", &secret).unwrap();
    let (of_a, of_b) = (client("a"), client("b"));
    let (to_a, _) = gets_through(&of_a, &listener);
    let (to_b, _) = gets_through(&of_b, &listener);
    let looked = |peer: &Peer, name: &str| wait(peer.region(name)).map(|region| region.len());
    assert_eq!(looked(&to_b, "secret").unwrap(), 8192);
    assert_eq!(looked(&to_a, "kv").unwrap(), 4096);
    assert_eq!(looked(&to_a, "secret").unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(to_a.import(&secret.descriptor()).err().unwrap().kind(), ErrorKind::Revoked);
    assert!(to_b.import(&secret.descriptor()).is_ok());
    // Counters are separate too.
    assert_eq!((a.counters().len(), b.counters().len()), (1, 1));
}

#[test]
fn what_is_refused() {
    let alone = builder("null").open().unwrap();
    let refused = |result: crate::Result<Fabric>, why: &str| {
        let error = result.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::InvalidRequest, "{error}");
        assert!(error.context().contains(why), "{error}");
    };
    refused(alone.tenant("a", token("a")), "the parent has no token");
    let (parent, ..) = landlord();
    let a = parent.tenant("a", token("a")).unwrap();
    refused(parent.tenant("a", token("other")), "there is a tenant \"a\" already");
    refused(parent.tenant("b", token("a")), "make one for each");
    refused(parent.tenant("b", token("landlord")), "make one for each");
    refused(parent.tenant("", token("b")), "0 bytes");
    refused(parent.tenant(&"x".repeat(256), token("b")), "256 bytes");
    refused(a.tenant("b", token("b")), "a tenant has no tenants");
    assert_eq!(wait(a.listen("0")).err().unwrap().kind(), ErrorKind::InvalidRequest);
    // Once the tenant is gone, its name and its token are free again.
    drop(a);
    let a = parent.tenant("a", token("a")).unwrap();
    a.close();
    let _a = parent.tenant("a", token("a")).unwrap();
    parent.close();
    assert_eq!(parent.tenant("c", token("c")).err().unwrap().kind(), ErrorKind::Closed);
}

#[test]
fn a_tenant_ends_alone_and_all_end_with_the_parent() {
    let (parent, listener, address) = served(hasty("null").token(token("landlord")));
    let (a, b) = (parent.tenant("a", token("a")).unwrap(), parent.tenant("b", token("b")).unwrap());
    let client = |name: &str| hasty("null").token(token(name)).open().unwrap();
    let (of_a, of_b, of_parent) = (client("a"), client("b"), client("landlord"));
    let (to_a, from_a) = gets_through(&of_a, &listener);
    let (to_b, from_b) = gets_through(&of_b, &listener);
    let (to_parent, _) = gets_through(&of_parent, &listener);
    drop(a);
    assert_eq!(wait(to_a.closed()).kind(), ErrorKind::Closed);
    assert_eq!(wait(from_a.closed()).kind(), ErrorKind::Closed);
    assert_eq!(wait(of_a.connect(&address)).err().unwrap().kind(), ErrorKind::Permission);
    // Longer than the peer timeout: the other peers are still served.
    std::thread::sleep(2 * peer_timeout());
    assert!(to_b.is_alive() && from_b.is_alive() && to_parent.is_alive());
    drop(parent);
    for peer in [to_b, from_b, to_parent] {
        assert_eq!(wait(peer.closed()).kind(), ErrorKind::Closed);
    }
    assert_eq!(b.alloc(4096, Access::LOCAL).err().unwrap().kind(), ErrorKind::Closed);
    assert_eq!(wait(b.connect(&address)).err().unwrap().kind(), ErrorKind::Closed);
}

#[test]
fn a_tenant_connects_by_its_own_token() {
    let (parent, ..) = landlord();
    let a = parent.tenant("a", token("a")).unwrap();
    let (_elsewhere, listener, address) = served(builder("null").token(token("a")));
    let (there, here) = gets_through(&a, &listener);
    assert_eq!((there.tenant(), here.tenant()), ("a", ""));
    assert_eq!(wait(parent.connect(&address)).err().unwrap().kind(), ErrorKind::Permission);
    a.close();
    assert_eq!(wait(here.closed()).kind(), ErrorKind::Closed);
}

#[test]
fn a_tenant_that_goes_while_a_peer_is_coming_ends_at_once() {
    let patient = builder("null").token(token("landlord")).handshake_limit(Duration::from_secs(600));
    let (parent, listener, address) = served(patient);
    let a = parent.tenant("a", token("a")).unwrap();
    let of_a = client("a");
    let (to_a, from_a) = gets_through(&of_a, &listener);
    // The peer stalls before its report, and would stall for ten minutes.
    let mut stalled = Raw::connect(&address);
    stalled.prove(&token("a"));
    assert!(matches!(stalled.recv(), Some(Frame::Proof { .. })));
    stalled.offers();
    drop(a);
    assert_eq!(wait(to_a.closed()).kind(), ErrorKind::Closed);
    assert_eq!(wait(from_a.closed()).kind(), ErrorKind::Closed);
    assert_eq!(stalled.recv(), Some(Frame::Goodbye));
    assert_eq!(stalled.recv(), None);
    gets_through(&client("landlord"), &listener);
}

#[test]
fn peers_of_one_tenant_that_stall_keep_no_others_out() {
    let patient = builder("null").token(token("landlord")).handshake_limit(Duration::from_secs(600));
    let (parent, listener, address) = served(patient);
    let _a = parent.tenant("a", token("a")).unwrap();
    let _b = parent.tenant("b", token("b")).unwrap();
    let stalled: Vec<_> = (0..HANDSHAKES + 16)
        .map(|number| {
            let mut raw = Raw::connect(&address);
            raw.prove(&token("a"));
            // Handshakes that have a permit are answered; the others wait for one.
            assert!(number >= HANDSHAKES || matches!(raw.recv(), Some(Frame::Proof { .. })));
            raw
        })
        .collect();
    let others = [client("b"), client("landlord")];
    for other in &others {
        gets_through(other, &listener);
    }
    drop(stalled);
    gets_through(&client("a"), &listener);
}
