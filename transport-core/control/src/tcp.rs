//! The built-in bootstrap: an address is `host:port`, a channel is a TCP connection.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::time::timeout;

use crate::bootstrap::{Acceptor, Bootstrap, Channel, Incoming};
use crate::framing::{StreamReceiver, StreamSender};
use multirail_spi::{Error, ErrorKind, Result};

/// Time to resolve a name and connect.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Finds peers by `host:port` over TCP.
///
/// An address without a host (`:7000` or `7000`) means this host, 127.0.0.1, for
/// listening too: to be reached from elsewhere, name an interface's address or
/// `0.0.0.0`. Port 0 listens on any free port.
///
/// Nothing here is encrypted. Without a token every client is admitted, and may use
/// the regions it finds: listen only where all of them are trusted.
/// `FabricBuilder::token` keeps strangers out, who
/// then learn nothing but that somebody listens; whoever can change packets on the
/// way can still take over an admitted connection. `TlsBootstrap` (feature `tls`)
/// protects the frames themselves. `docs/trust.md` says who can do what.
#[derive(Debug, Clone)]
pub struct TcpBootstrap {
    connect_limit: Duration,
}

impl Default for TcpBootstrap {
    fn default() -> Self {
        Self { connect_limit: CONNECT_LIMIT }
    }
}

impl TcpBootstrap {
    /// Gives up connecting after `limit` instead of 5 s.
    pub fn connect_limit(mut self, limit: Duration) -> Self {
        self.connect_limit = limit;
        self
    }
}

#[async_trait]
impl Bootstrap for TcpBootstrap {
    async fn listen(&self, address: &str) -> Result<Box<dyn Acceptor>> {
        Ok(Box::new(self.bind(address).await?))
    }

    async fn connect(&self, address: &str) -> Result<Channel> {
        let (stream, address) = self.dial(address).await?;
        Ok(channel(stream, address))
    }
}

impl TcpBootstrap {
    /// A connection to `address`, and that address with its host.
    pub(super) async fn dial(&self, address: &str) -> Result<(TcpStream, String)> {
        let address = with_host("connect", address)?;
        let stream = timeout(self.connect_limit, reach(&address)).await.unwrap_or_else(|_| {
            let limit = self.connect_limit.as_secs_f64();
            let why = format!(
                "no answer from {address} within {limit:.1} s: check the address, the route and the firewall"
            );
            Err(Error::new(ErrorKind::DeadlineExceeded, "connect", why))
        })?;
        Ok((prepared(stream), address))
    }

    /// Takes connections at `address`.
    pub(super) async fn bind(&self, address: &str) -> Result<TcpAcceptor> {
        let address = with_host("listen", address)?;
        let listener = TcpListener::bind(&*address).await.map_err(|e| listen_error(&address, e))?;
        let local = listener.local_addr().map_err(|e| listen_error(&address, e))?;
        Ok(TcpAcceptor { listener, local })
    }
}

pub(super) struct TcpAcceptor {
    listener: TcpListener,
    local: SocketAddr,
}

#[async_trait]
impl Acceptor for TcpAcceptor {
    fn local_address(&self) -> String {
        self.local.to_string()
    }

    async fn accept(&mut self) -> Result<Incoming> {
        let (stream, address) = self.take().await?;
        Ok(channel(stream, address).into())
    }
}

impl TcpAcceptor {
    /// The next connection and where it is from. Cancel-safe.
    pub(super) async fn take(&mut self) -> Result<(TcpStream, String)> {
        let (stream, peer) = self.listener.accept().await.map_err(|e| {
            let why = match e.raw_os_error() {
                // EMFILE and ENFILE: accept(2).
                Some(23 | 24) => "no file descriptor left: raise `ulimit -n`",
                _ => "the system gave no connection",
            };
            Error::os("accept", why, e)
        })?;
        Ok((prepared(stream), peer.to_string()))
    }
}

fn prepared(stream: TcpStream) -> TcpStream {
    // Control frames are small and someone waits for each of them. Where it is refused,
    // the connection is about to fail with a better reason, or is slower and no worse.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "no TCP_NODELAY");
    }
    stream
}

fn channel(stream: TcpStream, address: String) -> Channel {
    let (read, write) = stream.into_split();
    Channel::new(address, StreamSender::new(write), StreamReceiver::new(read))
}

/// Connects to the first address of a name that answers.
async fn reach(address: &str) -> Result<TcpStream> {
    let mut failed = None;
    let found = lookup_host(address).await.map_err(|e| {
        Error::new(ErrorKind::NotFound, "connect", format!("{address}: no such host; check the name"))
            .with_source(e)
    })?;
    for candidate in found {
        match TcpStream::connect(candidate).await {
            Ok(stream) => return Ok(stream),
            Err(e) => failed = Some(e),
        }
    }
    let source = failed.unwrap_or_else(|| io::ErrorKind::NotFound.into());
    let advice = match source.kind() {
        io::ErrorKind::ConnectionRefused => format!("{address} refused: is the other side listening?"),
        _ => format!("{address} is not reachable: check the address and the route"),
    };
    Err(Error::os("connect", advice, source))
}

fn listen_error(address: &str, source: io::Error) -> Error {
    let advice = match source.kind() {
        io::ErrorKind::AddrInUse => "the port is in use: choose another, or port 0 for any free one",
        io::ErrorKind::AddrNotAvailable => "this host has no such address: see `ip address`, or use 0.0.0.0",
        io::ErrorKind::PermissionDenied => "ports below 1024 need privilege: choose a higher one",
        _ => "cannot listen there",
    };
    Error::os("listen", format!("{address}: {advice}"), source)
}

/// `host:port`, with this host where none is given.
fn with_host(operation: &'static str, address: &str) -> Result<String> {
    let address = address.trim();
    let (host, port) = address.rsplit_once(':').unwrap_or(("", address));
    // An IPv6 address holds colons itself, so it needs its brackets.
    let bare_v6 = host.contains(':') && !(host.starts_with('[') && host.ends_with(']'));
    if port.parse::<u16>().is_err() || bare_v6 {
        let why = format!("{address:?} is no address: write host:port, such as 127.0.0.1:7000 or [::1]:7000");
        return Err(Error::new(ErrorKind::InvalidRequest, operation, why));
    }
    Ok(if host.is_empty() { format!("127.0.0.1:{port}") } else { format!("{host}:{port}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_cross_and_errors_advise() {
        let tcp = TcpBootstrap::default();
        let mut acceptor = tcp.listen("0").await.unwrap();
        let address = acceptor.local_address();
        let (client, server) = tokio::join!(tcp.connect(&address), acceptor.accept());
        let (mut client, mut server) = (client.unwrap(), server.unwrap().open().await.unwrap());
        client.send(b"there").await.unwrap();
        assert_eq!(server.recv().await.unwrap(), b"there");
        server.send(b"back").await.unwrap();
        assert_eq!(client.recv().await.unwrap(), b"back");
        assert_eq!(client.peer_address(), address);

        let error = tcp.listen(&address).await.err().unwrap();
        assert!(error.context().contains("in use"), "{error}");
        drop((acceptor, server));
        assert_eq!(client.recv().await.unwrap_err().kind(), ErrorKind::PeerDied);
        let error = tcp.connect(&address).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert!(error.context().contains("is the other side listening?"), "{error}");
    }

    #[test]
    fn addresses_without_a_host_mean_this_one() {
        for address in [":7000", "7000", " 127.0.0.1:7000 "] {
            assert_eq!(with_host("listen", address).unwrap(), "127.0.0.1:7000");
        }
        assert_eq!(with_host("listen", "[::1]:0").unwrap(), "[::1]:0");
        assert_eq!(with_host("listen", "node-7:1").unwrap(), "node-7:1");
        for address in ["", ":", "node-7", "node-7:", "::1:7000", "a:70000", "tcp://a:1"] {
            assert_eq!(
                with_host("listen", address).unwrap_err().kind(),
                ErrorKind::InvalidRequest,
                "{address}"
            );
        }
    }
}
