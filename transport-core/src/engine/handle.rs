//! What other threads hold of an engine: its op table, its queues, its doorbell.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, TryLockError, Weak};

use crossbeam_queue::{ArrayQueue, SegQueue};
use tokio::sync::oneshot;

use super::alarms::Alarms;
use super::{Engine, RailCounts, Snapshot, Work};
use crate::fabric::Posting;
use crate::grant::Ledger;
use crate::index::{GroupIndex, TransportIndex};
use crate::observe::{Recorder, Watch};
use crate::op::{OpId, OpTable};
use crate::peer::PeerInner;
use crate::pool::PoolPart;
use crate::region::RegionInner;
use crate::{Error, ErrorKind, PeerId, Result, Time, Trigger, WakeupHandle};

/// A checked operation on its way to the worker. A plain value, never boxed.
pub(crate) struct Submission {
    pub id: OpId,
    pub peer: Arc<PeerInner>,
    /// When it was submitted.
    pub begun: Time,
    /// What it waits for before it begins.
    pub trigger: Option<Trigger>,
    pub deadline: Time,
    pub work: Work,
    /// Disabled, and then a few words of nothing, unless a subscriber wants it.
    pub span: tracing::Span,
}

/// Everything rarer than a submission.
pub(crate) enum Control {
    /// A peer was admitted; its link on this engine's transport.
    Link { peer: Arc<PeerInner> },
    /// A peer is gone.
    Unlink { peer: PeerId, error: Error },
    /// The waiter wants an operation stopped.
    Cancel(OpId),
    /// One receive, answered through the op table.
    Receive { id: OpId, region: Arc<RegionInner>, offset: u64, len: u64 },
    /// One buffer of a pool, to be posted again.
    PoolReceive { pool: Arc<PoolPart>, buffer: u32 },
    /// A pool was dropped: take its receives back.
    PoolClosed { pool: Arc<PoolPart> },
    /// End what uses a region here, take its keys back, and wait until it is quiet. Without an `id` nobody waits.
    Revoke { id: Option<OpId>, region: Arc<RegionInner>, deadline: Time },
    /// Wait until what was submitted to a peer is over.
    Drain { peer: PeerId, deadline: Time, done: oneshot::Sender<Result<()>> },
    /// The peer of a link has granted more.
    Granted { link: u32 },
    /// A peer is to be granted anew.
    Regrant { link: u32, peer: PeerId },
    /// A question to the peer of a link is over.
    Answered { link: u32, peer: PeerId },
    /// Somebody is to be woken then.
    Alarm { at: Time },
    /// Somebody wants to know what is going on; a channel of one, never waited for.
    Dump { answer: SyncSender<Snapshot> },
}

/// The part of an engine that is shared.
pub(crate) struct EngineHandle {
    /// Its transport.
    pub transport: TransportIndex,
    /// The rail group that it drives, and so the number of its link among a peer's.
    pub group: GroupIndex,
    /// Its first rail among those of the transport.
    pub first_rail: usize,
    pub posting: Posting,
    /// Its label, and the names of its rails' devices.
    pub label: String,
    pub devices: Vec<String>,
    pub table: OpTable,
    pub submissions: ArrayQueue<Submission>,
    pub controls: SegQueue<Control>,
    pub counts: Box<[RailCounts]>,
    pub recorder: Recorder,
    pub watch: Arc<Watch>,
    /// What its peers may send it, over all groups of the transport.
    pub ledger: Arc<Ledger>,
    /// The worker sleeps: whoever adds work rings.
    pub parked: AtomicBool,
    pub wakeup: WakeupHandle,
    pub hash: AtomicU64,
    pub alarms: Alarms,
    /// Rail that the next operation begins with; the engine's alone to change.
    pub turn: AtomicU32,
    /// Set on a caller-driven fabric: the engine itself, for whoever waits.
    driver: OnceLock<Weak<Mutex<Engine>>>,
    links: Mutex<FreeIndices>,
    /// The engine is gone: what is still queued, nobody else will take.
    closed: AtomicBool,
}

/// What a handle is made of.
pub(crate) struct HandleSetup {
    pub transport: TransportIndex,
    pub group: GroupIndex,
    pub first_rail: usize,
    pub posting: Posting,
    pub label: String,
    pub devices: Vec<String>,
    pub max_operations: usize,
    /// Records of the flight recorder.
    pub records: usize,
    pub watch: Arc<Watch>,
    pub ledger: Arc<Ledger>,
}

#[derive(Default)]
struct FreeIndices {
    free: Vec<u32>,
    next: u32,
}

impl EngineHandle {
    pub fn new(setup: HandleSetup, wakeup: WakeupHandle) -> Self {
        let table = OpTable::new(setup.max_operations);
        Self {
            transport: setup.transport,
            group: setup.group,
            first_rail: setup.first_rail,
            posting: setup.posting,
            counts: setup.devices.iter().map(|_| RailCounts::default()).collect(),
            label: setup.label,
            devices: setup.devices,
            recorder: Recorder::new(setup.records),
            watch: setup.watch,
            ledger: setup.ledger,
            submissions: ArrayQueue::new(table.capacity()),
            table,
            controls: SegQueue::new(),
            parked: AtomicBool::new(false),
            wakeup,
            hash: AtomicU64::new(0),
            alarms: Alarms::default(),
            turn: AtomicU32::new(0),
            driver: OnceLock::new(),
            links: Mutex::default(),
            closed: AtomicBool::new(false),
        }
    }

    pub fn drive_by_caller(&self, engine: &Arc<Mutex<Engine>>) {
        let _ = self.driver.set(Arc::downgrade(engine));
    }

    pub fn is_driven_by_caller(&self) -> bool {
        self.driver.get().is_some()
    }

    /// Takes a slot in the op table.
    pub fn insert(&self, operation: &'static str) -> Result<OpId> {
        self.table.insert().ok_or_else(|| {
            let why = format!(
                "{} operations are under way; await some, or raise max_operations",
                self.table.capacity()
            );
            Error::new(ErrorKind::Busy, operation, why)
        })
    }

    /// Hands an operation to the worker. Where callers drive, one that comes `alone` is taken over in
    /// this thread, unless another one drives this moment or anything is queued: nobody else is there
    /// to do it meanwhile, and who has nothing else under way waits for this.
    #[inline(always)]
    pub fn submit(&self, submission: Submission, alone: bool) {
        if alone
            && let Some(engine) = self.driver.get().and_then(Weak::upgrade)
            && let Ok(mut driven) = engine.try_lock()
            && !self.has_commands()
            && !self.closed.load(Ordering::Relaxed)
        {
            driven.take_over(submission);
            return;
        }
        // As many places as op slots, and every submission holds a slot: there is room.
        let pushed = self.submissions.push(submission);
        debug_assert!(pushed.is_ok());
        self.announce();
    }

    pub fn control(&self, control: Control) {
        self.controls.push(control);
        self.announce();
    }

    fn announce(&self) {
        self.wake();
        // After the fence in `wake`, as `close` fences before it drains: one of us
        // sees the other, and whoever pops a command answers it.
        if self.closed.load(Ordering::Relaxed) {
            self.drain();
        }
    }

    /// The engine takes no more commands; those that still come end at once.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.drain();
    }

    #[cold]
    fn drain(&self) {
        let closed = || Error::new(ErrorKind::Closed, "submit", "the fabric was closed");
        while let Some(submission) = self.submissions.pop() {
            if submission.trigger.is_none() {
                submission.peer.links[self.group].backlog.ended(&submission.work);
            }
            let id = submission.id;
            drop(submission);
            self.table.end(id, Err(closed()));
        }
        while let Some(control) = self.controls.pop() {
            match control {
                Control::Receive { id, .. } | Control::Revoke { id: Some(id), .. } => {
                    self.table.end(id, Err(closed()));
                }
                Control::Drain { done, .. } => drop(done.send(Err(closed()))),
                Control::PoolReceive { pool, .. } | Control::PoolClosed { pool } => pool.close(closed()),
                Control::Link { .. }
                | Control::Revoke { id: None, .. }
                | Control::Unlink { .. }
                | Control::Cancel(_)
                | Control::Answered { .. }
                | Control::Alarm { .. }
                | Control::Granted { .. }
                | Control::Regrant { .. }
                | Control::Dump { .. } => {}
            }
        }
    }

    pub fn cancel(&self, id: OpId) {
        self.control(Control::Cancel(id));
    }

    #[inline]
    pub fn has_commands(&self) -> bool {
        !self.submissions.is_empty() || !self.controls.is_empty()
    }

    /// Wakes the worker if it sleeps; costs a fence otherwise.
    pub fn wake(&self) {
        // Pairs with the fence in `worker`: either it sees the command, or we see it parked.
        fence(Ordering::SeqCst);
        if self.parked.load(Ordering::Relaxed) && self.parked.swap(false, Ordering::AcqRel) {
            self.wakeup.wake();
        }
    }

    /// Takes a turn of a caller-driven engine; false if a worker drives it.
    pub fn drive(&self) -> bool {
        let Some(engine) = self.driver.get().and_then(Weak::upgrade) else { return false };
        match engine.try_lock() {
            Ok(mut engine) => drop(engine.step()),
            Err(TryLockError::Poisoned(engine)) => drop(engine.into_inner().step()),
            // Another thread is driving it this moment.
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
        self.watch.report();
        true
    }

    /// An index for a new link, unique until `release_link`.
    pub fn claim_link(&self) -> u32 {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.free.pop().unwrap_or_else(|| {
            links.next += 1;
            links.next - 1
        })
    }

    pub fn release_link(&self, index: u32) {
        self.links.lock().unwrap_or_else(PoisonError::into_inner).free.push(index);
    }
}
