//! Helper processes: the test's own program, started again with a part to play.
//!
//! [`child`] is the parent's handle, [`role`] is what the helper does, both over
//! lines on standard input and output. [`proxy`] stands between two fabrics'
//! control connections, and [`census`] counts what a process holds.

mod census;
mod child;
mod meeting;
mod proxy;
mod role;

use std::sync::Arc;
use std::time::Duration;

use limit::stretched;
use transport_core::{Fabric, FabricBuilder, Grant, GrantPolicy, GrantRequest, Token};

pub(crate) use census::Census;
pub(crate) use child::Child;
pub(crate) use meeting::{Meeting, part};
pub(crate) use proxy::Proxy;
pub use role::is_helper;
pub(crate) use role::{permutation, role};

use crate::check::Verdict;
use crate::end::End;
use crate::lab::{Options, builder};
use crate::subject::Side;
use crate::trial::Context;

/// How often fabrics of process trials show that they live.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(100);
/// Silence after which an [`impatient`] one gives a peer up.
const PEER_TIMEOUT: Duration = Duration::from_millis(600);
/// What any single step of a process trial may take: a longer one hangs.
pub(crate) const LIMIT: Duration = limit::HANG;
/// The deadline of operations, and a peer's silence: so long that nothing in a trial ends by it.
const DEADLINE: Duration = Duration::from_secs(600);

/// A fabric with workers, in real time, that never gives a silent peer up: a peer's end is told by an
/// event, however busy the machine is.
#[track_caller]
pub(crate) fn live(context: &Context) -> Verdict<End> {
    Ok(at_our_end(context, workers(context)?.heartbeat(HEARTBEAT).peer_timeout(DEADLINE).open()?))
}

/// A fabric with workers, in real time, that gives a silent peer up after [`PEER_TIMEOUT`] of an idle
/// machine: on a busy one a healthy peer says nothing for longer.
#[track_caller]
pub(crate) fn impatient(context: &Context) -> Verdict<End> {
    let timeout = stretched(PEER_TIMEOUT);
    Ok(at_our_end(context, workers(context)?.heartbeat(HEARTBEAT).peer_timeout(timeout).open()?))
}

/// A fabric with workers, in real time, otherwise as users get it.
#[track_caller]
pub(crate) fn patient(context: &Context) -> Verdict<End> {
    Ok(at_our_end(context, workers(context)?.open()?))
}

/// As [`patient`], with two rail groups on each of these transports, which grants its peers `windows`.
#[track_caller]
pub(crate) fn several(context: &Context, labels: &[&str], windows: Grant) -> Verdict<End> {
    let options = Options {
        labels,
        rails: Some(2),
        apart: true,
        admission: Some(Arc::new(Fixed(windows))),
        ..Options::default()
    };
    Ok(at_our_end(context, workers_of(context, options)?.open()?))
}

/// Grants every peer the same.
struct Fixed(Grant);

impl GrantPolicy for Fixed {
    fn grant(&self, _: &GrantRequest<'_>) -> Grant {
        self.0
    }
}

/// As [`patient`], for peers with that token only.
#[track_caller]
pub(crate) fn guarded(context: &Context, token: Token) -> Verdict<End> {
    Ok(at_our_end(context, workers(context)?.token(token).open()?))
}

/// The trial's own process is at the source, its helpers are at the target.
fn at_our_end(context: &Context, fabric: Fabric) -> End {
    End::new(fabric, context, if is_helper() { Side::Target } else { Side::Source })
}

#[track_caller]
fn workers(context: &Context) -> Verdict<FabricBuilder> {
    workers_of(context, Options::default())
}

#[track_caller]
fn workers_of(context: &Context, options: Options<'_>) -> Verdict<FabricBuilder> {
    // Nobody else's pair runs beside a trial.
    part();
    let options = Options { deadline: DEADLINE, max_operations: 4096, ..options };
    // 32 cards that software plays take long to pair, with other trials beside them.
    Ok(builder(context, &options)?.seed(context.seed).handshake_limit(LIMIT))
}
