//! The default bootstrap: an address is `host:port`, a channel is a TCP connection.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use async_trait::async_trait;
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::time::timeout;

use crate::bootstrap::{Acceptor, Bootstrap, Channel, Incoming};
use crate::framing::{StreamReceiver, StreamSender};
use multirail_spi::{Error, ErrorKind, Result};

/// The default limit for resolving a name and connecting.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// Connects fabrics over TCP, by `host:port`.
///
/// An address without a host (`:7000` or `7000`) means this host, 127.0.0.1. This is also true
/// for listening: to accept peers from other hosts, give an interface's address or
/// `0.0.0.0`. Port 0 listens on any free port.
///
/// TCP does not encrypt the frames. Without a token, the fabric admits every client, and each may
/// use the regions it finds: listen only where you trust all clients.
/// `FabricBuilder::token` keeps unauthenticated clients out; such a client learns only that a fabric
/// listens and asks for a token. An attacker who can change packets in the network can still take over an
/// admitted connection. `TlsBootstrap` (feature `tls`) protects the frames themselves.
/// `docs/trust.md` lists what each kind of attacker can do.
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
    /// Sets the limit for connecting; the default is 5 s.
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
        let (stream, address) = self.connect_stream(address).await?;
        Ok(channel(stream, address))
    }
}

impl TcpBootstrap {
    /// Connects to `address`. Returns the connection, and the address with its host filled in.
    pub(super) async fn connect_stream(&self, address: &str) -> Result<(TcpStream, String)> {
        let address = with_host("connect", address)?;
        let stream = timeout(self.connect_limit, connect_first(&address)).await.unwrap_or_else(|_| {
            let limit = self.connect_limit.as_secs_f64();
            let why = format!(
                "no answer from {address} within {limit:.1} s: check the address, the route and the firewall"
            );
            Err(Error::new(ErrorKind::DeadlineExceeded, "connect", why))
        })?;
        Ok((with_nodelay(stream), address))
    }

    /// Listens at `address`.
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
        let (stream, address) = self.accept_stream().await?;
        Ok(channel(stream, address).into())
    }
}

impl TcpAcceptor {
    /// Accepts the next connection and returns it with the client's address. Cancel-safe.
    pub(super) async fn accept_stream(&mut self) -> Result<(TcpStream, String)> {
        let (stream, peer) = self.listener.accept().await.map_err(|e| {
            let why = match e.raw_os_error() {
                // EMFILE and ENFILE: accept(2).
                Some(23 | 24) => "no file descriptor left: raise `ulimit -n`",
                _ => "the system returned no connection",
            };
            Error::os("accept", why, e)
        })?;
        Ok((with_nodelay(stream), peer.to_string()))
    }
}

fn with_nodelay(stream: TcpStream) -> TcpStream {
    // Control frames are small, and a caller waits for each of them. If the system refuses
    // TCP_NODELAY, the connection either fails soon with a better message, or is slower but works.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    stream
}

fn channel(stream: TcpStream, address: String) -> Channel {
    let (read, write) = stream.into_split();
    Channel::new(address, StreamSender::new(write), StreamReceiver::new(read))
}

/// Resolves `address` and connects to the first resolved address that accepts.
async fn connect_first(address: &str) -> Result<TcpStream> {
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
        _ => "cannot listen at this address",
    };
    Error::os("listen", format!("{address}: {advice}"), source)
}

/// Checks `address` and returns it as `host:port`, with 127.0.0.1 if it has no host.
fn with_host(operation: &'static str, address: &str) -> Result<String> {
    let address = address.trim();
    let (host, port) = address.rsplit_once(':').unwrap_or(("", address));
    // An IPv6 address contains colons itself, so it must be in brackets.
    let bare_v6 = host.contains(':') && !(host.starts_with('[') && host.ends_with(']'));
    if port.parse::<u16>().is_err() || bare_v6 {
        let why =
            format!("{address:?} is not an address: write host:port, such as 127.0.0.1:7000 or [::1]:7000");
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
        // A socket that does not listen has the port, so that no other program can listen there.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let error = tcp.connect(&socket.local_addr().unwrap().to_string()).await.err().unwrap();
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
