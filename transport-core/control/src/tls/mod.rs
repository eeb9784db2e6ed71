//! The bootstrap over TLS: it encrypts the frames and verifies the peers' certificates.
//!
//! It speaks TLS 1.3 only, through rustls, with a provider that needs no C compiler. It does not
//! resume sessions, because a control connection is opened once. The keying material that both
//! sides export (RFC 8446, 7.5) binds the proof of a token to the connection.

mod certificates;
mod errors;

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use rustls::ServerConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, WriteHalf, split};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor as Accepting, TlsConnector, TlsStream};

use self::certificates::{Credentials, read_pem};
use self::errors::{handshake_error, receive_error};
use crate::bootstrap::{Acceptor, Bootstrap, Channel, Incoming, SendHalf};
use crate::framed_channel::CLOSE_LIMIT;
use crate::framing::{StreamReceiver, StreamSender};
use crate::tcp::{TcpAcceptor, TcpBootstrap};
use multirail_spi::{Error, ErrorKind, Result};

/// The label and the length in bytes of the keying material that is the channel binding.
const EXPORT: &[u8] = b"EXPORTER-multirail-control";
const BINDING: usize = 32;

/// Connects peers as [`TcpBootstrap`] does, over TLS 1.3.
///
/// Each side presents a certificate that is signed by one of the other side's roots. Only
/// [`TlsBootstrap::anonymous_clients`] allows clients without one. The simplest setup is a private CA
/// that signs certificates for these hosts only. The side that connects also checks that the
/// certificate names the host that it connects to. All inputs are PEM.
///
/// A certificate shows that the CA has certified the peer. A [`Token`](crate::Token) decides which fabric or
/// tenant the peer may connect to. Use both to tell certified peers apart.
#[derive(Clone)]
pub struct TlsBootstrap {
    tcp: TcpBootstrap,
    credentials: Credentials,
    server_name: Option<ServerName<'static>>,
}

impl TlsBootstrap {
    /// Creates a bootstrap from a certificate chain (our own certificate first), its private key, and
    /// the roots that verify the peers' certificates, all as PEM.
    ///
    /// # Errors
    /// `InvalidRequest` if a PEM holds no certificate or no key, or if the key belongs to another
    /// certificate; `Unsupported` if the processor lacks an instruction that the cryptography needs.
    pub fn new(certificates: &[u8], key: &[u8], roots: &[u8]) -> Result<Self> {
        Ok(Self::of(Credentials::new(certificates, key, roots)?))
    }

    /// Like [`TlsBootstrap::new`], but reads the PEM from files.
    pub fn from_files(
        certificates: impl AsRef<Path>,
        key: impl AsRef<Path>,
        roots: impl AsRef<Path>,
    ) -> Result<Self> {
        Self::new(&read_pem(certificates.as_ref())?, &read_pem(key.as_ref())?, &read_pem(roots.as_ref())?)
    }

    /// Creates a bootstrap without a certificate. It can connect to peers that accept anonymous
    /// clients, and cannot listen.
    pub fn anonymous(roots: &[u8]) -> Result<Self> {
        Ok(Self::of(Credentials::anonymous(roots)?))
    }

    /// Accepts clients without a certificate, and checks no client's certificate. A token still restricts which clients
    /// may connect.
    pub fn anonymous_clients(mut self) -> Self {
        self.credentials.anonymous_clients = true;
        self
    }

    /// Requires the certificates of the peers that this side connects to to name `name`, whatever
    /// address is used.
    pub fn server_name(mut self, name: &str) -> Result<Self> {
        self.server_name = Some(parse_name(name)?);
        Ok(self)
    }

    /// Uses `tcp` for the TCP connections instead of the default.
    pub fn tcp(mut self, tcp: TcpBootstrap) -> Self {
        self.tcp = tcp;
        self
    }

    fn of(credentials: Credentials) -> Self {
        Self { tcp: TcpBootstrap::default(), credentials, server_name: None }
    }
}

#[async_trait]
impl Bootstrap for TlsBootstrap {
    async fn listen(&self, address: &str) -> Result<Box<dyn Acceptor>> {
        let config = self.credentials.server()?;
        Ok(Box::new(TlsAcceptor { tcp: self.tcp.bind(address).await?, config }))
    }

    async fn connect(&self, address: &str) -> Result<Channel> {
        let config = self.credentials.client();
        let (stream, address) = self.tcp.connect_stream(address).await?;
        let name = match &self.server_name {
            Some(name) => name.clone(),
            None => parse_name(host(&address))?,
        };
        let stream = TlsConnector::from(config).connect(name, stream).await;
        channel(TlsStream::from(stream.map_err(|e| handshake_error(e, &address))?), address)
    }
}

struct TlsAcceptor {
    tcp: TcpAcceptor,
    config: Arc<ServerConfig>,
}

#[async_trait]
impl Acceptor for TlsAcceptor {
    fn local_address(&self) -> String {
        self.tcp.local_address()
    }

    async fn accept(&mut self) -> Result<Incoming> {
        let (stream, address) = self.tcp.accept_stream().await?;
        let (acceptor, from) = (Accepting::from(Arc::clone(&self.config)), address.clone());
        Ok(Incoming::new(address, async move {
            match acceptor.accept(stream).into_fallible().await {
                Ok(stream) => channel(TlsStream::from(stream), from),
                Err((error, stream)) => {
                    let error = handshake_error(error, &from);
                    close_after_alert(stream).await;
                    Err(error)
                }
            }
        }))
    }
}

/// Closes a connection so that the peer can read the alert that was sent last. Closing a socket with
/// unread bytes resets the connection, and the reset may overtake the alert. Therefore this reads first.
async fn close_after_alert(mut stream: TcpStream) {
    let _ = stream.shutdown().await;
    let mut sink = [0; 1024];
    let _ = timeout(CLOSE_LIMIT, async { while matches!(stream.read(&mut sink).await, Ok(1..)) {} }).await;
}

fn channel(stream: TlsStream<TcpStream>, address: String) -> Result<Channel> {
    let exported = match &stream {
        TlsStream::Client(stream) => stream.get_ref().1.export_keying_material([0; BINDING], EXPORT, None),
        TlsStream::Server(stream) => stream.get_ref().1.export_keying_material([0; BINDING], EXPORT, None),
    };
    let binding = exported.map_err(|e| {
        Error::new(ErrorKind::Protocol, "connect", "TLS exports no keying material").with_source(e)
    })?;
    let (read, write) = split(stream);
    let receiver = StreamReceiver::new(read).with_describe_error(receive_error);
    Ok(Channel::new(address, TlsSender(Some(StreamSender::new(write))), receiver).bound_to(binding))
}

/// The sending half. Dropping it sends `close_notify`; a TCP half needs no such code.
struct TlsSender<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(Option<StreamSender<WriteHalf<S>>>);

#[async_trait]
impl<S: AsyncRead + AsyncWrite + Send + Unpin + 'static> SendHalf for TlsSender<S> {
    async fn send(&mut self, frame: &[u8]) -> Result<()> {
        match &mut self.0 {
            Some(half) => half.send(frame).await,
            None => Err(Error::new(ErrorKind::Closed, "control", "the connection is closed")),
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Send + Unpin + 'static> Drop for TlsSender<S> {
    fn drop(&mut self) {
        let Some(half) = self.0.take() else { return };
        // The control thread drops the halves. After that thread has ended, the socket is closed already.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = timeout(CLOSE_LIMIT, half.into_inner().shutdown()).await;
            });
        }
    }
}

/// The host of `host:port`. An IPv6 address is returned without its brackets.
fn host(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn parse_name(name: &str) -> Result<ServerName<'static>> {
    ServerName::try_from(name.to_owned()).map_err(|e| {
        let why =
            format!("{name:?} is not a name that a certificate can have: set TlsBootstrap::server_name");
        Error::new(ErrorKind::InvalidRequest, "connect", why).with_source(e)
    })
}
