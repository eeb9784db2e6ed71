//! The part of an engine that other threads use: its op table, its command queues, its wakeup.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::time::Duration;

use crossbeam_queue::{ArrayQueue, SegQueue};

use super::flow_control::ReceiverCredits;
use super::timers::Timers;
use super::trace::{FlightRecorder, StallMonitor};
use super::worker_engines::WorkerEngines;
use super::{Continuation, Control, Engine, OperationCounts, RailCounts, Submission};
use crate::index::{GroupIndex, TransportIndex};
use crate::op::{OpId, OpTable};
use crate::plan::Shape;
use crate::{Error, ErrorKind, Result, WakeupHandle};

/// The requests per doorbell. Chains beyond 4 gained little on mlx5, and Perplexity chose 16 on EFA. With 64 the cost
/// of the virtual call is negligible per request.
const BATCH: usize = 64;

/// Linux adds 50 µs of slack to any sleep: a shorter sleep would cost more and hardly end sooner.
const TRIGGER_NAP: Duration = Duration::from_micros(50);

/// The most bytes of an operation that the calling thread activates while the worker sleeps. A backend that copies by
/// the processor copies them in that call: 64 KiB take about 5 µs.
const MAX_ACTIVATED_BYTES: u64 = 64 << 10;

/// How workers write and post work requests.
#[derive(Debug, Clone, Copy)]
pub struct Posting {
    /// The most requests under one doorbell.
    pub batch: usize,
    /// Whether requests are written when they are posted, not when their operation is activated.
    pub lazy: bool,
    /// The longest sleep between two polls of the triggers that operations wait for.
    pub trigger_nap: Duration,
}

impl Default for Posting {
    fn default() -> Self {
        Self { batch: BATCH, lazy: true, trigger_nap: TRIGGER_NAP }
    }
}

/// The part of an engine that other threads use.
pub struct EngineHandle {
    pub transport: TransportIndex,
    /// The rail group that the engine drives. It is also the index of the engine's link among a peer's links.
    pub group: GroupIndex,
    /// The engine's first rail among the rails of the transport.
    pub first_rail: usize,
    pub posting: Posting,
    /// The transport's label.
    pub transport_label: String,
    /// The transport's label; with several rail groups, followed by the group's number.
    pub label: String,
    /// The names of the rails' devices.
    pub devices: Vec<String>,
    pub table: OpTable,
    pub submissions: ArrayQueue<Submission>,
    pub controls: SegQueue<Control>,
    pub counts: Box<[RailCounts]>,
    pub operations: OperationCounts,
    pub flight_recorder: FlightRecorder,
    pub stall_monitor: Arc<StallMonitor>,
    /// What the transport's peers may send us. All engines of the transport share it.
    pub receiver_credits: Arc<ReceiverCredits>,
    /// Whether the engine carries notifications (bytes for the peer's program, alone or behind a transfer), and no
    /// requests of the user but warm-ups. Then a message counts for the sender's grant only once its buffer is free
    /// again, not when it arrives. So the grants of all peers never exceed the receives that are posted.
    pub for_notifications: bool,
    /// Whether peers send messages over several rails, so that receives are spread over them. Only the engine changes
    /// it.
    pub spreads_receives: AtomicBool,
    /// Whether the worker sleeps. A thread that adds a command then wakes it.
    pub parked: AtomicBool,
    pub wakeup: WakeupHandle,
    /// The engine's event hash after its last step.
    pub hash: AtomicU64,
    pub timers: Timers,
    /// The next operation puts its first pieces on this rail, modulo the number of rails. Only the engine changes it.
    pub next_split_from: AtomicU32,
    /// The rails that are lost or retired, a bit each; of those behind the 64th nothing is known.
    out_of_service: AtomicU64,
    /// The engine itself, on a caller-driven fabric. A thread that waits for an operation drives it.
    caller_driven: OnceLock<Weak<Mutex<Engine>>>,
    /// The engines of the worker, if one drives this engine, and the position of this one among them.
    worker: OnceLock<(Weak<WorkerEngines>, usize)>,
    links: Mutex<LinkIndices>,
    /// The operations whose rest another rail group carries. It empties as they end.
    continued: Mutex<Vec<Arc<Continuation>>>,
    /// Whether `continued` may have entries.
    has_continued: AtomicBool,
    /// Whether the engine takes no more commands. Then the sender ends each command that is still queued.
    closed: AtomicBool,
}

/// The arguments of [`EngineHandle::new`]; see its fields.
pub struct HandleSetup {
    pub transport: TransportIndex,
    pub group: GroupIndex,
    pub first_rail: usize,
    pub posting: Posting,
    pub transport_label: String,
    pub label: String,
    pub devices: Vec<String>,
    pub max_operations: usize,
    /// The number of records that the flight recorder keeps.
    pub records: usize,
    pub stall_monitor: Arc<StallMonitor>,
    pub receiver_credits: Arc<ReceiverCredits>,
    pub for_notifications: bool,
}

#[derive(Default)]
struct LinkIndices {
    free: Vec<u32>,
    next: u32,
}

impl EngineHandle {
    pub fn new(setup: HandleSetup, wakeup: WakeupHandle) -> Self {
        let table = OpTable::new(setup.max_operations, setup.devices.len());
        Self {
            transport: setup.transport,
            group: setup.group,
            first_rail: setup.first_rail,
            posting: setup.posting,
            counts: setup.devices.iter().map(|_| RailCounts::default()).collect(),
            operations: OperationCounts::default(),
            transport_label: setup.transport_label,
            label: setup.label,
            devices: setup.devices,
            flight_recorder: FlightRecorder::new(setup.records),
            stall_monitor: setup.stall_monitor,
            receiver_credits: setup.receiver_credits,
            for_notifications: setup.for_notifications,
            submissions: ArrayQueue::new(table.capacity()),
            table,
            controls: SegQueue::new(),
            spreads_receives: AtomicBool::new(false),
            parked: AtomicBool::new(false),
            wakeup,
            hash: AtomicU64::new(0),
            timers: Timers::default(),
            next_split_from: AtomicU32::new(0),
            out_of_service: AtomicU64::new(0),
            caller_driven: OnceLock::new(),
            worker: OnceLock::new(),
            links: Mutex::default(),
            continued: Mutex::default(),
            has_continued: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    /// Lets threads that wait for an operation drive the engine. Only the first call has an effect.
    pub fn drive_by_caller(&self, engine: &Arc<Mutex<Engine>>) {
        let _ = self.caller_driven.set(Arc::downgrade(engine));
    }

    /// Lets threads that submit an operation hold the engine while its worker sleeps. Only the first call has an
    /// effect.
    pub(crate) fn drive_by_worker(&self, engines: &Arc<WorkerEngines>, position: usize) {
        let _ = self.worker.set((Arc::downgrade(engines), position));
    }

    #[inline]
    pub fn is_driven_by_caller(&self) -> bool {
        self.caller_driven.get().is_some()
    }

    /// Takes a slot in the op table.
    #[inline]
    pub fn insert(&self, operation: &'static str) -> Result<OpId> {
        self.table.insert().ok_or_else(|| {
            let why = format!(
                "{} operations are under way; await some of them, or raise max_operations",
                self.table.capacity()
            );
            Error::new(ErrorKind::Busy, operation, why)
        })
    }

    /// Submits an operation to the engine. `is_only` says that the peer has no other operation under
    /// way.
    ///
    /// On a caller-driven fabric, the calling thread lets the engine activate such an operation at once, unless
    /// another thread drives the engine or commands are queued. No other thread would activate it in the meantime,
    /// and a caller with a single operation waits for just this one. A small operation is also activated at once if the
    /// worker sleeps: its bytes need not wait until that one is awake.
    #[inline(always)]
    pub fn submit(&self, submission: Submission, is_only: bool) {
        if is_only
            && let Some(engine) = self.caller_driven.get().and_then(Weak::upgrade)
            && let Ok(mut engine) = engine.try_lock()
            && !self.has_commands()
            && !self.closed.load(Ordering::Relaxed)
        {
            engine.activate_now(submission);
            return;
        }
        if is_only && self.parked.load(Ordering::Relaxed) {
            self.submit_while_worker_sleeps(submission);
        } else {
            self.push(submission);
        }
    }

    /// Activates a small operation, and then wakes the worker.
    #[cold]
    fn submit_while_worker_sleeps(&self, submission: Submission) {
        // A warm-up has no bytes, and yet may touch megabytes.
        let is_small = submission.work.bytes() <= MAX_ACTIVATED_BYTES
            && !matches!(submission.work.shape, Shape::WarmUp { .. });
        if is_small
            && let Some((engines, position)) = self.worker.get()
            && let Some(engines) = engines.upgrade()
            && let Some(mut turn) = engines.take_turn(*position)
            && !self.has_commands()
        {
            turn.engine().activate_and_post(submission);
            drop(turn);
            self.wake();
        } else {
            self.push(submission);
        }
    }

    /// Queues a submission.
    #[inline(always)]
    fn push(&self, submission: Submission) {
        // Every submission holds a slot of the op table, and the queue is as large as the table: there is room.
        let pushed = self.submissions.push(submission);
        debug_assert!(pushed.is_ok());
        self.after_push();
    }

    /// Sends a command to the engine.
    #[inline]
    pub fn control(&self, control: Control) {
        self.controls.push(control);
        self.after_push();
    }

    /// As [`EngineHandle::control`], for a command that waits until the worker wakes for another reason, unless
    /// `is_due`.
    ///
    /// `is_due` reads what the engine alone changes. It is asked once the command is queued, behind a fence that pairs
    /// with the one in `worker`: if the worker goes to sleep without the command, `is_due` reads what holds while the
    /// worker sleeps.
    pub fn control_later(&self, control: Control, is_due: impl FnOnce() -> bool) {
        self.controls.push(control);
        fence(Ordering::SeqCst);
        if is_due() {
            self.wake();
        }
        // As in `after_push`.
        if self.closed.load(Ordering::Relaxed) {
            self.end_queued();
        }
    }

    /// Wakes the worker. If the engine is closed, ends the command that was just pushed.
    fn after_push(&self) {
        self.wake();
        // The load comes after the fence in `wake`, and `close` has a fence between its store and its drain. So either
        // this thread sees the store, or `close` sees the command. The one that pops the command ends it.
        if self.closed.load(Ordering::Relaxed) {
            self.end_queued();
        }
    }

    /// Takes no more commands. The commands that are queued, and all later ones, end at once.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.end_queued();
    }

    /// Ends all queued commands with `Closed`.
    #[cold]
    fn end_queued(&self) {
        let closed = Self::closed_error;
        while let Some(submission) = self.submissions.pop() {
            if submission.trigger.is_none() {
                submission.peer.links[self.group].backlog.remove(submission.work.backlog_weight());
            }
            let id = submission.id;
            submission.work.note_failed();
            drop(submission);
            self.table.finish(id, Err(closed()));
        }
        while let Some(control) = self.controls.pop() {
            match control {
                Control::Receive { id, .. } | Control::Revoke { id: Some(id), .. } => {
                    self.table.finish(id, Err(closed()));
                }
                Control::Drain { done, .. } | Control::RetireRail { done, .. } => done.send(Err(closed())),
                Control::PoolReceive { pool, .. } | Control::PoolClosed { pool } => pool.close(closed()),
                Control::Continued(continuation) => {
                    if continuation.poll().is_some() {
                        self.remove_continuation(&continuation);
                        self.table.finish(continuation.first(), Err(closed()));
                    }
                }
                Control::Link { .. }
                | Control::Revoke { id: None, .. }
                | Control::Unlink { .. }
                | Control::RestoreRail { .. }
                | Control::Cancel(_)
                | Control::Start(_)
                | Control::ProbeEnded { .. }
                | Control::Fence { .. }
                | Control::Fenced { .. }
                | Control::MessagesPosted { .. }
                | Control::Timer { .. }
                | Control::GrantReceived { .. }
                | Control::RenewGrant { .. }
                | Control::Dump { .. } => {}
            }
        }
    }

    /// The error of what a closed engine does not do.
    #[cold]
    pub(crate) fn closed_error() -> Error {
        Error::new(ErrorKind::Closed, "submit", "the fabric was closed")
    }

    /// Cancels an operation.
    pub fn cancel(&self, id: OpId) {
        self.control(Control::Cancel(id));
    }

    #[inline]
    pub fn has_commands(&self) -> bool {
        !self.submissions.is_empty() || !self.controls.is_empty()
    }

    /// Wakes the worker if it sleeps. If not, this costs one fence.
    #[inline]
    pub fn wake(&self) {
        // Pairs with the fence in `worker`: either the worker sees the command, or this thread sees `parked`.
        fence(Ordering::SeqCst);
        if self.parked.load(Ordering::Relaxed) && self.parked.swap(false, Ordering::AcqRel) {
            self.wakeup.wake();
        }
    }

    /// Whether a rail is lost or retired.
    #[inline]
    pub fn is_out_of_service(&self, rail: usize) -> bool {
        rail < 64 && self.out_of_service.load(Ordering::Relaxed) & (1 << rail) != 0
    }

    /// Notes whether a rail is lost or retired.
    #[cold]
    pub fn set_out_of_service(&self, rail: usize, is_out: bool) {
        if rail < 64 {
            match is_out {
                true => self.out_of_service.fetch_or(1 << rail, Ordering::Relaxed),
                false => self.out_of_service.fetch_and(!(1 << rail), Ordering::Relaxed),
            };
        }
    }

    /// Steps a caller-driven engine once, and those that carry the rest of its operations. Returns false if a worker
    /// drives the engine.
    pub fn drive(&self) -> bool {
        if self.has_continued.load(Ordering::Relaxed) {
            self.drive_continued();
        }
        self.drive_alone()
    }

    /// Steps the engines that carry the rest of this engine's operations, and those that carry the rest of that.
    #[cold]
    fn drive_continued(&self) {
        let mut engines: Vec<Arc<Self>> = Vec::new();
        let add_of = |engine: &Self, engines: &mut Vec<Arc<Self>>| {
            for continuation in engine.lock_continued().iter() {
                let next = continuation.engine();
                if !engines.iter().any(|known| Arc::ptr_eq(known, next)) {
                    engines.push(Arc::clone(next));
                }
            }
        };
        add_of(self, &mut engines);
        let mut index = 0;
        while let Some(engine) = engines.get(index).cloned() {
            add_of(&engine, &mut engines);
            index += 1;
        }
        for engine in engines.iter().filter(|engine| !std::ptr::eq(&***engine, self)) {
            engine.drive_alone();
        }
    }

    fn drive_alone(&self) -> bool {
        let Some(engine) = self.caller_driven.get().and_then(Weak::upgrade) else { return false };
        match engine.try_lock() {
            Ok(mut engine) => drop(engine.step()),
            Err(TryLockError::Poisoned(engine)) => drop(engine.into_inner().step()),
            // Another thread is driving the engine.
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
        self.stall_monitor.report();
        true
    }

    // ---- operations whose rest another rail group carries ----

    /// Adds a continuation of one of this engine's operations.
    #[cold]
    pub(crate) fn add_continuation(&self, continuation: Arc<Continuation>) {
        self.lock_continued().push(continuation);
        self.has_continued.store(true, Ordering::Relaxed);
    }

    /// Removes a continuation that has ended.
    #[cold]
    pub(crate) fn remove_continuation(&self, ended: &Arc<Continuation>) {
        let mut continued = self.lock_continued();
        continued.retain(|known| !Arc::ptr_eq(known, ended));
        self.has_continued.store(!continued.is_empty(), Ordering::Relaxed);
    }

    /// The continuation of an operation, if another rail group carries its rest.
    #[cold]
    pub(crate) fn continuation_of(&self, first: OpId) -> Option<Arc<Continuation>> {
        self.lock_continued().iter().find(|continuation| continuation.first() == first).cloned()
    }

    /// All continuations.
    #[cold]
    pub(crate) fn continuations(&self) -> Vec<Arc<Continuation>> {
        self.lock_continued().clone()
    }

    fn lock_continued(&self) -> MutexGuard<'_, Vec<Arc<Continuation>>> {
        // Each change is one call, so a poisoned lock still guards a valid list.
        self.continued.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates an index for a new link. It is unique until [`EngineHandle::release_link`].
    pub fn allocate_link(&self) -> u32 {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        links.free.pop().unwrap_or_else(|| {
            links.next += 1;
            links.next - 1
        })
    }

    /// Frees the index of a link.
    pub fn release_link(&self, index: u32) {
        self.links.lock().unwrap_or_else(PoisonError::into_inner).free.push(index);
    }
}

#[cfg(test)]
impl EngineHandle {
    /// A handle without an engine: the test completes the operations.
    pub(crate) fn without_engine() -> Arc<Self> {
        use crate::flow_control::EvenShares;

        let wakeup = crate::WakeupPipe::new().unwrap().handle().try_clone().unwrap();
        let receiver_credits = ReceiverCredits::new("none".into(), u64::MAX, 1, Arc::new(EvenShares));
        let setup = HandleSetup {
            transport: TransportIndex::FIRST,
            group: GroupIndex::FIRST,
            first_rail: 0,
            posting: Posting::default(),
            transport_label: "none".into(),
            label: "none".into(),
            devices: Vec::new(),
            max_operations: 8,
            records: 1,
            stall_monitor: Arc::new(StallMonitor::new(Duration::MAX)),
            receiver_credits: Arc::new(receiver_credits),
            for_notifications: false,
        };
        Arc::new(Self::new(setup, wakeup))
    }
}

#[cfg(all(test, not(multirail_loom)))]
mod tests {
    use super::*;
    use crate::Time;

    #[test]
    fn a_command_that_can_wait_wakes_the_worker_only_if_it_is_due_once_it_is_queued() {
        let handle = EngineHandle::without_engine();
        for is_due in [false, true] {
            handle.parked.store(true, Ordering::Relaxed);
            handle.control_later(Control::Timer { at: Time::NEVER }, || {
                assert!(handle.controls.pop().is_some(), "asked before the command is queued");
                is_due
            });
            assert_eq!(handle.parked.load(Ordering::Relaxed), !is_due);
        }
    }
}
