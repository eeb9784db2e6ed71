//! Blocking on futures, never without a limit and never past the peer's death.

use std::error::Error as _;
use std::future::{Future, poll_fn};
use std::iter::successors;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use multirail::spi::Backend;
use multirail::{Efa, Fabric, Listener, NoCommonTransport, Peer, Result, wait};

use crate::LIBFABRIC;
use crate::failure::{CommandResult, Failure};

/// How long connecting may take: the fabric's own limits end it first.
const CONNECT: Duration = Duration::from_secs(30);

/// `wanted`, or the error that ended the connection to `peer`, whichever comes first.
pub async fn until_closed<T>(peer: &Peer, wanted: impl Future<Output = Result<T>>) -> Result<T> {
    let mut gone = pin!(peer.closed());
    let mut wanted = pin!(wanted);
    poll_fn(|context| match wanted.as_mut().poll(context) {
        Poll::Ready(result) => Poll::Ready(result),
        Poll::Pending => gone.as_mut().poll(context).map(Err),
    })
    .await
}

/// How long a peer may take to leave once all is said.
pub const DISCONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Gives a peer time to read our last message and leave: whoever closes first
/// makes the other's unread messages worthless. Says why the peer is gone.
pub fn wait_until_closed(peer: &Peer) -> Option<multirail::Error> {
    wait(peer.closed(), DISCONNECT_LIMIT).ok()
}

/// Connects to a server.
pub fn connect(fabric: &Fabric, address: &str) -> CommandResult<Peer> {
    match wait(fabric.connect(address), CONNECT) {
        Ok(peer) => peer.map_err(connect_failure),
        Err(_) => Err(Failure::new(format!("{address} did not answer within {} s", CONNECT.as_secs()))),
    }
}

/// Listens for peers.
pub fn listen(fabric: &Fabric, address: &str) -> CommandResult<Listener> {
    match wait(fabric.listen(address), CONNECT) {
        Ok(listener) => Ok(listener?),
        Err(_) => {
            Err(Failure::new(format!("{address} could not be listened on within {} s", CONNECT.as_secs())))
        }
    }
}

/// The provider of libfabric that runs between any two hosts.
const ANYWHERE: &str = "tcp";

/// A failure to connect; where the two sides have no transport in common, with the options that would give one.
fn connect_failure(error: multirail::Error) -> Failure {
    let chain = successors(error.source(), |error| (*error).source());
    let offers = chain.filter_map(|error| error.downcast_ref::<NoCommonTransport>()).next();
    match offers {
        Some(offers) => Failure::new(format!("{error}; {}", advice(offers))),
        None => error.into(),
    }
}

fn advice(offers: &NoCommonTransport) -> String {
    let registry = multirail::Registry::standard();
    let is_ours = |backend: &str| offers.ours.iter().any(|ours| ours.backend == backend);
    let opens = |backend: &str| registry.find(backend).is_ok_and(|backend| backend.probe().is_ok());
    let mut further =
        offers.theirs.iter().map(|theirs| theirs.backend.as_str()).filter(|backend| !is_ours(backend));
    if let Some(backend) = further.find(|backend| *backend != "loopback" && opens(backend)) {
        return format!("start both with --backend {backend}");
    }
    let meet = format!("start both with --backend {LIBFABRIC} --provider {ANYWHERE}");
    let config = multirail::efa_config().unwrap_or_default().provider(ANYWHERE);
    match Efa::with(config).probe() {
        Ok(_) => meet,
        Err(why) => format!("{meet}, once it is available here: {}; {}", why.reason, why.remedy),
    }
}
