//! Kubernetes' API, asked over HTTP and over TLS.

#[path = "../../../transport-core/src/tests/control/certificates.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod certificates;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use certificates::Authority;
use multirail::{ErrorKind, wait};
use multirail_discovery::{Directory, Event, KubernetesStore, Member, StoreDirectory, Watch, open};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

const LIMIT: Duration = limit::HANG;
const PATH: &str = "/apis/discovery.k8s.io/v1/namespaces/fleet/endpointslices?labelSelector=kubernetes.io%2F\
                    service-name%3Dmultirail";

/// What the API server knows.
#[derive(Default)]
struct State {
    /// The items of the list.
    items: String,
    /// The number of changes.
    changes: u64,
    is_down: bool,
    /// The token that requests must have.
    token: Option<String>,
}

#[derive(Default)]
struct Server {
    state: Mutex<State>,
    changed: Condvar,
}

impl Server {
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock().unwrap();
        change(&mut state);
        state.changes += 1;
        self.changed.notify_all();
    }

    /// Answers one request.
    fn answer(&self, stream: impl Read + Write) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream);
        let (mut head, mut line) = (String::new(), String::new());
        while reader.read_line(&mut line)? > 2 {
            head.push_str(&std::mem::take(&mut line));
        }
        let out = reader.get_mut();
        let mut state = self.state.lock().unwrap();
        let path = head.split(' ').nth(1).unwrap_or_default();
        let is_allowed = state.token.as_ref().is_none_or(|token| {
            head.lines().any(|line| line.to_lowercase() == format!("authorization: bearer {token}"))
        });
        let status = match path {
            _ if state.is_down => return Ok(()),
            _ if !is_allowed => "401 Unauthorized",
            path if path == PATH || path.starts_with(&format!("{PATH}&watch=1")) => "200 OK",
            _ => "404 Not Found",
        };
        if status != "200 OK" || path == PATH {
            let body = format!(
                r#"{{"kind":"EndpointSliceList","apiVersion":"discovery.k8s.io/v1","metadata":{{"resourceVersion":"7"}},"items":[{}]}}"#,
                state.items
            );
            let len = body.len();
            write!(
                out,
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len}\r\n\r\n{body}"
            )?;
            return out.flush();
        }
        write!(
            out,
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )?;
        out.flush()?;
        let mut told = state.changes;
        while !state.is_down {
            if state.changes > told {
                told = state.changes;
                let line = "{\"type\":\"MODIFIED\",\"object\":{\"kind\":\"EndpointSlice\"}}\n";
                // In two chunks: a line may end in another than it begins in.
                let (begin, end) = line.split_at(20);
                write!(out, "{:x}\r\n{begin}\r\n{:x}\r\n{end}\r\n", begin.len(), end.len())?;
                out.flush()?;
            }
            state = self.changed.wait_timeout(state, Duration::from_millis(100)).unwrap().0;
        }
        Ok(())
    }
}

/// Starts a server, with TLS if there is a configuration.
fn serve(server: &Arc<Server>, tls: Option<Arc<ServerConfig>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, server) = (listener.local_addr().unwrap(), Arc::clone(server));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, server, tls): (TcpStream, _, _) =
                (stream.unwrap(), Arc::clone(&server), tls.clone());
            std::thread::spawn(move || match tls {
                None => server.answer(stream),
                Some(config) => {
                    server.answer(StreamOwned::new(ServerConnection::new(config).unwrap(), stream))
                }
            });
        }
    });
    address
}

/// A slice with one port, as Kubernetes writes it.
fn slice(family: &str, endpoints: &[String]) -> String {
    format!(
        r#"{{"metadata":{{"name":"multirail-{family}","labels":{{"kubernetes.io/service-name":"multirail"}}}},
        "addressType":"{family}","ports":[{{"name":"multirail","port":7411,"protocol":"TCP"}}],"endpoints":[{}]}}"#,
        endpoints.join(",")
    )
}

fn endpoint(pod: &str, uid: &str, address: &str, ready: &str) -> String {
    format!(
        r#"{{"addresses":["{address}"],"conditions":{{"ready":{ready},"serving":true,"terminating":false}},
        "nodeName":"node-1","targetRef":{{"kind":"Pod","namespace":"fleet","name":"{pod}","uid":"{uid}"}},"zone":"z"}}"#
    )
}

fn now<T>(future: impl Future<Output = T>) -> T {
    wait(future, LIMIT).expect("an answer")
}

fn told(watch: &mut Watch) -> String {
    match now(watch.next()) {
        Event::Joined(member) => format!("+{}", member.name),
        Event::Left(member) => format!("-{}", member.name),
        Event::Changed { member, .. } => member.name,
        Event::Outage(_) => "outage".to_owned(),
        other => format!("{other:?}").to_lowercase(),
    }
}

#[test]
fn pods_are_listed_and_watched() {
    let server = Arc::<Server>::default();
    let address = serve(&server, None);
    let directory = open(&format!("k8s://fleet/multirail?api=http://{address}")).unwrap();
    assert!(now(directory.members()).unwrap().is_empty());
    let mut watch = directory.watch();
    assert_eq!(told(&mut watch), "synced");
    let first = endpoint("multirail-0", "u0", "10.0.0.7", "true");
    let v6 = slice("IPv6", &[endpoint("multirail-0", "u0", "fd00::7", "true")]);
    let v4 = |others: &[String]| slice("IPv4", &[std::slice::from_ref(&first), others].concat());
    server.change(|state| {
        let starting = endpoint("multirail-1", "u1", "10.0.0.8", "false");
        state.items = [v4(&[starting]), v6.clone()].join(",");
    });
    assert_eq!(told(&mut watch), "+multirail-0");
    let pod = Member::new("multirail-0", 0).address("10.0.0.7:7411").address("[fd00::7]:7411");
    let pod = pod.attribute("uid", "u0").attribute("node", "node-1").attribute("zone", "z");
    assert_eq!(now(directory.members()).unwrap(), [pod]);
    server.change(|state| state.items = v4(&[endpoint("multirail-1", "u1", "10.0.0.8", "true")]));
    assert_eq!([told(&mut watch), told(&mut watch)], ["multirail-0", "+multirail-1"]);
    // Another Pod of the same name, as a StatefulSet starts it.
    server.change(|state| state.items = v4(&[endpoint("multirail-1", "u2", "10.0.0.8", "null")]));
    assert_eq!(told(&mut watch), "multirail-1");
    // While the server is away nothing changes.
    server.change(|state| state.is_down = true);
    assert_eq!(told(&mut watch), "outage");
    server.change(|state| {
        state.is_down = false;
        state.items = v4(&[]);
    });
    assert_eq!([told(&mut watch), told(&mut watch)], ["-multirail-1", "synced"]);
    // An answer that is none.
    server.change(|state| state.items = "7".to_owned());
    assert_eq!(told(&mut watch), "outage");
    assert_eq!(now(directory.members()).unwrap_err().kind(), ErrorKind::Protocol);
}

#[test]
fn a_pod_uses_its_service_account_over_tls() {
    let (authority, other) = (Authority::new("cluster"), Authority::new("other"));
    let certified = authority.certify(&["127.0.0.1"]);
    let provider = Arc::new(rustls_graviola::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let chain = vec![CertificateDer::from_pem_slice(certified.certificate.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(certified.key.as_bytes()).unwrap();
    let config = config.with_no_client_auth().with_single_cert(chain, key).unwrap();
    let server = Arc::<Server>::default();
    server.change(|state| {
        state.token = Some("secret".to_owned());
        state.items = slice("IPv4", &[endpoint("a", "u", "10.0.0.7", "true")]);
    });
    let address = serve(&server, Some(Arc::new(config)));
    let account = tempfile::tempdir().unwrap();
    let put = |file: &str, text: &str| std::fs::write(account.path().join(file), text).unwrap();
    put("ca.crt", &authority.root);
    put("token", "secret\n");
    let at = |place: &str| {
        StoreDirectory::new(KubernetesStore::at(place, &address.to_string(), account.path()).unwrap())
            .unwrap()
    };
    assert_eq!(now(at("fleet/multirail").members()).unwrap()[0].addresses, ["10.0.0.7:7411"]);
    let mut watch = at("fleet/multirail:multirail").watch();
    assert_eq!([told(&mut watch), told(&mut watch)], ["+a", "synced"]);
    // A port that the slices do not have; another Service.
    assert!(now(at("fleet/multirail:http").members()).unwrap().is_empty());
    assert_eq!(now(at("fleet/other").members()).unwrap_err().kind(), ErrorKind::NotFound);
    // The token is read anew for each request.
    put("token", "wrong");
    assert_eq!(now(at("fleet/multirail").members()).unwrap_err().kind(), ErrorKind::Permission);
    put("ca.crt", &other.root);
    assert_eq!(now(at("fleet/multirail").members()).unwrap_err().kind(), ErrorKind::Unreachable);
}

#[test]
fn places_are_read() {
    for bad in [
        "fleet",
        "fleet/",
        "/x",
        "Fleet/x",
        "a/b/c",
        "a/b?x=1",
        "a/b?api=https://h:1",
        "a/b?api=http://h",
        "a/b%2f",
    ] {
        let refused = open(&format!("k8s://{bad}")).err().expect(bad).kind();
        assert_eq!(refused, ErrorKind::InvalidRequest, "{bad}");
    }
    // Outside of a Pod, a good name is not enough.
    assert_eq!(open("k8s://a/b").err().unwrap().kind(), ErrorKind::Unsupported);
    assert_eq!(open("k8s://a/b?api=http://127.0.0.1:8001/").unwrap().url(), "k8s://a/b");
}
