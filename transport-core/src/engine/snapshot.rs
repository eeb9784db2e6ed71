//! The engine's part of a dump, on its own thread: who is under way and waits for what.

use std::collections::{HashMap, VecDeque};

use super::active::Active;
use super::receive::RAIL as MESSAGES;
use super::{Engine, Revoking};
use crate::observe::{OperationDump, OperationKind, RailShare, Wait};
use crate::op::OpId;
use crate::peer::PeerInner;
use crate::spi::WorkKind;
use crate::{Error, Time};

/// Operations kept that a peer's end cut short.
const CASUALTIES: usize = 16;

/// What an engine answers to a dump.
#[derive(Default)]
pub(crate) struct Snapshot {
    /// Per rail: outstanding, depth, whether it is lost.
    pub rails: Vec<(u64, u64, bool)>,
    pub receives: u64,
    pub operations: Vec<OperationDump>,
    pub casualties: VecDeque<OperationDump>,
}

/// Requests outstanding on each rail, by operation.
type Outstanding = Vec<HashMap<u32, u64>>;

impl Engine {
    /// Everything under way at this moment.
    pub fn snapshot(&self) -> Snapshot {
        let now = self.clock.now();
        let outstanding = self.outstanding_by_operation();
        let posted = |rail: usize| outstanding[rail].values().sum();
        let running = self.active.iter().flatten().map(|active| self.describe(active, &outstanding, now));
        let revoking = self.revoking.iter().filter_map(|revoking| self.describe_revoke(revoking, now));
        let receives = self.receives.operations().map(|(op, len, posted, begun)| {
            let (rail, device) = (self.numbered(MESSAGES).into(), self.handle.devices[MESSAGES].clone());
            let wait =
                if posted { Wait::Message { rail, device } } else { Wait::ReceiveQueue { rail, device } };
            OperationDump {
                bytes: len,
                waits: vec![wait],
                ..self.blank(op, OperationKind::Receive, begun, now)
            }
        });
        let mut operations: Vec<_> = running.chain(revoking).chain(receives).collect();
        operations.sort_by_key(|operation| operation.id.index);
        Snapshot {
            rails: self
                .rails
                .iter()
                .enumerate()
                .map(|(at, rail)| (posted(at), rail.depth as u64, rail.lost.is_some()))
                .collect(),
            receives: self.receives.posted() as u64,
            operations,
            casualties: self.casualties.clone(),
        }
    }

    /// Keeps how the operations of a link stand that is about to fail.
    pub(super) fn keep_casualties(&mut self, link: u32, error: &Error) {
        let cut_short = |active: &&Active| active.link == link && !active.expired;
        if !self.active.iter().flatten().any(|active| cut_short(&active)) {
            return;
        }
        let (now, outstanding) = (self.clock.now(), self.outstanding_by_operation());
        let of_link = self.active.iter().flatten().filter(cut_short).take(CASUALTIES);
        let mut kept: VecDeque<_> = of_link.map(|active| self.describe(active, &outstanding, now)).collect();
        kept.iter_mut().for_each(|operation| operation.ending = Some(error.kind()));
        self.casualties.append(&mut kept);
        self.casualties.drain(..self.casualties.len().saturating_sub(CASUALTIES));
    }

    fn outstanding_by_operation(&self) -> Outstanding {
        let count = |rail: &super::Rail| {
            rail.posted.unacknowledged().fold(HashMap::new(), |mut counts, (_, op)| {
                *counts.entry(op).or_default() += 1;
                counts
            })
        };
        self.rails.iter().map(count).collect()
    }

    fn describe(&self, active: &Active, outstanding: &Outstanding, now: Time) -> OperationDump {
        let work = &active.work;
        let mut rails = Vec::new();
        let trigger = active.trigger.as_ref();
        let mut waits: Vec<_> =
            trigger.map(|it| Wait::Trigger { value: it.value(), now: it.now() }).into_iter().collect();
        for (rail, share) in active.rails.iter().enumerate() {
            let requests = outstanding.get(rail).and_then(|counts| counts.get(&active.id.index)).copied();
            let (requests, unposted) = (requests.unwrap_or(0), u64::from(share.left()));
            let (number, device) = (u32::from(self.numbered(rail)), self.handle.devices[rail].clone());
            if requests > 0 {
                waits.push(Wait::Completion { rail: number, device: device.clone(), requests });
            }
            if unposted > 0 && trigger.is_none() {
                waits.push(self.why_unposted(active, rail));
            }
            if requests + unposted > 0 {
                rails.push(RailShare { rail: number, device, unposted, outstanding: requests });
            }
        }
        OperationDump {
            peer: Some(active.peer.name()),
            bytes: work.bytes(),
            imm: work.imm,
            idle: now.since(active.moved),
            left: Some(active.deadline.since(now)),
            ending: active.error.as_ref().map(Error::kind),
            rails,
            waits,
            stalled: active.stalled,
            ..self.blank(active.id, super::active::kind_of(work), active.begun, now)
        }
    }

    fn why_unposted(&self, active: &Active, rail: usize) -> Wait {
        let (this, share) = (&self.rails[rail], &active.rails[rail]);
        let (rail, device) = (self.numbered(rail).into(), self.handle.devices[rail].clone());
        match active.work.kind {
            _ if active.parked && !share.queued => {
                Wait::Grant { rail, device, of: active.lacks(self.handle.group) }
            }
            _ if this.rotation.holds(active.link) => Wait::Answer { rail, device },
            _ if this.credits() == 0 => Wait::SendQueue { rail, device, depth: this.depth as u64 },
            WorkKind::Send if share.held => Wait::PeerReceive { rail, device },
            _ if share.held => Wait::PeerLane { rail, device },
            _ if this.is_window_full(active.piece()) => {
                Wait::Window { rail, device, bytes: this.posted.charged() }
            }
            _ => Wait::Turn { rail, device, ahead: this.rotation.len().saturating_sub(1) as u64 },
        }
    }

    /// Describes a revocation that somebody waits for.
    fn describe_revoke(&self, revoking: &Revoking, now: Time) -> Option<OperationDump> {
        Some(OperationDump {
            bytes: revoking.region.len,
            left: Some(revoking.deadline.since(now)),
            waits: vec![if revoking.is_in_use() { Wait::LocalUse } else { Wait::Copy }],
            stalled: revoking.stalled,
            ..self.blank(revoking.id?, OperationKind::Revoke, revoking.begun, now)
        })
    }

    fn blank(&self, id: OpId, kind: OperationKind, begun: Time, now: Time) -> OperationDump {
        OperationDump {
            id,
            transport: self.handle.label.clone(),
            kind,
            peer: None,
            bytes: 0,
            imm: None,
            age: now.since(begun),
            idle: now.since(begun),
            left: None,
            ending: None,
            rails: Vec::new(),
            waits: Vec::new(),
            stalled: false,
        }
    }
}

impl PeerInner {
    /// Its number as the flight recorder has it.
    pub(super) fn short_id(&self) -> u32 {
        self.id.0.get() as u32
    }
}
