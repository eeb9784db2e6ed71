//! An engine's part of a dump. The engine's own thread takes it.

use std::collections::{HashMap, VecDeque};

use crate::Engine;
use crate::op::OpId;
use crate::operation::{ActiveOp, Revocation};
use crate::peer::LinkState;
use crate::rail::Rail;
use crate::spi::WorkKind;
use crate::trace::{OperationDump, OperationKind, RailShare, WaitReason};
use crate::{Error, Time};

/// The most operations that [`RecentFailures`] keeps.
const MAX_RECENT_FAILURES: usize = 16;

/// An engine at one moment.
#[derive(Default)]
pub struct Snapshot {
    /// Per rail: the outstanding requests, the depth of the send queue, and whether the device is lost.
    pub rails: Vec<(u64, u64, bool)>,
    /// The receives that the device holds.
    pub receives: u64,
    pub operations: Vec<OperationDump>,
    pub recent_failures: VecDeque<OperationDump>,
}

/// The last operations that failed because the connection to their peer ended, as they were at that moment.
#[derive(Default)]
pub(crate) struct RecentFailures(VecDeque<OperationDump>);

/// Describes the operations of an engine at one moment.
struct Describer<'a> {
    engine: &'a Engine,
    now: Time,
    /// Per rail: the outstanding requests of each operation, by its index in the op table.
    outstanding: Vec<HashMap<u32, u64>>,
    /// The requests of broken paths that wait for a fence, by rail and operation.
    lost: HashMap<(usize, u32), u64>,
}

impl Snapshot {
    /// Describes everything that an engine has not ended.
    pub fn of(engine: &Engine) -> Self {
        let describer = Describer::new(engine);
        let active = engine.active.iter().flatten().map(|active| describer.active(active));
        let revocations = engine.revocations.iter().filter_map(|revocation| describer.revocation(revocation));
        let receives = engine.receives.operations().map(|(op, len, rail, posted, submitted_at)| {
            describer.receive(op, len, (rail, posted), submitted_at)
        });
        let mut operations: Vec<_> = active.chain(revocations).chain(receives).collect();
        operations.sort_by_key(|operation| operation.id.index);
        let rails = engine.rails.iter().zip(&describer.outstanding);
        let rails = rails
            .map(|(rail, outstanding)| (outstanding.values().sum(), rail.depth as u64, rail.lost.is_some()));
        Self {
            rails: rails.collect(),
            receives: engine.receives.posted() as u64,
            operations,
            recent_failures: engine.recent_failures.0.clone(),
        }
    }
}

impl RecentFailures {
    /// Adds descriptions of failed operations. Drops the oldest ones if there are too many.
    pub fn add(&mut self, mut failed: VecDeque<OperationDump>) {
        self.0.append(&mut failed);
        self.0.drain(..self.0.len().saturating_sub(MAX_RECENT_FAILURES));
    }

    /// Describes the operations of a link that is about to fail with `error`.
    pub fn describe(engine: &Engine, link: u32, error: &Error) -> VecDeque<OperationDump> {
        let fails = |active: &&ActiveOp| active.link == link && !active.expired;
        if !engine.active.iter().flatten().any(|active| fails(&active)) {
            return VecDeque::new();
        }
        let describer = Describer::new(engine);
        let of_link = engine.active.iter().flatten().filter(fails).take(MAX_RECENT_FAILURES);
        of_link
            .map(|active| OperationDump { ending: Some(error.kind()), ..describer.active(active) })
            .collect()
    }
}

impl<'a> Describer<'a> {
    fn new(engine: &'a Engine) -> Self {
        let count = |rail: &Rail| {
            rail.inflight.unacknowledged().fold(HashMap::new(), |mut counts, posted| {
                *counts.entry(posted.op).or_default() += 1;
                counts
            })
        };
        let lost = engine.links.iter().flatten().flat_map(LinkState::broken_paths);
        let lost = lost.flat_map(|path| path.lost.iter().map(|posted| (path.rail, posted.op)));
        Self {
            engine,
            now: engine.clock.now(),
            outstanding: engine.rails.iter().map(count).collect(),
            lost: lost.fold(HashMap::new(), |mut counts, lost| {
                *counts.entry(lost).or_default() += 1;
                counts
            }),
        }
    }

    fn active(&self, active: &ActiveOp) -> OperationDump {
        let work = &active.work;
        let mut rails = Vec::new();
        let trigger = active.trigger.as_ref();
        let mut waits: Vec<_> = trigger
            .map(|trigger| WaitReason::Trigger { value: trigger.value(), now: trigger.now() })
            .into_iter()
            .collect();
        if active.is_elsewhere
            && let Some(continuation) = self.engine.handle.continuation_of(active.id)
        {
            let transport = continuation.engine().label.clone();
            waits.push(WaitReason::OtherGroup { transport, rest: continuation.rest() });
        }
        for (rail, share) in active.rails.iter().enumerate() {
            let requests =
                self.outstanding.get(rail).and_then(|counts| counts.get(&active.id.index)).copied();
            let (requests, unposted) = (requests.unwrap_or(0), u64::from(share.left()));
            let (number, device) = self.name(rail);
            if requests > 0 {
                waits.push(WaitReason::Completion { rail: number, device: device.clone(), requests });
            }
            let lost = self.lost.get(&(rail, active.id.index)).copied().unwrap_or(0);
            if lost > 0 {
                waits.push(WaitReason::Fence { rail: number, device: device.clone(), requests: lost });
            }
            if unposted > 0 && trigger.is_none() {
                waits.push(self.why_unposted(active, rail));
            }
            if requests + lost + unposted > 0 {
                rails.push(RailShare { rail: number, device, unposted, outstanding: requests + lost });
            }
        }
        OperationDump {
            peer: Some(active.peer.name()),
            bytes: work.bytes(),
            imm: work.imm,
            idle: self.now.since(active.last_progress()),
            left: Some(active.deadline.since(self.now)),
            ending: active.error.as_ref().map(Error::kind),
            rails,
            waits,
            stalled: active.stalled,
            ..self.blank(active.id, work.operation_kind(), active.submitted_at)
        }
    }

    /// Why an operation has pieces on a rail that are not posted.
    fn why_unposted(&self, active: &ActiveOp, rail: usize) -> WaitReason {
        let (this, share) = (&self.engine.rails[rail], &active.rails[rail]);
        let (rail, device) = self.name(rail);
        match active.work.kind {
            _ if active.waits_for_credit && !share.queued => {
                WaitReason::Grant { rail, device, of: active.missing_credit(self.engine.handle.group) }
            }
            _ if this.queue.is_paused(active.link) => WaitReason::PeerResponse { rail, device },
            _ if this.free_send_slots() == 0 => {
                WaitReason::SendQueue { rail, device, depth: this.depth as u64 }
            }
            WorkKind::Send if share.refused_by_endpoint => WaitReason::PeerReceive { rail, device },
            _ if share.refused_by_endpoint => WaitReason::PeerQueue { rail, device },
            _ if this.is_window_full(active.piece_bytes()) => {
                WaitReason::Window { rail, device, bytes: this.inflight.cost_in_flight() }
            }
            _ => WaitReason::Turn { rail, device, ahead: this.queue.len().saturating_sub(1) as u64 },
        }
    }

    /// Describes a revocation that an operation waits for.
    fn revocation(&self, revocation: &Revocation) -> Option<OperationDump> {
        let wait = if revocation.is_in_use() { WaitReason::LocalUse } else { WaitReason::PeerCopy };
        Some(OperationDump {
            bytes: revocation.region.len(),
            left: Some(revocation.deadline.since(self.now)),
            waits: vec![wait],
            stalled: revocation.stalled,
            ..self.blank(revocation.id?, OperationKind::Revoke, revocation.submitted_at)
        })
    }

    fn receive(
        &self,
        op: OpId,
        len: u64,
        (rail, posted): (usize, bool),
        submitted_at: Time,
    ) -> OperationDump {
        let (rail, device) = self.name(rail);
        let wait = match posted {
            true => WaitReason::Message { rail, device },
            false => WaitReason::ReceiveQueue { rail, device },
        };
        OperationDump {
            bytes: len,
            waits: vec![wait],
            ..self.blank(op, OperationKind::Receive, submitted_at)
        }
    }

    /// The number of a rail, and the name of its device.
    fn name(&self, rail: usize) -> (u32, String) {
        (self.engine.rail_number(rail).into(), self.engine.handle.devices[rail].clone())
    }

    fn blank(&self, id: OpId, kind: OperationKind, submitted_at: Time) -> OperationDump {
        OperationDump {
            id,
            transport: self.engine.handle.label.clone(),
            kind,
            peer: None,
            bytes: 0,
            imm: None,
            age: self.now.since(submitted_at),
            idle: self.now.since(submitted_at),
            left: None,
            ending: None,
            rails: Vec::new(),
            waits: Vec::new(),
            stalled: false,
        }
    }
}
