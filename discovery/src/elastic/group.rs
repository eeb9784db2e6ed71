//! The group that a program holds.

use std::future::Future;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use multirail::{Error, ErrorKind, Fabric, Listener, Op, Outcome, Region, Result, WriteOptions};
use tokio::sync::watch;

use super::{ConnectedMember, Epoch, GroupState, LinkTask};
use crate::join_all::{Boxed, join_all};
use crate::runtime::{AbortOnDrop, Runtime};
use crate::{Directory, Event, Member, Watch};

/// Which members a group follows.
type MemberFilter = Box<dyn Fn(&Member) -> bool + Send + Sync>;

/// How a group follows its directory.
#[derive(Default)]
pub struct ElasticOptions {
    listener: Option<Listener>,
    filter: Option<MemberFilter>,
}

impl ElasticOptions {
    /// A group that connects to every member.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets the members form a mesh: each has a group with its listener, and each two have one connection, which the
    /// one with the smaller incarnation makes. Barriers need a mesh. The group takes the peers that connect.
    pub fn listener(mut self, listener: Listener) -> Self {
        self.listener = Some(listener);
        self
    }

    /// Follows only members of which `filter` says so, for example by an attribute.
    pub fn only(mut self, filter: impl Fn(&Member) -> bool + Send + Sync + 'static) -> Self {
        self.filter = Some(Box::new(filter));
        self
    }
}

/// Connected peers that follow a [`Directory`]: members come and go while transfers run. Dropping the group ends its
/// tasks; connections stay.
///
/// - The group connects to each member that the directory lists, except to its own fabric, and again when a connection is
///   lost. A member that was restarted is connected at its new address.
/// - A member that the directory does not list any more leaves the group. Its connection stays, and operations to it go
///   on: the member may be well, and only its lease lost. Its process ends the connection when it ends.
/// - While the directory does not answer, the group stays as it is, and connects again to members at their last known
///   addresses.
/// - Each change of the connected members makes a new [`Epoch`].
///
/// ```no_run
/// # use std::time::Duration;
/// # use multirail::{Fabric, Region, Result, WriteOptions};
/// # use multirail_discovery::{ElasticGroup, ElasticOptions, open};
/// # async fn train(fabric: &Fabric, weights: &Region) -> Result<()> {
/// let directory = open("file:///shared/fleet")?;
/// let decoders = ElasticOptions::new().only(|member| member.attributes.get("role").is_some_and(|role| role == "decode"));
/// let group = ElasticGroup::follow(fabric, &*directory, decoders)?;
/// for version in 0..100 {
///     let options = WriteOptions::new().imm(version);
///     for (member, written) in group.write_all(weights, 0..weights.len(), "weights", 0, &options).await {
///         if let Err(error) = written {
///             println!("{} does not have version {version}: {error}", member.name());
///         }
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct ElasticGroup {
    state: Arc<GroupState>,
    epochs: watch::Receiver<Arc<Epoch>>,
    is_mesh: bool,
    _follow: AbortOnDrop<()>,
    _accept: Option<AbortOnDrop<()>>,
    _runtime: Arc<Runtime>,
}

impl ElasticGroup {
    /// Begins to follow a directory with connections of `fabric`.
    ///
    /// # Errors
    /// `Exhausted` if the thread of the directories does not start.
    pub fn follow(fabric: &Fabric, directory: &dyn Directory, options: ElasticOptions) -> Result<Self> {
        let runtime = Runtime::shared()?;
        let state = Arc::new(GroupState::new(fabric));
        let is_mesh = options.listener.is_some();
        let follower = Follower {
            state: Arc::clone(&state),
            watch: directory.watch().for_task(),
            filter: options.filter,
            is_mesh,
        };
        let accept =
            options.listener.map(|listener| AbortOnDrop(runtime.spawn(accept(Arc::clone(&state), listener))));
        Ok(Self {
            epochs: state.epochs(),
            state,
            is_mesh,
            _follow: AbortOnDrop(runtime.spawn(follower.run())),
            _accept: accept,
            _runtime: runtime,
        })
    }

    /// The connected members at this moment.
    pub fn epoch(&self) -> Arc<Epoch> {
        Arc::clone(&self.epochs.borrow())
    }

    /// Resolves to the first epoch that satisfies `wanted`, which may be the present one.
    pub fn wait_for(
        &self,
        mut wanted: impl FnMut(&Epoch) -> bool + Send,
    ) -> impl Future<Output = Arc<Epoch>> + Send {
        let mut epochs = self.epochs.clone();
        async move {
            loop {
                // Not within the lock of the epochs: `wanted` may ask the group.
                let epoch = Arc::clone(&epochs.borrow_and_update());
                if wanted(&epoch) {
                    return epoch;
                }
                if epochs.changed().await.is_err() {
                    // The group is gone: there will be no other epoch.
                    std::future::pending::<()>().await;
                }
            }
        }
    }

    /// Calls `submit` for each member of the present epoch, then awaits all operations. Every operation ends, by its
    /// deadline at the latest; its result comes with its member. What a member that leaves meanwhile does to its
    /// operation is no other's loss.
    pub async fn submit_all(
        &self,
        mut submit: impl FnMut(&ConnectedMember) -> Result<Op> + Send,
    ) -> Vec<(Arc<ConnectedMember>, Result<Outcome>)> {
        let epoch = self.epoch();
        let operations = epoch.members().iter().map(|member| {
            let op = submit(member);
            let ending: Boxed<'_, _> =
                Box::pin(async move { (Arc::clone(member), async { op?.await }.await) });
            ending
        });
        join_all(operations.collect()).await
    }

    /// Writes a range of `src` to each member of the present epoch: to `offset` bytes into the region that the member
    /// has published as `region`. Returns the result of each member.
    pub async fn write_all(
        &self,
        src: &Region,
        range: Range<usize>,
        region: &str,
        offset: usize,
        options: &WriteOptions,
    ) -> Vec<(Arc<ConnectedMember>, Result<Outcome>)> {
        let epoch = self.epoch();
        let writes = epoch.members().iter().map(|member| {
            let range = range.clone();
            let write = async move {
                let remote = member.region(region).await?;
                member.peer().write_with(src, range, &remote, offset, options)?.await
            };
            let ending: Boxed<'_, _> = Box::pin(async move { (Arc::clone(member), write.await) });
            ending
        });
        join_all(writes.collect()).await
    }

    /// Waits until every member of `epoch` has called this function for the same `round` and an epoch of the same
    /// processes. All members need groups with listeners ([`ElasticOptions::listener`]).
    ///
    /// `round` is the caller's number of the barrier, such as the step of a training: the members keep the arrivals of
    /// a round that this side has given up, and would take them for those of a later one of the same number.
    ///
    /// A member whose epoch changes meanwhile gives up, while another may have passed the barrier just before: no
    /// barrier can exclude that. Repeat the round with the new epoch. It does not order operations: await them first.
    ///
    /// # Errors
    /// `Cancelled` if the connected members change first; `DeadlineExceeded` after `limit`; `InvalidRequest` if the
    /// group has no listener; `Unsupported` if the directory does not know the members' incarnations; those of
    /// [`PeerGroup::barrier`](multirail::PeerGroup::barrier).
    pub async fn barrier(&self, epoch: &Epoch, round: u64, limit: Duration) -> Result<()> {
        if !self.is_mesh {
            let why = "the group has no listener, so that members do not connect to it; set ElasticOptions::listener";
            return Err(Error::new(ErrorKind::InvalidRequest, "barrier", why));
        }
        let over = || {
            let why = format!("the members are others than in epoch {}; repeat the barrier", epoch.number());
            Error::new(ErrorKind::Cancelled, "barrier", why)
        };
        if self.epoch().id() != epoch.id() {
            return Err(over());
        }
        if epoch.members().is_empty() {
            return Ok(());
        }
        if let Some(unknown) = epoch.members().iter().find(|member| member.member().incarnation == 0) {
            let why = format!(
                "the directory does not know the incarnation of {:?}, so that members have no connection of their own",
                unknown.name()
            );
            return Err(Error::new(ErrorKind::Unsupported, "barrier", why));
        }
        let name = format!("epoch {:016x} round {round}", epoch.id());
        let mut reached = pin!(epoch.peers()?.barrier(name, limit)?);
        let mut changed = pin!(self.wait_for(|now| now.id() != epoch.id()));
        std::future::poll_fn(|context| match reached.as_mut().poll(context) {
            Poll::Ready(result) => Poll::Ready(result),
            Poll::Pending => changed.as_mut().poll(context).map(|_| Err(over())),
        })
        .await
    }

    /// The number of members that are connected.
    pub fn connected(&self) -> usize {
        self.epochs.borrow().members().len()
    }

    /// This side's incarnation, which the group does not connect to.
    pub fn incarnation(&self) -> u64 {
        self.state.own
    }
}

impl Drop for ElasticGroup {
    fn drop(&mut self) {
        self.state.close();
    }
}

/// Makes and removes the slots of members.
struct Follower {
    state: Arc<GroupState>,
    watch: Watch,
    filter: Option<MemberFilter>,
    is_mesh: bool,
}

impl Follower {
    async fn run(mut self) {
        loop {
            match self.watch.next().await {
                Event::Joined(member) => self.follow(member),
                Event::Changed { member, before } => {
                    if !self.is_followed(&member) {
                        self.state.remove(&before.name);
                    }
                    self.follow(member);
                }
                Event::Left(member) => self.state.remove(&member.name),
                Event::Outage(_) | Event::Synced => {}
            }
        }
    }

    fn is_followed(&self, member: &Member) -> bool {
        member.incarnation != self.state.own && self.filter.as_ref().is_none_or(|filter| filter(member))
    }

    fn follow(&self, member: Member) {
        if !self.is_followed(&member) {
            return;
        }
        let (slot, peer) = self.state.insert(&member);
        let connects = !self.is_mesh || member.incarnation == 0 || self.state.own < member.incarnation;
        start_link(&self.state, member, slot, connects, peer);
    }
}

/// Starts the task of a slot.
fn start_link(
    state: &Arc<GroupState>,
    member: Member,
    slot: super::SlotId,
    connects: bool,
    peer: Option<multirail::Peer>,
) {
    let name = member.name.clone();
    let task = LinkTask { state: Arc::clone(state), member, slot, connects };
    // Runs on the thread of the directories, as its caller does.
    let task = AbortOnDrop(tokio::spawn(task.run(peer)));
    state.set_task(&name, slot, task);
}

/// Accepts the peers of a mesh.
async fn accept(state: Arc<GroupState>, listener: Listener) {
    loop {
        match listener.accept().await {
            Ok(peer) => {
                if let Some((member, slot)) = state.accepted(&peer) {
                    let connects = state.own < member.incarnation;
                    start_link(&state, member, slot, connects, Some(peer));
                }
            }
            Err(error) if error.kind() == ErrorKind::Closed => return,
            Err(error) => tracing::debug!(%error, "a peer was not accepted"),
        }
    }
}
