//! The objects of a card run out, and closed connections return them. `ci/rdma-vm/suite` runs the tests, as root, on
//! the soft-RoCE devices `rxe0` and `rxe1`.
#![cfg(target_os = "linux")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use multirail_spi::{
    Access, Backend, Completions, DeviceInfo, DomainSetup, EndpointConfig, Error, ErrorKind, Event,
    SystemClock,
};
use multirail_verbs::{Verbs, VerbsConfig};
use pollster::block_on;
use transport_core::{Fabric, FabricBuilder, Listener, Region, TransportConfig};

/// Queue pairs for writes and reads per peer.
const PAIRS: u8 = 2;
/// The limit of every wait.
const LIMIT: Duration = limit::HANG;
/// How many peers come and go, unless `MULTIRAIL_VISITS` has another number.
const CONNECTIONS: usize = 1000;

/// A fabric on one device, with a region and a listener.
struct TestFabric {
    region: Region,
    listener: Listener,
    fabric: Fabric,
}

/// `rxe0` and `rxe1`.
fn devices() -> [DeviceInfo; 2] {
    let devices = Verbs::new().probe().expect("soft-RoCE devices exist");
    devices.try_into().expect("two devices")
}

impl TestFabric {
    fn open(device: &DeviceInfo, pairs: u8) -> Result<Self, Error> {
        let verbs = Arc::new(Verbs::with(VerbsConfig::default().queue_pairs(pairs)));
        let transport = TransportConfig::new("verbs", verbs).devices(vec![device.clone()]);
        let fabric = FabricBuilder::new().transport(transport).open()?;
        let region = fabric.alloc(4096, Access::all())?;
        fabric.publish("region", &region)?;
        Ok(Self { region, listener: block_on(fabric.listen("127.0.0.1:0"))?, fabric })
    }

    /// Connects to `other`, writes through each queue pair, calls `then`, and disconnects.
    fn visit(&self, other: &Self, then: impl FnOnce()) -> Result<(), Error> {
        let address = other.listener.local_addr().to_string();
        let peer = block_on(self.fabric.connect(&address))?;
        let theirs = block_on(other.listener.accept())?;
        let remote = block_on(peer.region("region"))?;
        for _ in 0..8 {
            peer.write(&self.region, 0..4096, &remote, 0)?.wait(LIMIT)?;
        }
        then();
        peer.disconnect();
        block_on(theirs.closed());
        Ok(())
    }
}

/// The control group of this process. It limits the number of RDMA objects.
struct RdmaCgroup(PathBuf);

impl RdmaCgroup {
    fn join() -> Self {
        let root = Path::new("/sys/fs/cgroup");
        let group = root.join("multirail");
        fs::write(root.join("cgroup.subtree_control"), "+rdma").expect("the kernel limits RDMA devices");
        fs::create_dir_all(&group).expect("a control group");
        fs::write(group.join("cgroup.procs"), "0").expect("a process to move");
        Self(group)
    }

    /// Allows this many objects of `device`: protection domains, queues, queue pairs and registrations.
    fn allow(&self, device: &str, objects: &str) {
        let limit = format!("{device} hca_object={objects}");
        fs::write(self.0.join("rdma.max"), limit).expect("a limit of objects");
    }

    /// The present objects.
    fn current(&self) -> String {
        fs::read_to_string(self.0.join("rdma.current")).expect("counts of objects")
    }
}

/// The objects of each device in the kernel (`rdma resource`).
fn resources() -> String {
    let output = Command::new("rdma").arg("resource").output().expect("iproute2 is there");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Waits until `now` returns `want`: the objects of a peer that has left are destroyed when its last request has ended.
fn settles(want: &str, now: impl Fn() -> String) {
    let end = Instant::now() + LIMIT;
    while now() != want {
        assert!(Instant::now() < end, "now:\n{}\nbefore:\n{want}", now());
        // The kernel sends no event.
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn what_runs_out_is_told_and_nothing_leaks() {
    let (group, [near, far]) = (RdmaCgroup::join(), devices());
    for (limited, other, visits) in [(&near, &far, true), (&far, &near, false)] {
        let name = &limited.name;
        let mut refused = BTreeSet::new();
        // Allows one more object each time, until there are enough.
        let enough = (0..100).find(|objects| {
            let before = group.current();
            let other = TestFabric::open(other, PAIRS).expect("the other device has no limit");
            let with_other = group.current();
            group.allow(name, &objects.to_string());
            let result = TestFabric::open(limited, PAIRS).and_then(|side| match visits {
                true => side.visit(&other, || ()),
                false => other.visit(&side, || ()),
            });
            group.allow(name, "max");
            if let Err(why) = &result {
                // The side that has no more objects fails with `Exhausted`; its peer gets the reason in words.
                let is_told = why.kind() == ErrorKind::Exhausted || !visits && why.operation() == "control";
                assert!(is_told && why.context().contains("rdma.max"), "{name}, {objects} objects: {why}");
                refused.insert(why.operation());
            }
            settles(&with_other, || group.current());
            drop(other);
            settles(&before, || group.current());
            result.is_ok()
        });
        // A protection domain, a completion queue, two shared receive queues, buffers and a region; and six or three
        // queue pairs.
        assert!(enough.is_some_and(|objects| objects >= 9), "{name}: {enough:?} objects are enough");
        let meets = if visits { "connect" } else { "control" };
        assert_eq!(refused, BTreeSet::from([meets, "open", "register"]), "{name}");
    }
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn many_connections_leave_nothing() {
    let visits = std::env::var("MULTIRAIL_VISITS").ok().map(|text| text.parse().expect("a whole number"));
    let ([near, far], before) = (devices(), resources());
    let (near, far) = (TestFabric::open(&near, PAIRS).unwrap(), TestFabric::open(&far, PAIRS).unwrap());
    near.visit(&far, || ()).unwrap();
    let opened = resources();
    for _ in 0..visits.unwrap_or(CONNECTIONS) {
        near.visit(&far, || ()).unwrap();
    }
    settles(&opened, resources);
    drop((near, far));
    settles(&before, resources);
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn the_lesser_number_of_queue_pairs_is_used() {
    let [near, far] = devices();
    let (few, many) = (TestFabric::open(&near, 1).unwrap(), TestFabric::open(&far, 5).unwrap());
    // The objects of a connection on each device, including one queue pair for messages.
    let connected = || {
        let of = |device: &DeviceInfo| {
            let output = Command::new("rdma").args(["resource", "show", "qp", "link", &device.name]).output();
            let all = String::from_utf8(output.expect("iproute2 is there").stdout).expect("words");
            all.lines().filter(|line| line.contains("type RC")).count()
        };
        assert_eq!([of(&near), of(&far)], [2, 2]);
    };
    few.visit(&many, connected).unwrap();
    many.visit(&few, connected).unwrap();
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn a_slot_is_offered_anew_once_its_end_was_heard() {
    let [device, _] = devices();
    let setup =
        DomainSetup { clock: Arc::new(SystemClock::default()), seed: 1, incarnation: 1, worker_sleeps: true };
    let domain = Verbs::new().open(&device, &setup).expect("a domain");
    let mut endpoint = domain.endpoint(EndpointConfig::default()).expect("its endpoint");
    let offers = || domain.connector().prepare().expect("a slot").0;
    let (slot, end) = (offers(), Instant::now() + LIMIT);
    domain.connector().disconnect(slot);
    let mut told = Completions::with_room(1);
    while told.as_slice() != [Event::PeerGone { peer: slot }] {
        assert!(Instant::now() < end, "no end");
        endpoint.poll(&mut told);
    }
    assert_ne!(offers(), slot, "a late event of the earlier peer would end it");
    endpoint.poll(&mut told);
    assert_eq!(offers(), slot);
}
