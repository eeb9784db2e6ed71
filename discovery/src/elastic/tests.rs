//! Slots and their tasks, without a directory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use backend_loopback::Loopback;
use multirail::{
    Acceptor, Bootstrap, Channel, Error, ErrorKind, Fabric, FabricBuilder, Peer, Result, TcpBootstrap,
    TransportConfig,
};
use tokio::runtime::Builder;
use tokio::time::timeout;

use super::{Epoch, GroupState, LinkTask, SlotId};
use crate::Member;

fn builder() -> FabricBuilder {
    FabricBuilder::new().transport(TransportConfig::new("loopback", Arc::new(Loopback::new())))
}

/// A fabric with the state of a group, and another with which it has connections.
struct Pair {
    state: Arc<GroupState>,
    own: Fabric,
    other: Fabric,
}

impl Pair {
    fn new() -> Self {
        let [own, other] = [(); 2].map(|()| builder().open().unwrap());
        Self { state: Arc::new(GroupState::new(&own)), own, other }
    }

    /// A new connection.
    fn peer(&self) -> Peer {
        self.own.connect_local(&self.other).unwrap().0
    }

    /// The other fabric as a member, with its incarnation.
    fn member(&self, name: &str) -> Member {
        Member::new(name, self.other.incarnation()).address("h:1")
    }

    fn connected(&self) -> Vec<Peer> {
        let epoch = self.state.epochs().borrow().clone();
        epoch.members().iter().map(|member| member.peer().clone()).collect()
    }

    fn task(&self, member: &Member, slot: SlotId, connects: bool) -> LinkTask {
        LinkTask { state: Arc::clone(&self.state), member: member.clone(), slot, connects }
    }
}

fn ids(peers: &[Peer]) -> Vec<multirail::PeerId> {
    peers.iter().map(Peer::id).collect()
}

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { timeout(limit::HANG, future).await.expect("an end") })
}

/// The member sees a loss first, and connects again while this side still takes the former connection for alive.
#[test]
fn a_mesh_goes_on_with_the_connection_that_the_member_has_made_again() {
    let pair = Pair::new();
    let member = pair.member("a");
    let (slot, none) = pair.state.insert(&member);
    assert!(none.is_none());
    let (first, second) = (pair.peer(), pair.peer());
    assert_eq!(pair.state.accepted(&first), Some((member.clone(), slot)));
    assert_eq!(pair.state.accepted(&second), None);
    assert_eq!(ids(&pair.connected()), [first.id()]);
    first.disconnect();
    run(async {
        // This side does not connect: the task lives as long as there is a connection.
        let task = pair.task(&member, slot, false);
        let mut task = tokio::spawn(task.run(Some(first)));
        let mut epochs = pair.state.epochs();
        let is_second =
            |epoch: &Arc<Epoch>| epoch.member("a").is_some_and(|member| member.peer().id() == second.id());
        tokio::select! {
            is_connected = epochs.wait_for(is_second) => drop(is_connected.unwrap()),
            ended = &mut task => panic!("the task has ended: {ended:?}"),
        }
        // Without another connection it ends.
        second.disconnect();
        task.await.unwrap();
    });
    assert!(pair.connected().is_empty());
}

/// One fabric with two names in a mesh: each name gets a connection.
#[test]
fn two_names_of_one_fabric_are_both_connected() {
    let pair = Pair::new();
    let slots = ["a", "b"].map(|name| pair.state.insert(&pair.member(name)).0);
    let peers = [pair.peer(), pair.peer()];
    let taken = peers.each_ref().map(|peer| pair.state.accepted(peer).map(|(_, slot)| slot));
    assert_eq!(taken, slots.map(Some));
    assert_eq!(ids(&pair.connected()), ids(&peers));
}

/// A member without an incarnation is listed, not listed, changed, and listed at another address.
#[test]
fn a_member_without_incarnation_gets_its_connection_back() {
    let pair = Pair::new();
    let member = Member::new("a", 0).address("h:1").address("h:2");
    let (slot, _) = pair.state.insert(&member);
    let peer = pair.peer();
    assert!(pair.state.connected("a", slot, &peer));
    for _ in 0..3 {
        pair.state.remove("a");
        assert!(pair.connected().is_empty());
        assert_eq!(pair.state.insert(&member).1.map(|peer| peer.id()), Some(peer.id()));
    }
    let changed = Member::new("a", 0).address("h:2").attribute("role", "x");
    assert_eq!(pair.state.insert(&changed).1.map(|peer| peer.id()), Some(peer.id()));
    assert_eq!(ids(&pair.connected()), [peer.id()]);
    // Another name has nothing of it, nor has the name at another address.
    assert!(pair.state.insert(&Member::new("b", 0).address("h:2")).1.is_none());
    assert!(pair.state.insert(&Member::new("a", 0).address("h:3")).1.is_none());
    assert!(!peer.is_alive());
}

/// Ends the first attempt as a member does that closes its fabric during the handshake.
struct GoodbyeFirst(AtomicU32);

#[async_trait]
impl Bootstrap for GoodbyeFirst {
    async fn listen(&self, address: &str) -> Result<Box<dyn Acceptor>> {
        TcpBootstrap::default().listen(address).await
    }

    async fn connect(&self, address: &str) -> Result<Channel> {
        match self.0.fetch_add(1, Ordering::Relaxed) {
            0 => Err(Error::new(ErrorKind::Closed, "connect", "the peer closed the connection")),
            _ => TcpBootstrap::default().connect(address).await,
        }
    }
}

#[test]
fn a_goodbye_in_the_handshake_does_not_end_the_attempts() {
    let own = builder().bootstrap(Arc::new(GoodbyeFirst(AtomicU32::new(0)))).open().unwrap();
    let other = builder().open().unwrap();
    let state = Arc::new(GroupState::new(&own));
    run(async {
        let listener = other.listen("127.0.0.1:0").await.unwrap();
        let member = Member::new("a", other.incarnation()).address(listener.local_addr());
        let (slot, _) = state.insert(&member);
        let task = LinkTask { state: Arc::clone(&state), member, slot, connects: true };
        let task = tokio::spawn(task.run(None));
        let _theirs = tokio::select! {
            peer = listener.accept() => peer.unwrap(),
            ended = task => panic!("the task has ended: {ended:?}"),
        };
        state.epochs().wait_for(|epoch| epoch.member("a").is_some()).await.unwrap();
    });
    state.close();
}
