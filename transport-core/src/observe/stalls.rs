//! How stalled operations are reported to the user.

use std::sync::{Arc, Weak};

use super::Dump;
use crate::engine::trace::Stall;
use crate::fabric::{Fabric, FabricInner};
use crate::index::{GroupIndex, Number};

/// The function that a user wants called when operations stall.
pub(crate) type StallHook = Arc<dyn Fn(&Dump) + Send + Sync>;

/// Logs stalled operations and calls the user's hook, each with a dump of the fabric. Does nothing once the fabric is
/// gone.
pub(crate) fn report_stalls(fabric: &Weak<FabricInner>, hook: Option<&StallHook>, stalls: &[Stall]) {
    let Some(fabric) = fabric.upgrade().map(Fabric) else { return };
    let dump = fabric.dump();
    // Dropped before the hook runs: the user may close the fabric there, or wait for its end.
    drop(fabric);
    // A dump has one part per rail group.
    for (index, part) in dump.transports.iter().enumerate() {
        let group = GroupIndex::new(index);
        for operation in part.operations.iter().filter(|op| stalls.contains(&(group, op.id))) {
            tracing::warn!(transport = %part.label, op = %operation.id, "stalled: {operation}");
        }
    }
    if let Some(hook) = hook {
        hook(&dump);
    }
}
