//! A connected peer: its identity, its life, and what each side tells the other.
//!
//! The clones of a [`Peer`] share a [`PeerState`], which the engines know, and in it a [`PeerContext`], which they do
//! not. The operations of a peer, with their checks and their submission, are in
//! `operations.rs`, their explanations in `explain.rs`, its imm counts in `imm.rs`.

mod barriers;
mod closed;
mod context;
mod drain;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::control::{Identity, SessionHandle, SessionHost, SessionPeer};
use crate::engine::Control;
use crate::engine::flow_control::WireGrant;
use crate::engine::index::{GroupIndex, TransportIndex};
use crate::engine::peer::{FenceRequest, Link, PairedRail, PeerState};
use crate::fabric::FabricInner;
use crate::spi::{Connector, FenceKind, FenceReply, PeerSlot};
use crate::{
    Access, Descriptor, Error, ErrorKind, Fabric, ImmCounter, Op, PathPolicy, PeerId, Region,
    RemoteCatalogue, RemoteRegion, Result,
};

pub(crate) use barriers::{Barriers, MAX_AHEAD, Refusal};
pub use closed::PeerClosed;
pub(crate) use context::PeerContext;
pub use drain::Drain;

/// The state that the clones of a [`Peer`] share.
pub(crate) type PeerInner = PeerState<PeerContext>;

/// A connected peer. Clones share the connection. Dropping the clones does not end it.
///
/// A peer whose connection has ended stays dead. A [`PeerHandle`](crate::PeerHandle) connects again, and gives another
/// `Peer`.
#[derive(Clone)]
pub struct Peer(pub(crate) Arc<PeerInner>);

impl Peer {
    pub(crate) fn new(
        id: PeerId,
        fabric: &Arc<FabricInner>,
        identity: Identity,
        links: Vec<Link>,
        session: SessionHandle,
    ) -> Self {
        Self(Arc::new_cyclic(|this| {
            PeerState::new(id, links, PeerContext::new(this, fabric, identity, session))
        }))
    }

    /// The peer's number.
    pub fn id(&self) -> PeerId {
        self.0.id
    }

    /// The incarnation of the peer's fabric: each opening has another number, so a restarted peer has another.
    pub fn incarnation(&self) -> u64 {
        self.0.context.identity.incarnation
    }

    /// The name of this side's tenant that the peer belongs to. Empty if it belongs to the fabric itself.
    pub fn tenant(&self) -> &str {
        self.0.context.tenant()
    }

    /// Whether the peer is connected, as far as this side knows.
    pub fn is_alive(&self) -> bool {
        self.0.is_alive()
    }

    /// The paths that this side's operations with the peer may take: what the fabric allows, and what was set by
    /// [`Peer::set_path_policy`].
    pub fn path_policy(&self) -> PathPolicy {
        self.0.context.path_policy()
    }

    /// Sets which paths this side's operations with the peer may take, of those that the fabric allows. It applies to
    /// operations that are submitted from now on, by any handle of the peer, and to posts of prepared transfers.
    /// Regions stay with the transport that they were imported over: import them again for another.
    pub fn set_path_policy(&self, policy: PathPolicy) {
        self.0.context.set_path_policy(policy);
    }

    /// Makes a region of this peer usable here, by the first transport that both the region and the connection have. A
    /// transport whose path the [`PathPolicy`] does not allow is taken only if there is no other; then operations on
    /// the region are refused.
    ///
    /// The call may block up to 2 s per rail, while a backend asks the peer's process.
    ///
    /// # Errors
    /// `Revoked` if the descriptor is of an earlier opening of the peer's fabric. `Unreachable` if the region and the
    /// connection have no transport and no rail in common. `PeerDied`, `Closed`, and the errors of the backend.
    pub fn import(&self, descriptor: &Descriptor) -> Result<RemoteRegion> {
        self.0.check_alive()?;
        if descriptor.incarnation != self.incarnation() {
            let why = "the descriptor is of another opening of the owner's fabric; ask for a new one";
            return Err(Error::new(ErrorKind::Revoked, "import", why));
        }
        let policy = self.path_policy();
        let is_allowed = |remote: &RemoteRegion| remote.0.paths.iter().any(|paths| policy.allows(*paths));
        let (mut errors, mut not_allowed) = (Vec::new(), None);
        for links in self.0.links_by_transport().filter(|links| links[0].is_up()) {
            match RemoteRegion::import(self.id(), links, descriptor) {
                Ok(remote) if is_allowed(&remote) => {
                    self.0.context.remember_import(&remote.0);
                    return Ok(remote);
                }
                Ok(remote) => not_allowed = not_allowed.or(Some(remote)),
                Err(error) => errors.push(error),
            }
        }
        if let Some(remote) = not_allowed {
            self.0.context.remember_import(&remote.0);
            return Ok(remote);
        }
        Err(errors.into_iter().next().unwrap_or_else(|| {
            let why = "the descriptor has no entry for a transport that reaches its owner";
            Error::new(ErrorKind::Unreachable, "import", why)
        }))
    }

    /// Makes the regions of a peer's [`Catalogue`](crate::Catalogue) usable here: each is imported when it is first
    /// found.
    /// `bytes` are those of [`Catalogue::to_bytes`](crate::Catalogue::to_bytes).
    ///
    /// # Errors
    /// `Protocol` or `Version` if the bytes are no catalogue that this library reads.
    pub fn import_catalogue(&self, bytes: &[u8]) -> Result<RemoteCatalogue> {
        RemoteCatalogue::new(self, bytes)
    }

    /// Looks up a catalogue that the peer published ([`Catalogue::publish`](crate::Catalogue::publish)), and imports
    /// it: a lookup and a read, for any number of regions.
    ///
    /// # Errors
    /// Those of [`Peer::region`], [`Peer::read`] and [`Peer::import_catalogue`]; `TooLarge` if what has the name is
    /// larger than any catalogue.
    pub fn catalogue(&self, name: &str) -> impl Future<Output = Result<RemoteCatalogue>> + Send + 'static {
        let (peer, region) = (self.clone(), self.region(name));
        async move {
            let (reading, landing) = peer.begin_catalogue(&region.await?)?;
            reading.await?;
            peer.end_catalogue(&landing)
        }
    }

    /// Begins to read the bytes of a published catalogue. Returns the read, and the region that it fills.
    pub(crate) fn begin_catalogue(&self, published: &RemoteRegion) -> Result<(Op, Region)> {
        RemoteCatalogue::check_size(published.len())?;
        let closed = || Error::new(ErrorKind::Closed, "catalogue", "the fabric is closed");
        let fabric = Fabric(self.0.context.fabric.upgrade().ok_or_else(closed)?);
        let landing = fabric.alloc(published.len(), Access::LOCAL)?;
        Ok((self.read(&landing, 0..published.len(), published, 0)?, landing))
    }

    /// The catalogue whose bytes a read has brought.
    pub(crate) fn end_catalogue(&self, landing: &Region) -> Result<RemoteCatalogue> {
        let mut bytes = vec![0; landing.len()];
        landing.copy_out(0, &mut bytes)?;
        self.import_catalogue(&bytes)
    }

    /// Looks up a region that the peer published, and imports it.
    pub fn region(&self, name: &str) -> impl Future<Output = Result<RemoteRegion>> + Send + 'static {
        let (peer, descriptor) = (self.clone(), self.published(name));
        async move { peer.import(&descriptor.await?) }
    }

    /// Looks up the descriptor of a region that the peer published. Never blocks.
    pub(crate) fn published(&self, name: &str) -> impl Future<Output = Result<Descriptor>> + Send + 'static {
        let (peer, name) = (self.clone(), name.to_owned());
        async move {
            peer.0.check_alive()?;
            let bytes = match peer.in_process_peer() {
                Some(other) => other.published_here(&name)?,
                // The close reason says more than the lookup's own error, which is that the session is over.
                None => {
                    let found = peer.0.context.session.lookup(&name).await;
                    found.map_err(|error| peer.0.close_reason().unwrap_or(error))?
                }
            };
            Descriptor::from_bytes(&bytes)
        }
    }

    /// The descriptor of a region that the fabric of this handle has published.
    fn published_here(&self, name: &str) -> Result<Vec<u8>> {
        let found = self.0.context.fabric.upgrade().and_then(|fabric| fabric.published(name));
        let why = || format!("the peer has published nothing named {name:?}");
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, "region", why()))
    }

    /// Describes which transport reaches the peer over which rails, why the other transports are not used, and how
    /// bytes reach the regions that are imported from the peer.
    pub fn explain(&self) -> String {
        let mut text = format!("{} ({}):", self.id(), self.0.context.identity.host);
        let mut taken = false;
        for links in self.0.links_by_transport().filter(|links| !links[0].engine.for_notifications) {
            let link = &links[0];
            let rails = links.iter().flat_map(|link| &link.rails).flatten().count();
            let groups = match links.len() {
                1 => String::new(),
                groups => format!(" in {groups} groups"),
            };
            let verdict = match &link.refused {
                Some(reason) => format!("not used: {reason}"),
                None if taken => format!("{rails} rails{groups}, stands by"),
                None => format!("{rails} rails{groups}, taken"),
            };
            taken |= link.is_up();
            text.push_str(&format!("\n  {}: {verdict}", link.label));
        }
        let mut paths: Vec<_> = self.0.context.imported().iter().map(|remote| remote.path()).collect();
        paths.sort_unstable();
        for same in paths.chunk_by(|a, b| a == b) {
            text.push_str(&format!("\n  regions by {}: {}", same[0], same.len()));
        }
        text
    }

    /// Asks the fabric's [`GrantPolicy`](crate::GrantPolicy) again how much this peer may send, and tells the peer.
    /// Call it after the policy has changed, or what the policy decides by.
    pub fn regrant(&self) {
        for link in self.0.first_links().filter(|link| link.is_up()) {
            link.engine.control(Control::RenewGrant { link: link.index, peer: self.0.id });
        }
    }

    /// Resolves once no byte can move any more of all operations that were submitted to this peer before, whether
    /// their [`Op`](crate::Op) was dropped, detached or is held.
    ///
    /// It is for operations that nobody can await any more: a `select!` dropped them, or the task that had them was
    /// aborted. Once it resolves, their memory on both sides belongs to its owner alone. The holder of an `Op` can
    /// wait for that operation alone by [`Op::cancel`](crate::Op::cancel). A drain does not wait for operations that
    /// are submitted later.
    ///
    /// Dropped operations end by their deadline at the latest. The drain itself ends with `DeadlineExceeded` after
    /// the fabric's default deadline, and may be repeated.
    ///
    /// # Errors
    /// `Closed` if the fabric is closed. Then all operations have ended.
    pub fn drain(&self) -> Result<Drain> {
        Drain::new(&self.0)
    }

    /// Resolves when the peer is gone, to the reason.
    pub fn closed(&self) -> PeerClosed {
        PeerClosed::new(Arc::clone(&self.0))
    }

    /// Ends the connection. Operations in flight end with `Closed`.
    pub fn disconnect(&self) {
        // A peer that has died before is lost, and not disconnected. The session may be the first to close the peer.
        if self.is_alive() {
            self.0.context.is_disconnected_here.store(true, Ordering::Release);
        }
        self.0.context.session.goodbye();
        self.close(Error::new(ErrorKind::Closed, "disconnect", "this side ended the connection"));
    }

    /// Whether the program has ended the connection, by [`Peer::disconnect`], while the peer was connected.
    pub(crate) fn is_disconnected_here(&self) -> bool {
        self.0.context.is_disconnected_here.load(Ordering::Acquire)
    }

    /// Closes the peer for a reason of this side. In a pair within one process both sides learn the reason before
    /// the links of either go down. Otherwise one side might take the lost links for the other's death.
    pub(crate) fn close(&self, ours: Error) {
        let theirs = Error::new(ErrorKind::Closed, "peer", "the peer closed the connection");
        let other = self.in_process_peer().filter(|other| other.0.set_close_reason(theirs.clone()));
        self.fail(ours);
        if let Some(other) = other {
            other.tear_down(&theirs);
        }
    }

    /// Marks the peer as gone, ends its operations and wakes all waiters. Does nothing if the peer is gone already:
    /// the first reason stays.
    pub(crate) fn fail(&self, error: Error) {
        if self.0.set_close_reason(error.clone()) {
            self.tear_down(&error);
        }
    }

    /// Takes the links down and wakes all waiters. Called once per peer, after its close reason is set.
    fn tear_down(&self, error: &Error) {
        tracing::debug!(peer = self.0.id.number(), %error, "peer is gone");
        for link in self.0.links.iter().filter(|link| link.is_up()) {
            link.engine.control(Control::Unlink { peer: self.0.id, error: error.clone() });
            for (_, rail) in link.pairs() {
                rail.disconnect();
            }
        }
        self.0.imms.close();
        self.0.context.barriers.wake_all();
        let due = self.0.context.close_wakers().take_all();
        due.wake();
        if let Some(fabric) = self.0.context.fabric.upgrade() {
            fabric.forget(self.0.id);
        }
    }

    /// The other side's handle of this connection, if both sides are in this process.
    pub(crate) fn in_process_peer(&self) -> Option<Self> {
        self.0.context.in_process_peer()
    }

    /// Tells the peer that a region of this side is revoked.
    pub(crate) fn announce_revoked(&self, region: u64) {
        self.0.context.session.revoked(region);
        if let Some(other) = self.in_process_peer() {
            other.note_revoked(other.incarnation(), region);
        }
    }

    /// Notes that the peer has revoked a region. Later operations on it are refused at once.
    pub(crate) fn note_revoked(&self, incarnation: u64, region: u64) {
        if incarnation == self.incarnation() {
            self.0.context.revoke_import(region);
        }
    }

    /// Tells the peer that this side has reached a barrier.
    pub(crate) fn announce_arrival(&self, barrier: &str) {
        self.0.context.session.reached(barrier);
        if let Some(other) = self.in_process_peer() {
            // An error would mean that the other side broke the protocol, but it runs this same code.
            let _ = other.0.context.barriers.arrived(barrier);
        }
    }

    /// What this side has granted the peer, by the transport's label.
    pub(crate) fn grants(&self) -> impl Iterator<Item = (&str, WireGrant)> {
        let up = self.0.first_links().filter(|link| link.is_up());
        up.filter_map(|link| Some((&*link.label, link.engine.receiver_credits.state(self.0.id)?.grant)))
    }

    /// Tells the peer what it may send over one transport.
    pub(crate) fn announce_grant(&self, transport: TransportIndex, grant: WireGrant) {
        let label = &self.0.first_link_of(transport).label;
        self.0.context.session.grant(label, grant);
        if let Some(other) = self.in_process_peer()
            && let Err(error) = other.note_grant(label, &grant)
        {
            tracing::error!(%error, "a peer in this process refused a grant");
        }
    }

    /// Tells the peer the new address of a rail, if the rail has one: rail `rail` of the link over `group`.
    pub(crate) fn announce_relocation(&self, group: GroupIndex, rail: usize) {
        let link = &self.0.links[group];
        for (_, pair) in link.pairs().filter(|(of, _)| *of == rail) {
            let connector = pair.domain.connector();
            let announced = connector.next_offer(pair.slot).and_then(|offer| {
                let Some(offer) = offer else { return Ok(()) };
                if let Some(other) = self.in_process_peer() {
                    let answer = other.note_relocation(&link.label, pair.pair, &offer)?;
                    return pair.renew(|connector| connector.finish_renewal(pair.slot, &answer));
                }
                self.0.context.session.moved(&link.label, pair.pair, offer);
                Ok(())
            });
            if let Err(error) = announced {
                tracing::warn!(
                    %error,
                    rail,
                    "this side could not tell a peer the new address of a rail: the peer is not reached over it"
                );
            }
        }
    }

    /// Notes what the peer allows this side to send.
    pub(crate) fn note_grant(&self, label: &str, grant: &WireGrant) -> Result<()> {
        let refuse = |why: String| Err(Error::new(ErrorKind::Protocol, "take a grant", why));
        let Some(link) = self.0.links.iter().find(|link| link.is_up() && link.label == label) else {
            return refuse(format!("the peer's grant is for {label:?}, which is no transport between us"));
        };
        if !link.credit.raise(grant) {
            return refuse("the peer's grant is below its last one; a grant may only grow".into());
        }
        if link.credit.should_notify() {
            for link in self.0.links_of(link.engine.transport) {
                link.engine.control(Control::GrantReceived { link: link.index });
            }
        }
        Ok(())
    }

    /// Notes the new address of the peer's endpoint of a pair of rails. Returns the answer for the peer.
    pub(crate) fn note_relocation(&self, label: &str, pair: u16, offer: &[u8]) -> Result<Vec<u8>> {
        self.renew(label, pair, |connector, slot| connector.renew(slot, offer))
    }

    /// Notes that the peer uses the new address of this side's endpoint.
    pub(crate) fn note_followed(&self, label: &str, pair: u16, answer: &[u8]) -> Result<()> {
        self.renew(label, pair, |connector, slot| connector.finish_renewal(slot, answer))
    }

    /// Renews the connection of pair `pair` of the transport called `label`. Then wakes the engine, so that its
    /// endpoint sees the new connection: nothing else wakes an endpoint that sleeps.
    fn renew<T>(
        &self,
        label: &str,
        pair: u16,
        renew: impl FnOnce(&dyn Connector, PeerSlot) -> Result<T>,
    ) -> Result<T> {
        let (link, _, pair) = self.find_pair(label, pair, "renew a connection")?;
        let renewed = pair.renew(|connector| renew(connector, pair.slot));
        link.engine.wake();
        renewed
    }

    /// The pair of rails that a peer names, with its link and the engine's rail.
    fn find_pair(
        &self,
        label: &str,
        pair: u16,
        operation: &'static str,
    ) -> Result<(&Link, usize, &PairedRail)> {
        let up = self.0.links.iter().filter(|link| link.is_up() && link.label == label);
        let mut pairs = up.flat_map(|link| link.pairs().map(move |(rail, pair)| (link, rail, pair)));
        pairs.find(|(.., known)| known.pair == pair).ok_or_else(|| {
            let why = format!("the peer names pair {pair} of {label:?}, which is none between us");
            Error::new(ErrorKind::Protocol, operation, why)
        })
    }

    /// Asks the peer to fence the pair over which this side's lost rail has sent, or to lift the fence.
    fn request_fence(&self, group: GroupIndex, request: FenceRequest) {
        let link = &self.0.links[group];
        let is_meant =
            |(rail, pair): &(usize, &PairedRail)| *rail == request.rail() && pair.slot == request.slot();
        let Some((_, pair)) = link.pairs().find(is_meant) else { return };
        let kind = request.kind();
        let reply = Box::new(|result| request.answer(result));
        match self.in_process_peer() {
            // An error would mean that the pair is unknown, but both sides have the same pairs.
            Some(other) => drop(other.fence(&link.label, pair.pair, kind, reply)),
            None => self.0.context.session.request_fence(&link.label, pair.pair, kind, reply),
        }
    }

    /// Lets nothing arrive any more of what the peer has posted over a pair of rails; or lets requests arrive
    /// again. `reply` gets the answer; it is dropped if the peer is gone.
    ///
    /// # Errors
    /// `Protocol` if there is no such pair.
    pub(crate) fn fence(&self, label: &str, pair: u16, kind: FenceKind, reply: FenceReply) -> Result<()> {
        let (link, rail, pair) = self.find_pair(label, pair, "fence")?;
        let (peer, slot) = (self.0.id, pair.slot);
        link.engine.control(Control::Fence { rail, slot, link: link.index, peer, kind, reply });
        Ok(())
    }

    /// Tells the peer how many messages this side has posted over a pair of rails.
    fn announce_messages(&self, group: GroupIndex, rail: usize, slot: PeerSlot, count: u64) {
        let link = &self.0.links[group];
        let is_meant = |(known, pair): &(usize, &PairedRail)| *known == rail && pair.slot == slot;
        let Some((_, pair)) = link.pairs().find(is_meant) else { return };
        match self.in_process_peer() {
            // An error would mean that the pair is unknown, but both sides have the same pairs.
            Some(other) => drop(other.note_messages_posted(&link.label, pair.pair, count)),
            None => self.0.context.session.messages_posted(&link.label, pair.pair, count),
        }
    }

    /// Notes that the peer has posted `count` messages over a pair of rails.
    ///
    /// # Errors
    /// `Protocol` if there is no such pair.
    pub(crate) fn note_messages_posted(&self, label: &str, pair: u16, count: u64) -> Result<()> {
        let (link, rail, pair) = self.find_pair(label, pair, "post receives")?;
        let (peer, slot) = (self.0.id, pair.slot);
        link.engine.control(Control::MessagesPosted { rail, slot, link: link.index, peer, count });
        Ok(())
    }

    /// The count of one imm value from this peer.
    pub fn imm(&self, imm: u32) -> ImmCounter {
        ImmCounter { peer: Arc::clone(&self.0), imm }
    }
}

impl SessionPeer for Peer {
    fn connected(&self, address: String) {
        let _ = self.0.context.address.set(address);
    }

    fn heard(&self, now: Instant) {
        self.0.context.note_heard(now);
    }

    fn grants(&self) -> Vec<(String, WireGrant)> {
        self.grants().map(|(label, grant)| (label.to_owned(), grant)).collect()
    }

    fn note_grant(&self, label: &str, grant: &WireGrant) -> Result<()> {
        self.note_grant(label, grant)
    }

    fn note_revoked(&self, incarnation: u64, region: u64) {
        self.note_revoked(incarnation, region);
    }

    fn note_barrier(&self, name: &str) -> std::result::Result<(), String> {
        self.0.context.barriers.arrived(name).map_err(Into::into)
    }

    fn note_relocation(&self, label: &str, pair: u16, offer: &[u8]) -> Result<Vec<u8>> {
        self.note_relocation(label, pair, offer)
    }

    fn note_followed(&self, label: &str, pair: u16, answer: &[u8]) -> Result<()> {
        self.note_followed(label, pair, answer)
    }

    fn fence(&self, label: &str, pair: u16, kind: FenceKind, reply: FenceReply) -> Result<()> {
        self.fence(label, pair, kind, reply)
    }

    fn note_messages_posted(&self, label: &str, pair: u16, count: u64) -> Result<()> {
        self.note_messages_posted(label, pair, count)
    }

    fn closed(&self) -> impl Future<Output = Error> + Send + Unpin {
        self.closed()
    }

    fn fail(&self, error: Error) {
        self.fail(error);
    }

    fn disconnect(&self) {
        self.disconnect();
    }
}

#[cfg(test)]
impl Peer {
    /// A connected peer of no fabric and without links.
    pub(crate) fn alone() -> Self {
        Self(Arc::new_cyclic(|this| PeerState::new(PeerId::next(), Vec::new(), PeerContext::alone(this))))
    }
}
