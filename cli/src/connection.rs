//! Connecting, listening, and waiting for a peer. Every wait has a limit.

use std::error::Error as _;
use std::future::{Future, poll_fn};
use std::iter::successors;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use multirail::spi::Backend;
use multirail::{
    AddressSource, Efa, Fabric, Listener, NoCommonTransport, Peer, PeerHandle, ReconnectPolicy, Result, wait,
};

use crate::LIBFABRIC;
use crate::failure::{CommandFailure, CommandResult};

/// The limit of connecting. The fabric's own limits are shorter.
const CONNECT: Duration = Duration::from_secs(30);

/// Waits for `wanted`, or until the connection to `peer` is closed. Returns the error of the close in that case.
pub async fn until_closed<T>(peer: &Peer, wanted: impl Future<Output = Result<T>>) -> Result<T> {
    let mut closed = pin!(peer.closed());
    let mut wanted = pin!(wanted);
    poll_fn(|context| match wanted.as_mut().poll(context) {
        Poll::Ready(result) => Poll::Ready(result),
        Poll::Pending => closed.as_mut().poll(context).map(Err),
    })
    .await
}

/// How long a peer may take to disconnect after the last message.
pub const DISCONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Waits until the peer has read the last message and disconnected: closing first would lose the messages that the
/// peer has not read. Returns the reason of the close.
pub fn wait_until_closed(peer: &Peer) -> Option<multirail::Error> {
    wait(peer.closed(), DISCONNECT_LIMIT).ok()
}

/// Connects to a server.
pub fn connect(fabric: &Fabric, address: &str) -> CommandResult<Peer> {
    connect_within(fabric.connect(address), address)
}

/// Connects to a server, and again by `policy`.
pub fn connect_handle(
    fabric: &Fabric,
    server: &Arc<dyn AddressSource>,
    policy: ReconnectPolicy,
) -> CommandResult<PeerHandle> {
    connect_within(PeerHandle::find(fabric, Arc::clone(server), policy), server.name())
}

fn connect_within<T>(connecting: impl Future<Output = Result<T>>, address: &str) -> CommandResult<T> {
    match wait(connecting, CONNECT) {
        Ok(connected) => connected.map_err(connect_failure),
        Err(_) => {
            Err(CommandFailure::new(format!("{address} did not answer within {} s", CONNECT.as_secs())))
        }
    }
}

/// Listens for peers.
pub fn listen(fabric: &Fabric, address: &str) -> CommandResult<Listener> {
    match wait(fabric.listen(address), CONNECT) {
        Ok(listener) => Ok(listener?),
        Err(_) => {
            Err(CommandFailure::new(format!("cannot listen on {address} within {} s", CONNECT.as_secs())))
        }
    }
}

/// The libfabric provider that works between any two hosts.
const ANYWHERE: &str = "tcp";

/// The failure of a connect. If the two sides have no common transport, the text has options that give them one.
fn connect_failure(error: multirail::Error) -> CommandFailure {
    let chain = successors(error.source(), |error| (*error).source());
    let offers = chain.filter_map(|error| error.downcast_ref::<NoCommonTransport>()).next();
    match offers {
        Some(offers) => CommandFailure::new(format!("{error}; {}", advice(offers))),
        None => error.into(),
    }
}

fn advice(offers: &NoCommonTransport) -> String {
    let registry = multirail::Registry::standard();
    let is_ours = |backend: &str| offers.ours.iter().any(|ours| ours.backend == backend);
    let opens = |backend: &str| registry.find(backend).is_ok_and(|backend| backend.probe().is_ok());
    let mut common =
        offers.theirs.iter().map(|theirs| theirs.backend.as_str()).filter(|backend| !is_ours(backend));
    if let Some(backend) = common.find(|backend| *backend != "loopback" && opens(backend)) {
        return format!("start both with --backend {backend}");
    }
    let options = format!("start both with --backend {LIBFABRIC} --provider {ANYWHERE}");
    let config = multirail::efa_config().unwrap_or_default().provider(ANYWHERE);
    match Efa::with(config).probe() {
        Ok(_) => options,
        Err(why) => format!("{options}, once it is available on this host: {}; {}", why.reason, why.remedy),
    }
}
