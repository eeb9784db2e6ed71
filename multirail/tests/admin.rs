//! The admin socket of a fabric: devices are taken out of service and back by another program, whatever clients do.
#![cfg(unix)]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use backend_loopback::{Loopback, LoopbackConfig};
use limit::HANG;
use multirail::admin::{AdminRequest, AdminResponse, MAX_LINE, MAX_OPERATIONS, RailState, RailStatus};
use multirail::{
    Access, Dump, ErrorKind, Fabric, FabricBuilder, Peer, Region, RemoteRegion, TransportConfig,
};
use serde_json::Value;

const LEN: usize = 8 << 20;

fn builder() -> FabricBuilder {
    let cards = Loopback::with(LoopbackConfig::default().devices(4).groups(2));
    FabricBuilder::new().transport(TransportConfig::new("cards", Arc::new(cards)))
}

/// A client of the socket.
struct Client(BufReader<UnixStream>);

impl Client {
    fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(HANG)).unwrap();
        Self(BufReader::new(stream))
    }

    fn send(&mut self, line: &[u8]) {
        self.0.get_mut().write_all(line).unwrap();
    }

    fn response(&mut self) -> AdminResponse {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        let response = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
        // The line has all that serde knows.
        assert_eq!(serde_json::to_value(&response).unwrap(), serde_json::from_str::<Value>(&line).unwrap());
        response
    }

    fn ask(&mut self, request: &AdminRequest) -> AdminResponse {
        self.send(request.to_line().as_bytes());
        self.response()
    }

    fn rails(&mut self) -> Vec<RailStatus> {
        match self.ask(&AdminRequest::Rails) {
            AdminResponse::Rails { rails } => rails,
            other => panic!("{other:?}"),
        }
    }

    /// A dump, and the number of operations that it leaves out.
    fn dump(&mut self) -> (Dump, u64) {
        match self.ask(&AdminRequest::Dump) {
            AdminResponse::Dump { omitted_operations, omitted_peers: 0, dump } => (*dump, omitted_operations),
            other => panic!("{other:?}"),
        }
    }

    fn error(&mut self) -> (ErrorKind, String) {
        match self.response() {
            AdminResponse::Error { kind, error } => (kind, error),
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the fabric has closed the connection.
    fn is_let_go(&mut self) -> bool {
        matches!(self.0.read(&mut [0]), Ok(0) | Err(_))
    }
}

/// A fabric with an admin socket, and what it writes to.
struct Served {
    path: PathBuf,
    fabric: Fabric,
    _target: Fabric,
    peer: Peer,
    source: Region,
    target: Region,
    remote: RemoteRegion,
    _folder: tempfile::TempDir,
}

impl Served {
    fn open() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("admin");
        let (fabric, target) = (builder().admin_socket(&path).open().unwrap(), builder().open().unwrap());
        let (peer, _) = fabric.connect_local(&target).unwrap();
        let source = fabric.alloc(LEN, Access::LOCAL).unwrap();
        let memory = target.alloc(LEN, Access::REMOTE_WRITE).unwrap();
        let remote = peer.import(&memory.descriptor()).unwrap();
        Self { path, fabric, _target: target, peer, source, target: memory, remote, _folder: folder }
    }

    /// Writes other bytes than before, and checks that all have arrived.
    fn write(&self) {
        let mut content = vec![0; LEN];
        fastrand::Rng::new().fill(&mut content);
        self.source.copy_in(0, &content).unwrap();
        self.peer.write(&self.source, 0..LEN, &self.remote, 0).unwrap().wait(HANG).unwrap();
        let mut arrived = vec![0; LEN];
        self.target.copy_out(0, &mut arrived).unwrap();
        assert!(arrived == content, "wrong bytes");
    }
}

fn state_of(rails: &[RailStatus], device: &str) -> RailState {
    rails.iter().find(|rail| rail.counters.device == device).expect("the device").state
}

#[test]
fn devices_are_drained_and_restored_under_way() {
    let served = Served::open();
    let mut client = Client::connect(&served.path);
    let rails = client.rails();
    assert_eq!(rails.len(), 4);
    assert!(
        rails.iter().all(|rail| rail.state == RailState::InService && rail.counters.transport == "cards")
    );
    let drain = AdminRequest::Drain { device: "lo1".into() };
    let restore = AdminRequest::Restore { device: "lo1".into() };
    std::thread::scope(|scope| {
        // Dropped at the end of the scope, also by a panic.
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        scope.spawn(|| {
            let stopped = stopped;
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                served.write();
            }
        });
        for _ in 0..20 {
            assert_eq!(client.ask(&drain), AdminResponse::Done);
            assert_eq!(state_of(&client.rails(), "lo1"), RailState::OutOfService);
            assert_eq!(client.ask(&restore), AdminResponse::Done);
        }
        drop(stop);
    });
    assert_eq!(client.ask(&drain), AdminResponse::Done);
    let carried = |rails: &[RailStatus]| {
        rails.iter().find(|rail| rail.counters.device == "lo1").map(|rail| rail.counters.bytes)
    };
    let before = carried(&client.rails());
    served.write();
    assert_eq!(carried(&client.rails()), before);
    client.send(AdminRequest::Drain { device: "lo9".into() }.to_line().as_bytes());
    let (kind, error) = client.error();
    assert!(kind == ErrorKind::InvalidRequest && error.contains("there are lo0, lo1, lo2, lo3"), "{error}");
}

#[test]
fn a_dump_has_the_state_and_a_bounded_number_of_operations() {
    let served = Served::open();
    let mut client = Client::connect(&served.path);
    served.write();
    let (dump, omitted) = client.dump();
    assert_eq!((dump.process, omitted, dump.peers.len()), (std::process::id(), 0, 1));
    let carried: u64 = dump.transports.iter().flat_map(|group| &group.rails).map(|r| r.counters.bytes).sum();
    assert!(dump.transports.len() == 2 && carried == LEN as u64, "{dump}");
    // Receives end only when a message comes.
    let receives: Vec<_> = (0..MAX_OPERATIONS + 3)
        .map(|_| {
            let region = served.fabric.alloc(64, Access::LOCAL).unwrap();
            (served.fabric.recv(&region, 0..64).unwrap(), region)
        })
        .collect();
    // A dump has what the workers have taken so far, and not that of a worker that does not answer in time.
    let waiting = || {
        let (dump, omitted) = client.dump();
        (dump.operations().count() + omitted as usize == receives.len()).then_some((dump, omitted))
    };
    let (dump, omitted) = limit::Limit::of(HANG).ask(waiting).expect("all receives");
    assert!(omitted > 0, "{dump}");
    assert!(dump.operations().all(|operation| !operation.waits.is_empty()), "{dump}");
    assert!(dump.transports.iter().all(|group| group.records.is_empty()), "records");
    served.fabric.close();
    assert!(client.is_let_go());
}

#[test]
fn wrong_and_slow_clients_harm_nobody() {
    let served = Served::open();
    let mut client = Client::connect(&served.path);
    for wrong in ["", "drain lo1", "{\"request\":\"reboot\"}", "\u{0}"] {
        client.send(format!("{wrong}\n").as_bytes());
        assert_eq!(client.error().0, ErrorKind::Protocol, "{wrong:?}");
    }
    // The connection goes on.
    assert_eq!(client.rails().len(), 4);
    // A line without an end is refused as soon as it is too long.
    let mut endless = Client::connect(&served.path);
    endless.send(&vec![b'x'; MAX_LINE + 1]);
    assert!(endless.error().1.contains("more than 4096 bytes"));
    assert!(endless.is_let_go());
    // Clients that say nothing, half a line, or read no answer.
    let mut others: Vec<_> = (0..7).map(|_| Client::connect(&served.path)).collect();
    others[0].send(b"{\"request\":");
    others[1].send(AdminRequest::Rails.to_line().repeat(100).as_bytes());
    served.write();
    assert_eq!(client.rails().len(), 4);
    // A ninth client is one too many.
    let mut ninth = Client::connect(&served.path);
    let (kind, error) = ninth.error();
    assert!(kind == ErrorKind::Busy && error.contains("8 clients"), "{error}");
    assert!(ninth.is_let_go());
    // Two clients of one process at once: each has its answer.
    assert_eq!(others[2].rails().len(), 4);
    drop(others);
    // There is room again, as soon as the fabric has noticed it.
    limit::Limit::of(HANG)
        .ask(|| {
            let mut next = Client::connect(&served.path);
            match next.ask(&AdminRequest::Rails) {
                AdminResponse::Rails { .. } => Some(()),
                _ => None,
            }
        })
        .expect("room for another client");
    served.fabric.close();
    assert!(!served.path.exists());
    assert!(client.is_let_go());
}

#[test]
fn a_socket_belongs_to_one_fabric() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin");
    let open = || builder().admin_socket(&path).open();
    let first = open().unwrap();
    let refused = open().err().expect("a refusal");
    assert!(
        refused.kind() == ErrorKind::Busy && refused.context().contains("a running process"),
        "{refused}"
    );
    // The refused fabric has not removed it.
    assert_eq!(Client::connect(&path).rails().len(), 4);
    drop(first);
    assert!(!path.exists());
    // One that was left behind is replaced.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let second = open().unwrap();
    assert_eq!(Client::connect(&path).rails().len(), 4);
    second.close();
    assert!(!path.exists());
}

#[test]
fn a_caller_driven_fabric_needs_a_runtime() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin");
    let driven = builder().caller_driven().admin_socket(&path);
    let refused = driven.clone().open().err().expect("a refusal");
    assert!(
        refused.kind() == ErrorKind::Unsupported && refused.context().contains("control_on"),
        "{refused}"
    );
    assert!(!path.exists());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let fabric = driven.control_on(runtime.handle().clone()).open().unwrap();
    assert_eq!(Client::connect(&path).rails().len(), 4);
    runtime.block_on(fabric.close_and_wait());
    assert!(!path.exists());
}
