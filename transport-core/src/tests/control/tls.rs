//! The control plane over TLS.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use super::certificates::{Authority, Certified};
use super::{builder, fabric, gets_through, listening, served, token, wait};
use crate::control::{Bootstrap, Channel};
use crate::{Access, Error, ErrorKind, Fabric, FabricBuilder, TlsBootstrap};

const HERE: &[&str] = &["127.0.0.1"];

fn tls(of: &Certified, trusted: &Authority) -> TlsBootstrap {
    TlsBootstrap::new(of.certificate.as_bytes(), of.key.as_bytes(), trusted.root.as_bytes()).unwrap()
}

fn secured(bootstrap: TlsBootstrap) -> FabricBuilder {
    builder("null").bootstrap(Arc::new(bootstrap))
}

/// The error of the client's `connect`; afterwards another client connects.
fn refused(server: TlsBootstrap, client: Fabric, good: TlsBootstrap) -> Error {
    let (_server, listener, address) = served(secured(server));
    let error = wait(client.connect(&address)).err().unwrap();
    gets_through(&secured(good).open().unwrap(), &listener);
    error
}

#[test]
fn peers_of_one_authority_meet() {
    let ca = Authority::new("ca");
    let (a, b) = (ca.certify(HERE), ca.certify(HERE));
    let (server, listener, address) = served(secured(tls(&a, &ca)).token(token("all")));
    let region = server.alloc(4096, Access::REMOTE_WRITE).unwrap();
    server.publish("kv", &region).unwrap();
    let client = secured(tls(&b, &ca)).token(token("all")).open().unwrap();
    let (there, here) = gets_through(&client, &listener);
    assert_eq!(wait(there.0.context.session.lookup("kv")).unwrap(), region.descriptor().to_bytes());
    there.disconnect();
    let end = wait(here.closed());
    assert_eq!(end.kind(), ErrorKind::Closed, "{end}");
    // A token works over TLS too.
    let wrong = secured(tls(&b, &ca)).token(token("others")).open().unwrap();
    assert_eq!(wait(wrong.connect(&address)).err().unwrap().kind(), ErrorKind::Permission);
}

#[test]
fn each_kind_of_wrong_certificate_is_told_apart() {
    let (ca, other) = (Authority::new("ca"), Authority::new("other"));
    let good = || tls(&ca.certify(HERE), &ca);
    let client = |bootstrap| secured(bootstrap).open().unwrap();
    let cases: [(&str, TlsBootstrap, Fabric, &str); 7] = [
        (
            "the client trusts another CA",
            good(),
            client(tls(&ca.certify(HERE), &other)),
            "not signed by our roots",
        ),
        (
            "the server trusts another CA",
            good(),
            client(tls(&other.certify(HERE), &ca)),
            "does not accept our certificate",
        ),
        (
            "the client's expired",
            good(),
            client(tls(&ca.certify_expired(HERE), &ca)),
            "our certificate has expired: renew",
        ),
        (
            "none",
            good(),
            client(TlsBootstrap::anonymous(ca.root.as_bytes()).unwrap()),
            "asks for a certificate",
        ),
        (
            "the server's expired",
            tls(&ca.certify_expired(HERE), &ca).server_name("any.example").unwrap(),
            client(good()),
            "the peer's certificate has expired",
        ),
        ("another name", tls(&ca.certify(&["node-7"]), &ca), client(good()), "for another name"),
        ("a name asked for", good(), client(good().server_name("node-7").unwrap()), "for another name"),
    ];
    for (what, server, client, why) in cases {
        // Clients connect afterwards only if the server's certificate is good.
        let (_server, _listener, address) = served(secured(server));
        let error = wait(client.connect(&address)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Permission, "{what}: {error}");
        assert!(error.context().contains(why), "{what}: {error}");
    }
    // A server that is verified by the name in its certificate may have any address.
    let (_server, listener, _) = served(secured(tls(&ca.certify(&["node-7"]), &ca)));
    gets_through(&client(good().server_name("node-7").unwrap()), &listener);
    // If the server allows it, clients need no certificate.
    let (_server, listener, _) = served(secured(good().anonymous_clients()));
    gets_through(&client(TlsBootstrap::anonymous(ca.root.as_bytes()).unwrap()), &listener);
}

#[test]
fn plain_and_tls_do_not_mix_and_say_so() {
    let ca = Authority::new("ca");
    let good = || tls(&ca.certify(HERE), &ca);
    let error = refused(good(), fabric(), good());
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.context().contains("the other side speaks TLS and this side does not"), "{error}");

    let (_server, listener, address) = listening();
    let error = wait(secured(good()).open().unwrap().connect(&address)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.context().contains("the other side does not speak TLS"), "{error}");
    gets_through(&fabric(), &listener);
}

#[test]
fn silent_and_rude_clients_keep_nobody_out() {
    let ca = Authority::new("ca");
    let good = tls(&ca.certify(HERE), &ca);
    let (_server, listener, address) =
        served(secured(good.clone()).handshake_limit(Duration::from_secs(600)));
    let client = secured(good).open().unwrap();
    let crowd: Vec<_> = (0..300)
        .map(|member| {
            let mut stream = TcpStream::connect(&address).unwrap();
            match member % 3 {
                0 => {}
                1 => stream.write_all(&[22, 3, 1, 2, 0, 1]).unwrap(),
                _ => stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap(),
            }
            stream
        })
        .collect();
    gets_through(&client, &listener);
    drop(crowd);
}

/// Forwards frames between two channels until one ends.
async fn forward(a: Channel, b: Channel) {
    let ((mut send_a, mut recv_a), (mut send_b, mut recv_b)) = (a.split(), b.split());
    let there = async {
        while let Ok(frame) = recv_a.recv().await {
            if send_b.send(&frame).await.is_err() {
                break;
            }
        }
    };
    let back = async {
        while let Ok(frame) = recv_b.recv().await {
            if send_a.send(&frame).await.is_err() {
                break;
            }
        }
    };
    tokio::select! { () = there => {} () = back => {} }
}

#[test]
fn a_proof_cannot_be_relayed_by_one_whom_the_authority_knows() {
    let ca = Authority::new("ca");
    let own = || tls(&ca.certify(HERE), &ca);
    let (_server, listener, address) = served(secured(own()).token(token("all")));
    let client = secured(own()).token(token("all")).open().unwrap();
    gets_through(&client, &listener);
    // The proxy has a certificate of the same authority, so both sides speak TLS with it.
    let middle = own();
    let (tell, told) = std::sync::mpsc::channel();
    let relay = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut acceptor = middle.listen("0").await.unwrap();
            tell.send(acceptor.local_address()).unwrap();
            let near = acceptor.accept().await.unwrap().open().await.unwrap();
            let far = middle.connect(&address).await.unwrap();
            assert_ne!(near.binding(), far.binding());
            forward(near, far).await;
        });
    });
    let error = wait(client.connect(&told.recv().unwrap())).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Permission, "{error}");
    relay.join().unwrap();
}

#[test]
fn material_that_is_none_is_refused() {
    let (ca, other) = (Authority::new("ca"), Authority::new("other"));
    let (a, b) = (ca.certify(HERE), other.certify(HERE));
    let made = |certificate: &str, key: &str, root: &str| {
        TlsBootstrap::new(certificate.as_bytes(), key.as_bytes(), root.as_bytes()).err().unwrap()
    };
    for (error, why) in [
        (made("", &a.key, &ca.root), "certificate chain holds no certificate"),
        (made(&a.certificate, "", &ca.root), "private key holds none"),
        (made(&a.certificate, &a.key, "rubbish"), "roots holds no certificate"),
        (made(&a.certificate, &b.key, &ca.root), "do not belong together"),
    ] {
        assert_eq!(error.kind(), ErrorKind::InvalidRequest, "{error}");
        assert!(error.context().contains(why), "{error}");
    }
    let error = TlsBootstrap::from_files("/no/such", "/no/such", "/no/such").err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let anonymous = secured(TlsBootstrap::anonymous(ca.root.as_bytes()).unwrap()).open().unwrap();
    let error = wait(anonymous.listen("0")).err().unwrap();
    assert!(error.context().contains("--tls-cert and --tls-key"), "{error}");
}
