//! The bootstrap over TLS: the frames of TCP, encrypted, between certified peers.
//!
//! TLS 1.3 alone, by rustls, with a provider that needs no C compiler. There is no
//! resumption: a control connection is opened once. The keying material that both
//! ends export (RFC 8446, 7.5) binds the proof of a token to the connection.

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

use self::certificates::{Material, read};
use self::errors::{diagnose, refused};
use crate::bootstrap::{Acceptor, Bootstrap, Channel, Incoming, SendHalf};
use crate::framed_channel::CLOSE_LIMIT;
use crate::framing::{StreamReceiver, StreamSender};
use crate::tcp::{TcpAcceptor, TcpBootstrap};
use multirail_spi::{Error, ErrorKind, Result};

/// Label and length of the keying material that a channel is bound to.
const EXPORT: &[u8] = b"EXPORTER-multirail-control";
const BINDING: usize = 32;

/// Finds peers as [`TcpBootstrap`] does, and speaks TLS 1.3 with them.
///
/// Both sides are peers, so both show a certificate (signed by one of the roots of the
/// other) unless [`TlsBootstrap::anonymous_clients`] says otherwise; a private CA whose
/// certificates nobody else has is the simplest way. The side that connects also
/// checks that the certificate names the host it called. Everything is PEM.
///
/// A certificate says that the CA knows the peer, a [`Token`](crate::Token) decides
/// which fabric or tenant it may enter: use both where they should be told apart.
#[derive(Clone)]
pub struct TlsBootstrap {
    tcp: TcpBootstrap,
    material: Material,
    server_name: Option<ServerName<'static>>,
}

impl TlsBootstrap {
    /// With a certificate chain (our own first), its private key, and the roots that
    /// peers' certificates are checked against, all as PEM.
    ///
    /// # Errors
    /// `InvalidRequest` for PEM that holds none of these, or a key of another
    /// certificate; `Unsupported` where the processor lacks what the cryptography needs.
    pub fn new(certificates: &[u8], key: &[u8], roots: &[u8]) -> Result<Self> {
        Ok(Self::of(Material::new(certificates, key, roots)?))
    }

    /// As [`TlsBootstrap::new`], from files.
    pub fn from_files(
        certificates: impl AsRef<Path>,
        key: impl AsRef<Path>,
        roots: impl AsRef<Path>,
    ) -> Result<Self> {
        Self::new(&read(certificates.as_ref())?, &read(key.as_ref())?, &read(roots.as_ref())?)
    }

    /// Without a certificate of our own: it can connect to those that allow it, and
    /// not listen.
    pub fn anonymous(roots: &[u8]) -> Result<Self> {
        Ok(Self::of(Material::anonymous(roots)?))
    }

    /// Lets clients in without a certificate, and does not look at any. With a token, that is still a closed circle.
    pub fn anonymous_clients(mut self) -> Self {
        self.material.anonymous_clients = true;
        self
    }

    /// Expects the peers we connect to to be certified under this name, whatever
    /// address they are called by.
    pub fn server_name(mut self, name: &str) -> Result<Self> {
        self.server_name = Some(parse_name(name)?);
        Ok(self)
    }

    /// Connects by `tcp` instead of the default.
    pub fn tcp(mut self, tcp: TcpBootstrap) -> Self {
        self.tcp = tcp;
        self
    }

    fn of(material: Material) -> Self {
        Self { tcp: TcpBootstrap::default(), material, server_name: None }
    }
}

#[async_trait]
impl Bootstrap for TlsBootstrap {
    async fn listen(&self, address: &str) -> Result<Box<dyn Acceptor>> {
        let config = self.material.server()?;
        Ok(Box::new(TlsAcceptor { tcp: self.tcp.bind(address).await?, config }))
    }

    async fn connect(&self, address: &str) -> Result<Channel> {
        let config = self.material.client();
        let (stream, address) = self.tcp.dial(address).await?;
        let name = match &self.server_name {
            Some(name) => name.clone(),
            None => parse_name(host(&address))?,
        };
        let stream = TlsConnector::from(config).connect(name, stream).await;
        channel(TlsStream::from(stream.map_err(|e| diagnose(e, &address))?), address)
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
        let (stream, address) = self.tcp.take().await?;
        let (acceptor, from) = (Accepting::from(Arc::clone(&self.config)), address.clone());
        Ok(Incoming::new(address, async move {
            match acceptor.accept(stream).into_fallible().await {
                Ok(stream) => channel(TlsStream::from(stream), from),
                Err((error, stream)) => {
                    let error = diagnose(error, &from);
                    hang_up(stream).await;
                    Err(error)
                }
            }
        }))
    }
}

/// Closes a connection so that the alert which was sent last can be read: bytes that
/// are unread when a socket is closed reset it, and the reset may overtake the alert.
async fn hang_up(mut stream: TcpStream) {
    let _ = stream.shutdown().await;
    let mut sink = [0; 1024];
    let _ = timeout(CLOSE_LIMIT, async { while matches!(stream.read(&mut sink).await, Ok(1..)) {} }).await;
}

fn channel(stream: TlsStream<TcpStream>, address: String) -> Result<Channel> {
    let exported = match &stream {
        TlsStream::Client(stream) => stream.get_ref().1.export_keying_material([0; BINDING], EXPORT, None),
        TlsStream::Server(stream) => stream.get_ref().1.export_keying_material([0; BINDING], EXPORT, None),
    };
    let binding = exported
        .map_err(|e| Error::new(ErrorKind::Protocol, "connect", "TLS exports no key").with_source(e))?;
    let (read, write) = split(stream);
    let receiver = StreamReceiver::new(read).explained(refused);
    Ok(Channel::new(address, TlsSender(Some(StreamSender::new(write))), receiver).bound_to(binding))
}

/// The sending half; dropped, it says that no more comes, as a TCP half does by itself.
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
        // Halves are dropped on the control thread; after its end the socket is gone anyway.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = timeout(CLOSE_LIMIT, half.into_inner().shutdown()).await;
            });
        }
    }
}

/// The host of `host:port`, an IPv6 address without its brackets.
fn host(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn parse_name(name: &str) -> Result<ServerName<'static>> {
    ServerName::try_from(name.to_owned()).map_err(|e| {
        let why = format!("{name:?} is no name that a certificate can have: set TlsBootstrap::server_name");
        Error::new(ErrorKind::InvalidRequest, "connect", why).with_source(e)
    })
}
