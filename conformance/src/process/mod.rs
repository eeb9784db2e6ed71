//! Helper processes: the test's own program, started again to run commands of the trial.
//!
//! [`helper_process`] is the parent's handle, and [`helper_commands`] is the helper's side. They exchange
//! lines over the helper's standard input and output. [`proxy`] forwards the control connection of two
//! fabrics. `ResourceUsage` counts the resources of a process.

mod connected_pair;
mod helper_commands;
mod helper_process;
mod proxy;

use std::sync::Arc;
use std::time::Duration;

use limit::stretched;
use transport_core::{Fabric, FabricBuilder, Grant, GrantPolicy, GrantRequest, Token};

pub(crate) use connected_pair::{ConnectedPair, drop_kept_pair};
pub use helper_commands::is_helper;
pub(crate) use helper_commands::{notification, permutation, run_if_helper};
pub(crate) use helper_process::HelperProcess;
pub(crate) use helper_process::ResourceUsage;
pub(crate) use proxy::Proxy;

use crate::backend_under_test::TransferSide;
use crate::check::TestResult;
use crate::sim_harness::{Options, builder};
use crate::trial::{TrialContext, TrialFabric};

/// The heartbeat interval of fabrics in process trials.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(100);
/// The peer timeout of a [`short_timeout_fabric`].
const PEER_TIMEOUT: Duration = Duration::from_millis(600);
/// The limit of any single step of a process trial. A longer step counts as a hang.
pub(crate) const LIMIT: Duration = limit::HANG;
/// The deadline of operations, and the peer timeout: so long that it passes in no trial.
const DEADLINE: Duration = Duration::from_secs(600);
/// The least memory for notifications that a fabric takes.
pub(crate) const NOTIFICATION_MEMORY: usize = 4 << 20;

/// A fabric with workers, in real time, whose peer timeout never passes: the close of a peer is an event,
/// even on a busy machine.
#[track_caller]
pub(crate) fn worker_fabric(context: &TrialContext) -> TestResult<TrialFabric> {
    Ok(on_own_side(context, workers(context)?.heartbeat(HEARTBEAT).peer_timeout(DEADLINE).open()?))
}

/// A fabric with workers, in real time, with a peer timeout of [`PEER_TIMEOUT`]. The timeout is scaled to how
/// busy the machine is, because a healthy peer is silent for longer on a busy machine.
#[track_caller]
pub(crate) fn short_timeout_fabric(context: &TrialContext) -> TestResult<TrialFabric> {
    let timeout = stretched(PEER_TIMEOUT);
    Ok(on_own_side(context, workers(context)?.heartbeat(HEARTBEAT).peer_timeout(timeout).open()?))
}

/// A fabric with workers, in real time, with the library's default heartbeat and peer timeout.
#[track_caller]
pub(crate) fn default_fabric(context: &TrialContext) -> TestResult<TrialFabric> {
    Ok(on_own_side(context, workers(context)?.open()?))
}

/// Like [`default_fabric`], with two rail groups on each of these transports. The fabric grants each peer `windows`.
#[track_caller]
pub(crate) fn multi_transport_fabric(
    context: &TrialContext,
    labels: &[&str],
    windows: Grant,
) -> TestResult<TrialFabric> {
    let options = Options {
        labels,
        rails: Some(2),
        group_per_rail: true,
        grant_policy: Some(Arc::new(Fixed(windows))),
        ..Options::default()
    };
    Ok(on_own_side(context, workers_of(context, options)?.open()?))
}

/// Grants every peer the same windows.
struct Fixed(Grant);

impl GrantPolicy for Fixed {
    fn grant(&self, _: &GrantRequest<'_>) -> Grant {
        self.0
    }
}

/// Like [`worker_fabric`], with notifications.
#[track_caller]
pub(crate) fn notifying_fabric(context: &TrialContext) -> TestResult<TrialFabric> {
    let options = Options { notifications: Some(NOTIFICATION_MEMORY), ..Options::default() };
    let builder = workers_of(context, options)?.heartbeat(HEARTBEAT).peer_timeout(DEADLINE);
    Ok(on_own_side(context, builder.open()?))
}

/// Like [`default_fabric`], for peers with this token only.
#[track_caller]
pub(crate) fn token_fabric(context: &TrialContext, token: Token) -> TestResult<TrialFabric> {
    Ok(on_own_side(context, workers(context)?.token(token).open()?))
}

/// The trial's own process is on the source side, and its helpers are on the target side.
fn on_own_side(context: &TrialContext, fabric: Fabric) -> TrialFabric {
    TrialFabric::new(fabric, context, if is_helper() { TransferSide::Target } else { TransferSide::Source })
}

#[track_caller]
fn workers(context: &TrialContext) -> TestResult<FabricBuilder> {
    workers_of(context, Options::default())
}

#[track_caller]
fn workers_of(context: &TrialContext, options: Options<'_>) -> TestResult<FabricBuilder> {
    // No pair of an earlier trial runs beside this trial.
    drop_kept_pair();
    let options = Options { deadline: DEADLINE, max_operations: 4096, ..options };
    // To connect 32 simulated devices takes long while other trials run.
    Ok(builder(context, &options)?.seed(context.seed).handshake_limit(LIMIT))
}
