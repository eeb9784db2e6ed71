//! Groups that follow a directory: their members, epochs and barriers. All fabrics are in this process, and connect
//! over TCP.

use std::sync::Arc;
use std::time::Duration;

use backend_loopback::Loopback;
use multirail::{Access, ErrorKind, Fabric, FabricBuilder, TransportConfig, WriteOptions, wait};
use multirail_discovery::{
    Directory, ElasticGroup, ElasticOptions, FolderStore, Member, Membership, StoreDirectory, open,
};

const LIMIT: Duration = limit::HANG;
/// Long enough for a busy machine: no test waits for its end.
const LEASE: Duration = Duration::from_secs(10);
const LEN: usize = 4096;

fn now<T>(future: impl Future<Output = T>) -> T {
    wait(future, LIMIT).expect("an answer")
}

fn fabric() -> Fabric {
    let loopback = TransportConfig::new("loopback", Arc::new(Loopback::new()));
    FabricBuilder::new().transport(loopback).open().unwrap()
}

/// A member of a mesh.
struct Node {
    fabric: Fabric,
    group: Arc<ElasticGroup>,
    membership: Membership,
}

impl Node {
    fn start(directory: &dyn Directory, name: &str) -> Self {
        let fabric = fabric();
        fabric.publish("page", &fabric.alloc(LEN, Access::all()).unwrap()).unwrap();
        let listener = now(fabric.listen("127.0.0.1:0")).unwrap();
        let member = Member::new(name, fabric.incarnation()).address(listener.local_addr());
        let options = ElasticOptions::new().listener(listener);
        let group = Arc::new(ElasticGroup::follow(&fabric, directory, options).unwrap());
        let membership = now(directory.join(member, LEASE)).unwrap();
        Self { fabric, group, membership }
    }

    /// Waits until this node is connected to `count` others.
    fn await_members(&self, count: usize) {
        now(self.group.wait_for(|epoch| epoch.members().len() == count));
    }
}

/// Lets all nodes reach the barrier of their present epochs.
fn barrier(nodes: &[Node], round: u64) -> Vec<multirail::Result<()>> {
    let reach = |node: &Node| {
        let group = Arc::clone(&node.group);
        std::thread::spawn(move || {
            let epoch = group.epoch();
            now(group.barrier(&epoch, round, LIMIT))
        })
    };
    let threads: Vec<_> = nodes.iter().map(reach).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn a_mesh_has_one_epoch_and_its_barriers() {
    let folder = tempfile::tempdir().unwrap();
    let directory = StoreDirectory::new(FolderStore::new(folder.path())).unwrap();
    let mut nodes: Vec<_> = (0..4).map(|number| Node::start(&directory, &format!("n{number}"))).collect();
    nodes.iter().for_each(|node| node.await_members(3));
    let ids: Vec<_> = nodes.iter().map(|node| node.group.epoch().id()).collect();
    assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    for round in 0..3 {
        barrier(&nodes, round).into_iter().for_each(|reached| reached.unwrap());
    }
    // One connection between each two.
    for node in &nodes {
        assert_eq!(node.fabric.dump().peers.len(), 3);
    }

    // A barrier that one member never reaches ends when the member is gone.
    let (group, epoch) = (Arc::clone(&nodes[0].group), nodes[0].group.epoch());
    let waiting = std::thread::spawn(move || now(group.barrier(&epoch, 3, LIMIT)));
    let Node { fabric, membership, .. } = nodes.pop().unwrap();
    now(membership.leave()).unwrap();
    fabric.close();
    let error = waiting.join().unwrap().unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::Closed | ErrorKind::PeerDied),
        "{error}"
    );

    nodes.iter().for_each(|node| node.await_members(2));
    barrier(&nodes, 3).into_iter().for_each(|reached| reached.unwrap());
    nodes.push(Node::start(&directory, "n3"));
    nodes.iter().for_each(|node| node.await_members(3));
    barrier(&nodes, 4).into_iter().for_each(|reached| reached.unwrap());
    assert_ne!(nodes[0].group.epoch().id(), ids[0]);
}

/// A lost connection of a mesh is made again, and all members come back to the same epoch.
#[test]
fn a_mesh_makes_a_lost_connection_again() {
    let folder = tempfile::tempdir().unwrap();
    let directory = StoreDirectory::new(FolderStore::new(folder.path())).unwrap();
    let nodes: Vec<_> = (0..3).map(|number| Node::start(&directory, &format!("n{number}"))).collect();
    nodes.iter().for_each(|node| node.await_members(2));
    let id = nodes[0].group.epoch().id();
    for round in 0..4 {
        let ends = [&nodes[round % 3], &nodes[(round + 1) % 3]];
        let numbers = ends.map(|end| end.group.epoch().number());
        let name = format!("n{}", (round + 1) % 3);
        ends[0].group.epoch().member(&name).unwrap().peer().disconnect();
        for (end, number) in ends.iter().zip(numbers) {
            now(end.group.wait_for(|epoch| epoch.number() > number));
        }
        for node in &nodes {
            now(node.group.wait_for(|epoch| epoch.id() == id));
        }
        barrier(&nodes, round as u64).into_iter().for_each(|reached| reached.unwrap());
    }
}

#[test]
fn a_barrier_of_a_former_epoch_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let directory = StoreDirectory::new(FolderStore::new(folder.path())).unwrap();
    let first = Node::start(&directory, "a");
    let alone = first.group.epoch();
    assert_eq!((alone.number(), alone.members().len()), (0, 0));
    now(first.group.barrier(&alone, 0, LIMIT)).unwrap();
    let second = Node::start(&directory, "b");
    first.await_members(1);
    assert!(first.group.epoch().number() > alone.number());
    assert_eq!(now(first.group.barrier(&alone, 0, LIMIT)).unwrap_err().kind(), ErrorKind::Cancelled);
    let late = now(first.group.barrier(&first.group.epoch(), 0, Duration::from_millis(50))).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::DeadlineExceeded);
    // The arrival that was given up counts for its own round alone.
    second.await_members(1);
    let epoch = second.group.epoch();
    now(second.group.barrier(&epoch, 0, LIMIT)).unwrap();
    let again = now(first.group.barrier(&first.group.epoch(), 1, Duration::from_millis(50))).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::DeadlineExceeded);
    let other = now(second.group.barrier(&epoch, 2, Duration::from_millis(500))).unwrap_err();
    assert_eq!(other.kind(), ErrorKind::DeadlineExceeded);

    let trainer = fabric();
    let star = ElasticGroup::follow(&trainer, &directory, ElasticOptions::new()).unwrap();
    let epoch = now(star.wait_for(|epoch| epoch.members().len() == 2));
    assert_eq!(now(star.barrier(&epoch, 0, LIMIT)).unwrap_err().kind(), ErrorKind::InvalidRequest);
}

/// A member that the directory does not list any more leaves the group, and its connection stays. When it is listed
/// again, the group takes the connection back.
#[test]
fn a_lost_lease_breaks_no_connection() {
    let folder = tempfile::tempdir().unwrap();
    let directory = StoreDirectory::new(FolderStore::new(folder.path())).unwrap();
    let worker = fabric();
    worker.publish("page", &worker.alloc(LEN, Access::all()).unwrap()).unwrap();
    let listener = now(worker.listen("127.0.0.1:0")).unwrap();
    let member = Member::new("worker", worker.incarnation()).address(listener.local_addr());
    let membership = now(directory.join(member.clone(), LEASE)).unwrap();
    let trainer = fabric();
    let group = ElasticGroup::follow(&trainer, &directory, ElasticOptions::new()).unwrap();
    let epoch = now(group.wait_for(|epoch| epoch.members().len() == 1));
    let (worker, connected) = (&epoch.members()[0], epoch.number());
    now(membership.leave()).unwrap();
    now(group.wait_for(|epoch| epoch.members().is_empty()));
    assert!(worker.peer().is_alive());
    let src = trainer.alloc(LEN, Access::LOCAL).unwrap();
    let page = now(worker.region("page")).unwrap();
    worker.peer().write(&src, 0..LEN, &page, 0).unwrap().wait(LIMIT).unwrap();

    let _membership = now(directory.join(member, LEASE)).unwrap();
    let again = now(group.wait_for(|epoch| epoch.members().len() == 1));
    assert_eq!(again.members()[0].peer().id(), worker.peer().id());
    assert_eq!((again.number(), again.id()), (connected + 2, epoch.id()));
    assert!(again.member("worker").is_some() && again.member("other").is_none());
    let written = now(group.write_all(&src, 0..LEN, "page", 0, &WriteOptions::new()));
    assert_eq!(written[0].1.as_ref().unwrap().bytes, LEN as u64);
}

/// What `wait_for` calls may ask the group while its members change.
#[test]
fn a_group_is_asked_while_it_waits() {
    let folder = tempfile::tempdir().unwrap();
    let directory = StoreDirectory::new(FolderStore::new(folder.path())).unwrap();
    let trainer = fabric();
    let group = ElasticGroup::follow(&trainer, &directory, ElasticOptions::new()).unwrap();
    let worker = fabric();
    let listener = now(worker.listen("127.0.0.1:0")).unwrap();
    let member = Member::new("worker", worker.incarnation()).address(listener.local_addr());
    let mut membership = None;
    now(group.wait_for(|_| {
        if membership.is_none() {
            membership = Some(now(directory.join(member.clone(), LEASE)).unwrap());
            // The members change meanwhile.
            std::thread::sleep(Duration::from_secs(1));
        }
        group.connected() == 1
    }));
}

/// A list without incarnations names this fabric, too: the group finds out when it connects. The entry of a process
/// that ends at once is removed before its last handle is dropped.
#[test]
fn a_static_list_and_the_end_of_a_program() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (fabric(), fabric());
    let listeners = [&one, &other].map(|fabric| now(fabric.listen("127.0.0.1:0")).unwrap());
    let [first, second] = listeners.each_ref().map(multirail::Listener::local_addr);
    let list = folder.path().join("fleet.json");
    let json = format!(
        r#"{{"members": [{{"name": "self", "addresses": ["{first}"]}}, {{"name": "other", "addresses": ["{second}"]}}]}}"#
    );
    std::fs::write(&list, &json).unwrap();
    let directory = open(&format!("file://{}", list.display())).unwrap();
    let group = ElasticGroup::follow(&one, &*directory, ElasticOptions::new()).unwrap();
    let [ours, theirs] = listeners;
    let accepting = std::thread::spawn(move || (now(ours.accept()), now(theirs.accept())));
    let epoch = now(group.wait_for(|epoch| epoch.member("other").is_some()));
    drop(accepting.join().unwrap());
    assert!(epoch.member("self").is_none());
    // What the list names no more, and then again, has the connection that it had.
    let peer = epoch.member("other").unwrap().peer().id();
    std::fs::write(&list, r#"{"members": []}"#).unwrap();
    now(group.wait_for(|epoch| epoch.members().is_empty()));
    std::fs::write(&list, json).unwrap();
    let epoch = now(group.wait_for(|epoch| epoch.member("other").is_some()));
    assert_eq!(epoch.member("other").unwrap().peer().id(), peer);
    drop((group, directory));

    let fleet = folder.path().join("fleet");
    let directory = open(&format!("file://{}", fleet.display())).unwrap();
    let group = ElasticGroup::follow(&one, &*directory, ElasticOptions::new()).unwrap();
    let membership = now(directory.join(Member::new("a", 1).address(second), LEASE)).unwrap();
    assert!(fleet.join("a.member").exists());
    drop((group, directory, membership));
    // Other tests of this process may use the thread, too.
    let is_gone = || (!fleet.join("a.member").exists()).then_some(());
    limit::Limit::of(LIMIT).ask(is_gone).expect("the entry is removed");
}

/// A group follows only the members that its filter wants, and connects again to one whose connection is lost.
#[test]
fn members_are_chosen_and_connected_again() {
    let folder = tempfile::tempdir().unwrap();
    let directory = StoreDirectory::new(FolderStore::new(folder.path())).unwrap();
    let worker = fabric();
    let listener = now(worker.listen("127.0.0.1:0")).unwrap();
    let join = |name: &str, role: &str| {
        let member =
            Member::new(name, worker.incarnation()).address(listener.local_addr()).attribute("role", role);
        now(directory.join(member, LEASE)).unwrap()
    };
    let _memberships = [join("a", "decode"), join("b", "prefill")];
    let trainer = fabric();
    let decoders = ElasticOptions::new().only(|member| member.attributes["role"] == "decode");
    let group = ElasticGroup::follow(&trainer, &directory, decoders).unwrap();
    let epoch = now(group.wait_for(|epoch| epoch.members().len() == 1));
    assert_eq!(epoch.members()[0].name(), "a");
    let lost = epoch.members()[0].peer().clone();
    lost.disconnect();
    let is_new = |epoch: &multirail_discovery::Epoch| {
        epoch.members().first().is_some_and(|member| member.peer().id() != lost.id())
    };
    now(group.wait_for(is_new));
    // Each member's operation ends.
    let ended = now(group.submit_all(|member| member.peer().warm_up()));
    assert!(ended.len() == 1 && ended[0].1.is_ok());
    drop(group);
    trainer.close();
}
