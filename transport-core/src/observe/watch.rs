//! Who learns of operations that make no progress.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use super::Dump;
use crate::fabric::{Fabric, FabricInner};
use crate::index::{GroupIndex, Number};
use crate::op::OpId;

/// What a user wants called on a stall.
pub(crate) type StallHook = Arc<dyn Fn(&Dump) + Send + Sync>;

/// The stall settings of a fabric, and the stalls that are not reported yet.
pub(crate) struct Watch {
    /// How long an operation may make no progress.
    pub after: Duration,
    hook: Option<StallHook>,
    fabric: OnceLock<Weak<FabricInner>>,
    /// The engine's rail group, and the operation.
    due: Mutex<Vec<(GroupIndex, OpId)>>,
    /// Whether there may be any: who steps an engine asks at every turn.
    any: AtomicBool,
}

impl Watch {
    pub fn new(after: Duration, hook: Option<StallHook>) -> Self {
        Self { after, hook, fabric: OnceLock::new(), due: Mutex::default(), any: AtomicBool::new(false) }
    }

    /// The fabric that is watched.
    pub fn over(&self, fabric: &Arc<FabricInner>) {
        let _ = self.fabric.set(Arc::downgrade(fabric));
    }

    /// An engine found a stall: to be reported once.
    #[cold]
    pub fn found(&self, group: GroupIndex, op: OpId) {
        self.lock().push((group, op));
        self.any.store(true, Ordering::Release);
    }

    /// Reports on a thread of its own: an engine must not wait for a user's hook.
    #[cold]
    pub fn report_apart(self: &Arc<Self>) {
        let watch = Arc::clone(self);
        let spawned = std::thread::Builder::new().name("mr-stall".into()).spawn(move || watch.report());
        if let Err(error) = spawned {
            tracing::warn!(%error, "operations stall, and no thread could be started to report them");
        }
    }

    /// Reports what is due, in this thread.
    #[inline(always)]
    pub fn report(&self) {
        if self.any.load(Ordering::Acquire) {
            self.report_due();
        }
    }

    #[cold]
    fn report_due(&self) {
        // What is found after this sets it again.
        self.any.store(false, Ordering::Release);
        let due = std::mem::take(&mut *self.lock());
        if due.is_empty() {
            return;
        }
        let Some(fabric) = self.fabric.get().and_then(Weak::upgrade).map(Fabric) else { return };
        let dump = fabric.dump();
        // The user may close the fabric in the hook, or wait for its end.
        drop(fabric);
        // A dump has a part per rail group.
        for (place, part) in dump.transports.iter().enumerate() {
            let group = GroupIndex::new(place);
            for operation in part.operations.iter().filter(|op| due.contains(&(group, op.id))) {
                tracing::warn!(transport = %part.label, op = %operation.id, "stalled: {operation}");
            }
        }
        if let Some(hook) = &self.hook {
            hook(&dump);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(GroupIndex, OpId)>> {
        // No holder panics half way through a change: poison carries no news.
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
