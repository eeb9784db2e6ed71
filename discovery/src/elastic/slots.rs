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
    /// Connected peers that the directory does not list: not yet, or not any more.
    idle: Vec<Peer>,
}

/// One member that the directory lists.
struct Slot {
    id: SlotId,
    member: Member,
    connected: Option<Arc<ConnectedMember>>,
    task: Option<AbortOnDrop<()>>,
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

    /// Makes the slot of a member, in the place of a former one. Takes a connected peer of the same incarnation, if there
    /// is one.
    pub fn insert(&self, member: &Member) -> (SlotId, Option<Peer>) {
        let mut slots = self.lock();
        slots.next += 1;
        let id = SlotId(slots.next);
        if let Some(former) = slots.by_name.remove(&member.name) {
            let is_restarted = former.member.incarnation != member.incarnation;
            if let Some(connected) = former.connected {
                match is_restarted {
                    // Its process is gone, or another has its name.
                    true => connected.peer().disconnect(),
                    false => slots.keep_idle(connected.peer().clone()),
                }
            }
        }
        let peer = slots.take_idle(member.incarnation);
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
        if let Some(connected) = slot.connected {
            slots.keep_idle(connected.peer().clone());
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

    /// Notes that the connection of a slot is lost.
    pub fn lost(&self, name: &str, id: SlotId) {
        let mut slots = self.lock();
        if let Some(slot) = slots.by_name.get_mut(name).filter(|slot| slot.id == id) {
            slot.connected = None;
            self.publish(&slots);
        }
    }

    /// Takes a peer that has connected to this side. Returns the slot of its member, if there is one and it has no
    /// connection. The peer is kept for its member otherwise.
    pub fn accepted(&self, peer: &Peer) -> Option<(Member, SlotId)> {
        let mut slots = self.lock();
        let incarnation = peer.incarnation();
        let is_its = |slot: &&Slot| slot.member.incarnation == incarnation;
        let found = slots.by_name.values().find(is_its).map(|slot| {
            (slot.member.clone(), slot.id, slot.connected.as_ref().is_some_and(|old| old.peer().is_alive()))
        });
        match found {
            Some((member, id, false)) => {
                slots.connect(&member.name, peer.clone());
                self.publish(&slots);
                Some((member, id))
            }
            _ => {
                slots.keep_idle(peer.clone());
                None
            }
        }
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

    fn keep_idle(&mut self, peer: Peer) {
        self.idle.retain(Peer::is_alive);
        if self.idle.len() >= MAX_IDLE {
            self.idle.remove(0);
        }
        self.idle.push(peer);
    }

    fn take_idle(&mut self, incarnation: u64) -> Option<Peer> {
        self.idle.retain(Peer::is_alive);
        let place = self.idle.iter().position(|peer| peer.incarnation() == incarnation)?;
        Some(self.idle.remove(place))
    }
}
