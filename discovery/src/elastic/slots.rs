//! The members that a group follows, and which of them are connected.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use multirail::{Fabric, Peer, WeakFabric};
use tokio::sync::watch;

use super::{ConnectedMember, Epoch};
use crate::Member;
use crate::runtime::AbortOnDrop;

/// The most connected peers without a slot. The oldest is forgotten first; its connection stays.
const MAX_IDLE: usize = 4096;

/// The number of a slot: another for each entry of the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotId(u64);

/// What the tasks of a group share.
pub struct GroupState {
    fabric: WeakFabric,
    /// This side's incarnation.
    pub own: u64,
    slots: Mutex<Slots>,
    epochs: watch::Sender<Arc<Epoch>>,
}

#[derive(Default)]
struct Slots {
    next: u64,
    /// The group is dropped.
    is_closed: bool,
    by_name: BTreeMap<String, Slot>,
    /// Connected peers without a slot: the directory does not list them yet, or not any more, or the slot has another
    /// connection.
    idle: Vec<IdlePeer>,
}

/// A connected peer without a slot.
struct IdlePeer {
    /// The member that this side has connected to. `None`: the peer has connected to this side.
    member: Option<Member>,
    peer: Peer,
}

impl IdlePeer {
    /// Whether this is a connection to `member`. Without an incarnation, a member of the same name that still listens
    /// at one of the addresses is the same.
    fn is_to(&self, member: &Member) -> bool {
        if member.incarnation != 0 {
            return self.peer.incarnation() == member.incarnation;
        }
        self.member.as_ref().is_some_and(|former| {
            former.name == member.name
                && former.addresses.iter().any(|address| member.addresses.contains(address))
        })
    }
}

/// One member that the directory lists.
struct Slot {
    id: SlotId,
    member: Member,
    connected: Option<Arc<ConnectedMember>>,
    task: Option<AbortOnDrop<()>>,
}

impl Slot {
    /// The slot's connection, which is to be kept without the slot.
    fn into_idle(self) -> Option<IdlePeer> {
        let peer = self.connected?.peer().clone();
        Some(IdlePeer { member: Some(self.member), peer })
    }
}

impl GroupState {
    pub fn new(fabric: &Fabric) -> Self {
        let own = fabric.incarnation();
        let epochs = watch::Sender::new(Arc::new(Epoch::new(0, own, Vec::new())));
        Self { fabric: fabric.downgrade(), own, slots: Mutex::default(), epochs }
    }

    /// The fabric, while somebody else keeps it open.
    pub fn fabric(&self) -> Option<Fabric> {
        self.fabric.upgrade()
    }

    pub fn epochs(&self) -> watch::Receiver<Arc<Epoch>> {
        self.epochs.subscribe()
    }

    /// Makes the slot of a member, in the place of a former one. Takes a connection to the member, if there is one.
    pub fn insert(&self, member: &Member) -> (SlotId, Option<Peer>) {
        let mut slots = self.lock();
        slots.next += 1;
        let id = SlotId(slots.next);
        if let Some(former) = slots.by_name.remove(&member.name).and_then(Slot::into_idle) {
            match former.is_to(member) {
                true => slots.keep_idle(former),
                // Its process is gone, or another has its name.
                false => former.peer.disconnect(),
            }
        }
        let peer = slots.take_idle(member);
        let slot = Slot { id, member: member.clone(), connected: None, task: None };
        slots.by_name.insert(member.name.clone(), slot);
        if let Some(peer) = &peer {
            slots.connect(&member.name, peer.clone());
        }
        self.publish(&slots);
        (id, peer)
    }

    /// Hands the slot its task. Ends the task if the slot is another's by now.
    pub fn set_task(&self, name: &str, id: SlotId, task: AbortOnDrop<()>) {
        let mut slots = self.lock();
        if slots.is_closed {
            return;
        }
        if let Some(slot) = slots.by_name.get_mut(name).filter(|slot| slot.id == id) {
            slot.task = Some(task);
        }
    }

    /// Ends the tasks of all slots, which hold this state.
    pub fn close(&self) {
        let mut slots = self.lock();
        slots.is_closed = true;
        slots.by_name.values_mut().for_each(|slot| drop(slot.task.take()));
    }

    /// Removes the slot of a member. Its connection stays: only the directory does not list it any more.
    pub fn remove(&self, name: &str) {
        let mut slots = self.lock();
        let Some(slot) = slots.by_name.remove(name) else { return };
        if let Some(idle) = slot.into_idle() {
            slots.keep_idle(idle);
        }
        self.publish(&slots);
    }

    /// Notes the new connection of a slot. Returns whether the slot still is the member's.
    pub fn connected(&self, name: &str, id: SlotId, peer: &Peer) -> bool {
        let mut slots = self.lock();
        let is_current = slots.by_name.get(name).is_some_and(|slot| slot.id == id);
        if is_current {
            slots.connect(name, peer.clone());
            self.publish(&slots);
        }
        is_current
    }

    /// Notes that the connection of a slot is lost. Returns the connection that takes its place, if the member has made
    /// another: it may have seen the loss first.
    pub fn lost(&self, name: &str, id: SlotId) -> Option<Peer> {
        let mut slots = self.lock();
        let slot = slots.by_name.get_mut(name).filter(|slot| slot.id == id)?;
        slot.connected = None;
        let member = slot.member.clone();
        let next = slots.take_idle(&member);
        if let Some(peer) = &next {
            slots.connect(name, peer.clone());
        }
        self.publish(&slots);
        next
    }

    /// Takes a peer that has connected to this side. Returns the slot of its member, if there is one without a
    /// connection. The peer is kept for its member otherwise.
    pub fn accepted(&self, peer: &Peer) -> Option<(Member, SlotId)> {
        let mut slots = self.lock();
        // A fabric may have several names.
        let is_open = |slot: &&Slot| {
            slot.member.incarnation == peer.incarnation()
                && slot.connected.as_ref().is_none_or(|old| !old.peer().is_alive())
        };
        let found = slots.by_name.values().find(is_open).map(|slot| (slot.member.clone(), slot.id));
        match &found {
            Some((member, _)) => {
                slots.connect(&member.name, peer.clone());
                self.publish(&slots);
            }
            None => slots.keep_idle(IdlePeer { member: None, peer: peer.clone() }),
        }
        found
    }

    /// Makes a new epoch if the connected members are others.
    fn publish(&self, slots: &Slots) {
        let members: Vec<_> = slots.by_name.values().filter_map(|slot| slot.connected.clone()).collect();
        self.epochs.send_if_modified(|epoch| {
            let is_same = epoch.members().len() == members.len()
                && epoch.members().iter().zip(&members).all(|(old, new)| Arc::ptr_eq(old, new));
            if !is_same {
                *epoch = Arc::new(Epoch::new(epoch.number() + 1, self.own, members));
            }
            !is_same
        });
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        // No holder panics half way through a change, so a poisoned lock holds good data.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slots {
    fn connect(&mut self, name: &str, peer: Peer) {
        if let Some(slot) = self.by_name.get_mut(name) {
            slot.connected = Some(Arc::new(ConnectedMember::new(slot.member.clone(), peer)));
        }
    }

    fn keep_idle(&mut self, idle: IdlePeer) {
        self.idle.retain(|idle| idle.peer.is_alive());
        if self.idle.len() >= MAX_IDLE {
            self.idle.remove(0);
        }
        self.idle.push(idle);
    }

    /// The latest connection to a member.
    fn take_idle(&mut self, member: &Member) -> Option<Peer> {
        self.idle.retain(|idle| idle.peer.is_alive());
        let place = self.idle.iter().rposition(|idle| idle.is_to(member))?;
        Some(self.idle.remove(place).peer)
    }
}
