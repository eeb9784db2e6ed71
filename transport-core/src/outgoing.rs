//! One notification on its way out.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::engine::op::OpId;
use crate::engine::peer::{CheckedRange, Link};
use crate::engine::{Control, EngineHandle, OnEnd, SharedState, Work};
use crate::fabric::FabricInner;
use crate::notifications::{
    Header, HeldBlocks, MAX_EARLY, MAX_LEN, NotificationBytes, Notifier, Outbox, PAYLOAD, no_notifications,
};
use crate::operations::message;
use crate::peer::PeerInner;
use crate::spi::{Operations, WorkKind};
use crate::striping::OpSlot;
use crate::{Error, ErrorKind, Op, PathPolicy, Peer, Region, Result, Trigger};

/// A notification that was checked, has its memory and its slots in the op table, and is not submitted yet. Dropping it
/// gives both back.
pub(crate) struct Outgoing<'a> {
    peer: &'a Peer,
    link: &'a Link,
    slots: Vec<OpSlot<'a>>,
    shipment: Arc<Shipment>,
}

/// A notification, as the ends of its fragments need it.
struct Shipment {
    peer: Weak<PeerInner>,
    engine: Arc<EngineHandle>,
    outbox: Arc<Outbox>,
    /// The bytes of the notification, and what its fragments carry: its trace context, too.
    len: usize,
    on_wire: usize,
    is_traced: bool,
    /// Whether this is no notification, but a message that tells the floor.
    tells_floor: bool,
    state: Mutex<ShipmentState>,
}

struct ShipmentState {
    /// Free once all fragments have ended.
    blocks: HeldBlocks,
    /// The number of the first fragment, once it is known: then the fragments may be sent.
    first: Option<u64>,
    /// Whether each fragment has ended.
    ended: Vec<bool>,
}

/// The longest notification that the calling thread sends from its stack, in bytes with its trace context.
const SHORT: usize = 232;

impl<'a> Outgoing<'a> {
    /// Runs a transfer, and sends a short notification after it, in the calling thread: without memory of the outbox and
    /// without a slot. Returns `None` if that is not possible. In that case it has done nothing. The errors are those of
    /// [`Peer::notify`].
    pub fn try_at_once(
        peer: &'a Peer,
        content: &NotificationBytes<'_>,
        (policy, deadline): (PathPolicy, Option<Duration>),
        operation: &'static str,
        transfer: impl FnOnce() -> Option<Op>,
    ) -> Result<Option<Op>> {
        let Some(link) = Self::link_for_short(peer, content, policy, operation)? else { return Ok(None) };
        let Some(op) = transfer() else { return Ok(None) };
        if !op.has_succeeded_at_once() || send_short(peer, link, content) {
            return Ok(Some(op));
        }
        Ok(Some(match Self::prepare(peer, content, policy, operation) {
            Ok(outgoing) => outgoing.send_after(op, deadline),
            // The bytes have moved, so the call has not failed: the operation has.
            Err(error) => Op::and_then_quietly(op, [Op::ready(Err(error))]),
        }))
    }

    /// Sends a short notification in the calling thread. Returns false if that is not possible. The errors are those of
    /// [`Peer::notify`].
    pub fn try_short(peer: &'a Peer, content: &NotificationBytes<'_>, policy: PathPolicy) -> Result<bool> {
        let link = Self::link_for_short(peer, content, policy, "notify")?;
        Ok(link.is_some_and(|link| send_short(peer, link, content)))
    }

    /// The link for a short notification that the calling thread sends, if the direct path is open. If it closes before the
    /// notification is sent, the notification needs memory, so this checks that there is some.
    fn link_for_short(
        peer: &'a Peer,
        content: &NotificationBytes<'_>,
        policy: PathPolicy,
        operation: &'static str,
    ) -> Result<Option<&'a Link>> {
        let (fabric, link) = Self::check(peer, content, policy, operation)?;
        let len = content.on_wire().len();
        if len > SHORT || link.message_path((Header::LEN + len) as u64).is_none() {
            return Ok(None);
        }
        notifier_of(&fabric, operation)?.outbox.check_room(peer.id(), 1, operation)?;
        Ok(Some(link))
    }

    /// Checks a notification, and takes memory and slots for it. The errors are those of [`Peer::notify`].
    pub fn prepare(
        peer: &'a Peer,
        content: &NotificationBytes<'_>,
        policy: PathPolicy,
        operation: &'static str,
    ) -> Result<Self> {
        let (fabric, link) = Self::check(peer, content, policy, operation)?;
        let notifier = notifier_of(&fabric, operation)?;
        let blocks = notifier.outbox.take(peer.id(), fragments(content.on_wire().len()), operation)?;
        for (fragment, payload) in content.on_wire().chunks(PAYLOAD).enumerate() {
            notifier.outbox.region().copy_in(blocks.offset(fragment) + Header::LEN, payload)?;
        }
        Self::with_blocks(peer, link, blocks, Some(content), operation)
    }

    /// Checks a notification. Returns the fabric, and the link that will carry the notification.
    fn check(
        peer: &'a Peer,
        content: &NotificationBytes<'_>,
        policy: PathPolicy,
        operation: &'static str,
    ) -> Result<(Arc<FabricInner>, &'a Link)> {
        peer.0.check_alive()?;
        let fabric = peer.0.context.fabric.upgrade().ok_or_else(|| no_notifications(operation))?;
        notifier_of(&fabric, operation)?;
        let link = companion(peer, peer.path_policy().and(policy), operation)?;
        if content.len() > MAX_LEN {
            let why = format!("a notification has at most {MAX_LEN} bytes, and this one {}", content.len());
            return Err(Error::new(ErrorKind::TooLarge, operation, why));
        }
        // The peer keeps those that overtake others, but not any number.
        if peer.0.context.send_sequence().under_way() + fragments(content.on_wire().len()) > MAX_EARLY / 2 {
            let why = "too many notifications to this peer are under way behind one that has not ended; await some of them";
            return Err(Error::new(ErrorKind::Busy, operation, why));
        }
        Ok((fabric, link))
    }

    fn with_blocks(
        peer: &'a Peer,
        link: &'a Link,
        blocks: HeldBlocks,
        content: Option<&NotificationBytes<'_>>,
        operation: &'static str,
    ) -> Result<Self> {
        let fragments = blocks.len();
        let slots = (0..fragments).map(|_| OpSlot::take(link, operation)).collect::<Result<_>>()?;
        let shipment = Arc::new(Shipment {
            peer: Arc::downgrade(&peer.0),
            engine: Arc::clone(&link.engine),
            outbox: Arc::clone(&blocks.outbox),
            len: content.map_or(0, NotificationBytes::len),
            on_wire: content.map_or(0, |content| content.on_wire().len()),
            is_traced: content.is_some_and(NotificationBytes::is_traced),
            tells_floor: content.is_none(),
            state: Mutex::new(ShipmentState { blocks, first: None, ended: vec![false; fragments] }),
        });
        Ok(Self { peer, link, slots, shipment })
    }

    /// Sends the notification now.
    pub fn send(self, deadline: Option<Duration>) -> Op {
        let bytes = self.shipment.len as u64;
        self.send_after(Op::without_receipt(bytes), deadline)
    }

    /// Sends the notification now. The operation resolves to the result of `first`, which has succeeded.
    pub fn send_after(self, first: Op, deadline: Option<Duration>) -> Op {
        let Self { peer, link, slots, shipment } = self;
        shipment.number();
        let times = peer.times(None, deadline);
        let mut ops = Vec::new();
        for (fragment, slot) in slots.into_iter().enumerate() {
            let Range { start, end } = shipment.range(fragment);
            let local = shipment.outbox.region().start().wrapping_add(start);
            if let Some(mut op) = link.try_direct_message(WorkKind::Send, local, (end - start) as u64, None) {
                let result = op.try_result();
                shipment.end(fragment, matches!(result, Some(Ok(_))));
                ops.extend(result.filter(Result::is_err).map(Op::ready));
                continue;
            }
            ops.push(peer.submit_share(slot, shipment.work(fragment), times.clone(), "notify"));
        }
        if ops.is_empty() { first } else { Op::and_then_quietly(first, ops) }
    }

    /// Submits the notification, to begin once the function that this returns is called with true. If that is called
    /// with false, the notification is cancelled.
    pub fn hold(self, deadline: Option<Duration>) -> (Vec<Op>, OnEnd) {
        let Self { peer, slots, shipment, .. } = self;
        let ids: Vec<OpId> = slots.iter().map(OpSlot::id).collect();
        let times = peer.times(Some(&Trigger::held()), deadline);
        let submit = |(fragment, slot): (usize, OpSlot<'_>)| {
            peer.submit_share(slot, shipment.work(fragment), times.clone(), "notify")
        };
        let ops = slots.into_iter().enumerate().map(submit).collect();
        let on_end = move |succeeded: bool| {
            // If a fragment has ended before, by a cancel or its deadline, the others are of no use.
            let starts = succeeded && !shipment.lock().ended.contains(&true);
            if starts {
                shipment.number();
            }
            for id in ids {
                match starts {
                    true => shipment.engine.control(Control::Start(id)),
                    false => shipment.engine.cancel(id),
                }
            }
        };
        (ops, Box::new(on_end))
    }
}

impl Shipment {
    /// Numbers the fragments, and writes their headers.
    fn number(&self) {
        let Some(peer) = self.peer.upgrade() else { return };
        let mut state = self.lock();
        let mut sequence = peer.context.send_sequence();
        let (first, floor) = sequence.begin(state.ended.len());
        sequence.note_told(floor);
        state.first = Some(first);
        for (fragment, ended) in state.ended.iter().enumerate() {
            let number = first + fragment as u64;
            if *ended {
                sequence.end(number, false);
            }
            let (offset, total) = ((fragment * PAYLOAD) as u32, self.on_wire as u32);
            let header = Header { number, floor, offset, total, is_traced: self.is_traced };
            state.write_header(fragment, header);
        }
    }

    /// The range of a fragment's message in the outbox's region.
    fn range(&self, fragment: usize) -> Range<usize> {
        let start = self.lock().blocks.offset(fragment);
        let payload = self.on_wire.saturating_sub(fragment * PAYLOAD).min(PAYLOAD);
        start..start + Header::LEN + payload
    }

    /// The message of a fragment.
    fn work(self: &Arc<Self>, fragment: usize) -> Work {
        let range = self.range(fragment);
        let (local, len) = (range.start as u64, range.len() as u64);
        let this = Arc::clone(self);
        let on_end: OnEnd = Box::new(move |has_arrived| this.end(fragment, has_arrived));
        let region = Region(Arc::clone(self.outbox.region()));
        let work = message(&region, CheckedRange { local, remote: 0, len }, None);
        Work { shared: Some(Arc::new(SharedState::new(1, Some(on_end)))), ..work }
    }

    /// Notes that a fragment has ended. If it has failed, the peer may wait for it, and has to be told.
    fn end(&self, fragment: usize, has_arrived: bool) {
        let Some(peer) = self.peer.upgrade() else { return };
        let mut state = self.lock();
        state.ended[fragment] = true;
        let all_have_ended = !state.ended.contains(&false);
        let floor = {
            let mut sequence = peer.context.send_sequence();
            match state.first {
                _ if self.tells_floor => sequence.end_telling(has_arrived),
                Some(first) => sequence.end(first + fragment as u64, has_arrived),
                None => return,
            }
            // A message that could not tell the floor is not repeated at once: it would fail again.
            let may_tell = all_have_ended && peer.is_alive() && (has_arrived || !self.tells_floor);
            if may_tell { sequence.begin_telling() } else { None }
        };
        let Some(floor) = floor else { return };
        let block = state.blocks.split_one();
        drop(state);
        let told = match block {
            Some(block) => self.tell_floor(&Peer(Arc::clone(&peer)), block, floor),
            None => Ok(()),
        };
        if let Err(error) = told {
            tracing::debug!(%error, "the peer is told of a failed notification when the next one ends");
            peer.context.send_sequence().end_telling(false);
        }
    }

    /// Sends the peer a message without a fragment. It has no deadline, because nothing would repeat it.
    fn tell_floor(&self, peer: &Peer, block: HeldBlocks, floor: u64) -> Result<()> {
        let link = &peer.0.links[self.engine.group];
        let mut outgoing = Outgoing::with_blocks(peer, link, block, None, "notify")?;
        let header = Header::skip(floor);
        outgoing.shipment.lock().write_header(0, header);
        if let Some(slot) = outgoing.slots.pop() {
            let times = peer.times(None, Some(Duration::MAX));
            peer.submit_share(slot, outgoing.shipment.work(0), times, "notify").detach();
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, ShipmentState> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ShipmentState {
    fn write_header(&self, fragment: usize, header: Header) {
        let region = self.blocks.outbox.region();
        let written = region.copy_in(self.blocks.offset(fragment), &header.to_bytes());
        debug_assert!(written.is_ok(), "blocks lie inside the region");
    }
}

/// The number of fragments that carry `len` bytes.
fn fragments(len: usize) -> usize {
    len.div_ceil(PAYLOAD).max(1)
}

fn notifier_of<'a>(fabric: &'a FabricInner, operation: &'static str) -> Result<&'a Notifier> {
    fabric.notifier().ok_or_else(|| no_notifications(operation))
}

/// Sends a short notification in the calling thread. Returns false if it was not sent: the direct path is closed, or the
/// peer has no room, or is gone.
fn send_short(peer: &Peer, link: &Link, content: &NotificationBytes<'_>) -> bool {
    let bytes = content.on_wire();
    let mut message = [0; Header::LEN + SHORT];
    let message = &mut message[..Header::LEN + bytes.len()];
    message[Header::LEN..].copy_from_slice(bytes);
    let len = message.len() as u64;
    // Locked until the message is sent: if it is not sent, the next notification gets its number.
    let mut sequence = peer.0.context.send_sequence();
    let (number, floor) = sequence.begin(1);
    let (total, is_traced) = (bytes.len() as u32, content.is_traced());
    let header = Header { number, floor, offset: 0, total, is_traced };
    message[..Header::LEN].copy_from_slice(&header.to_bytes());
    let result = link.run_message(WorkKind::Send, message.as_mut_ptr(), len, None);
    let is_sent = matches!(result, Some(Some(Ok(()))));
    if is_sent {
        sequence.note_told(floor);
        sequence.end(number, true);
    } else {
        sequence.take_back();
    }
    // Without the lock: this may end other notifications, and wakers run the user's code.
    drop(sequence);
    if let Some(result) = result {
        link.end_message(WorkKind::Send, len, None, result);
    }
    is_sent
}

/// The first companion that reaches the peer by a path that the policy allows.
fn companion<'a>(peer: &'a Peer, policy: PathPolicy, operation: &'static str) -> Result<&'a Link> {
    let companions = || peer.0.links.iter().filter(|link| link.engine.for_notifications);
    let mut refused = None;
    for link in companions().filter(|link| link.is_up()) {
        let caps = link.capabilities_for(Operations::SEND, None, operation)?;
        match policy.check(caps.path, &link.label, operation) {
            Ok(()) => return Ok(link),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    let reasons = companions().filter_map(|link| link.refused.as_deref());
    let unsupported = || {
        let why = format!(
            "the peer takes no notifications: both fabrics have to be opened with FabricBuilder::notifications ({})",
            reasons.collect::<Vec<_>>().join("; ")
        );
        Error::new(ErrorKind::Unsupported, operation, why)
    };
    Err(refused.unwrap_or_else(unsupported))
}
