//! The commands that other threads send to an engine.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use super::memory::RegionInner;
use super::peer::PeerState;
use super::rail::PoolPart;
use super::{Continuation, DrainReply, Snapshot, Work};
use crate::op::OpId;
use crate::spi::{FenceKind, FenceReply, FenceReport, PeerSlot};
use crate::{Error, PeerId, Result, Time, Trigger};

/// A checked operation for the engine. A plain value, never boxed.
pub struct Submission {
    pub id: OpId,
    pub peer: Arc<PeerState>,
    pub submitted_at: Time,
    /// What the operation waits for before it starts.
    pub trigger: Option<Trigger>,
    pub deadline: Time,
    pub work: Work,
    /// The operation's tracing span, if a subscriber wants it.
    pub span: Option<Box<tracing::Span>>,
}

/// All other commands: each is rarer than a submission.
pub enum Control {
    /// A peer was admitted, and has a link to this engine.
    Link { peer: Arc<PeerState> },
    /// The connection to a peer ended.
    Unlink { peer: PeerId, error: Error },
    /// The user cancelled an operation.
    Cancel(OpId),
    /// The user submitted a receive. It completes through the op table.
    Receive { id: OpId, region: Arc<RegionInner>, offset: u64, len: u64 },
    /// An operation that was submitted with [`Trigger::held`] is to start.
    Start(OpId),
    /// A buffer of a receive pool is free, and is to be posted. `freed_from`: the sender of the message that was in it.
    PoolReceive { pool: Arc<PoolPart>, buffer: u32, freed_from: Option<PeerId> },
    /// A receive pool was dropped: the engine cancels its receives.
    PoolClosed { pool: Arc<PoolPart> },
    /// A region is to be revoked: the engine ends the operations that use it here, revokes its keys, and waits until no
    /// peer copies to or from it. `id` is the operation that waits for this, if there is one.
    Revoke { id: Option<OpId>, region: Arc<RegionInner>, deadline: Time },
    /// The user waits until the operations that were submitted to a peer have ended.
    Drain { peer: PeerId, deadline: Time, done: DrainReply },
    /// The user takes a rail out of service, and waits until the operations that use it have ended.
    RetireRail { rail: usize, deadline: Time, done: DrainReply },
    /// The user takes a rail back into service.
    RestoreRail { rail: usize },
    /// There is more credit for a link: its peer has granted more, or another engine or a thread on the direct path has
    /// given some back.
    GrantReceived { link: u32 },
    /// The engine is to renew the grant of a peer.
    RenewGrant { link: u32, peer: PeerId },
    /// A [`PeerProbe`](super::peer::PeerProbe) has ended.
    ProbeEnded { link: u32, peer: PeerId },
    /// The peer asks this side to fence a slot of a link: what the peer has posted there must not arrive any more. Or
    /// the peer wants to send there again.
    Fence { rail: usize, slot: PeerSlot, link: u32, peer: PeerId, kind: FenceKind, reply: FenceReply },
    /// A [`FenceRequest`](super::peer::FenceRequest) has ended.
    Fenced {
        rail: usize,
        slot: PeerSlot,
        link: u32,
        peer: PeerId,
        kind: FenceKind,
        result: Result<FenceReport>,
    },
    /// The peer has posted so many messages to a slot of a link since it was connected. It says so if its messages have
    /// changed their rail.
    MessagesPosted { rail: usize, slot: PeerSlot, link: u32, peer: PeerId, count: u64 },
    /// There may be news of an operation that carries the rest of one of this engine's, over another rail group.
    Continued(Arc<Continuation>),
    /// A [`Timer`](super::timers::Timer) was set.
    Timer { at: Time },
    /// A dump needs a snapshot. The channel has room for one; the engine never waits for it.
    Dump { reply: SyncSender<Snapshot> },
}
