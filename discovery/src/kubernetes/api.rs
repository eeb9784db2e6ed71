//! Requests of Kubernetes' API.

use std::path::PathBuf;

use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, AUTHORIZATION, HOST, HeaderValue, USER_AGENT};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use multirail::{Error, ErrorKind, Result};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::TlsTrust;
use crate::runtime::AbortOnDrop;
use crate::url::without_secrets;

/// The most bytes of a whole response.
const MAX_RESPONSE: usize = 64 << 20;
/// The most bytes of a line of a watch: an EndpointSlice has a thousand endpoints at most.
const MAX_LINE: usize = 4 << 20;

/// The API server, and how to reach it.
pub struct Api {
    /// `HOST:PORT` for HTTP's header.
    authority: String,
    host: String,
    port: u16,
    /// The certificate authority's file; none for HTTP without TLS.
    trust: Option<PathBuf>,
    /// The file of the service account's token. Kubernetes writes another one every hour.
    token: Option<PathBuf>,
}

impl Api {
    /// The server at `HOST:PORT`.
    pub fn new(authority: &str, trust: Option<PathBuf>, token: Option<PathBuf>) -> Result<Self> {
        let refused = || {
            let why =
                format!("{:?} is no address of an API server: write HOST:PORT", without_secrets(authority));
            Error::new(ErrorKind::InvalidRequest, "open a directory", why)
        };
        let (host, port) = authority.rsplit_once(':').ok_or_else(refused)?;
        let port = port.parse().map_err(|_| refused())?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        if host.is_empty() || host.contains('@') {
            return Err(refused());
        }
        Ok(Self { authority: authority.to_owned(), host, port, trust, token })
    }

    /// Asks for `path`, and returns the whole answer.
    pub async fn get(&self, path: &str) -> Result<Vec<u8>> {
        let (response, _connection) = self.request(path).await?;
        let (mut body, mut bytes) = (response.into_body(), Vec::new());
        while let Some(data) = next_data(&mut body).await? {
            bytes.extend_from_slice(&data);
            if bytes.len() > MAX_RESPONSE {
                return Err(protocol(format!("an answer has more than {MAX_RESPONSE} bytes")));
            }
        }
        Ok(bytes)
    }

    /// Asks for `path`, whose answer is a line for each change.
    pub async fn lines(&self, path: &str) -> Result<LineStream> {
        let (response, connection) = self.request(path).await?;
        Ok(LineStream { body: response.into_body(), rest: Vec::new(), _connection: connection })
    }

    async fn request(&self, path: &str) -> Result<(Response<Incoming>, AbortOnDrop<()>)> {
        let unreachable = |error| {
            let why = format!("the API server {} cannot be reached", self.authority);
            Error::new(ErrorKind::Unreachable, "kubernetes", why).with_source(error)
        };
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(unreachable)?;
        match &self.trust {
            None => self.send(stream, path).await,
            Some(file) => {
                let trust = TlsTrust::new(&read(file).await?)?;
                self.send(trust.connect(&self.host, stream).await?, path).await
            }
        }
    }

    async fn send<S>(&self, stream: S, path: &str) -> Result<(Response<Incoming>, AbortOnDrop<()>)>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
        // Its errors come with the response.
        let connection = AbortOnDrop(tokio::spawn(async move { drop(connection.await) }));
        let mut request = Request::get(path).header(HOST, &self.authority).header(ACCEPT, "application/json");
        request = request.header(USER_AGENT, concat!("multirail/", env!("CARGO_PKG_VERSION")));
        if let Some(file) = &self.token {
            let token = String::from_utf8_lossy(&read(file).await?).into_owned();
            let mut bearer = HeaderValue::try_from(format!("Bearer {}", token.trim()))
                .map_err(|_| protocol(format!("{} has no token", file.display())))?;
            bearer.set_sensitive(true);
            request = request.header(AUTHORIZATION, bearer);
        }
        let request = request.body(Empty::<Bytes>::new()).map_err(|error| protocol(error.to_string()))?;
        let response = sender.send_request(request).await.map_err(broken)?;
        match response.status() {
            status if status.is_success() => Ok((response, connection)),
            status => Err(refused(status)),
        }
    }
}

/// An answer that is a line for each change.
pub struct LineStream {
    body: Incoming,
    /// The begin of a line that is not complete.
    rest: Vec<u8>,
    _connection: AbortOnDrop<()>,
}

impl LineStream {
    /// The next line; `None` at the answer's end. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let mut line: Vec<_> = self.rest.drain(..=end).collect();
                line.pop();
                return Ok(Some(line));
            }
            if self.rest.len() > MAX_LINE {
                return Err(protocol(format!("a line has more than {MAX_LINE} bytes")));
            }
            match next_data(&mut self.body).await? {
                Some(data) => self.rest.extend_from_slice(&data),
                None => return Ok(None),
            }
        }
    }
}

/// The next bytes of a body. Cancel-safe.
async fn next_data(body: &mut Incoming) -> Result<Option<Bytes>> {
    while let Some(frame) = body.frame().await {
        // Trailers have no data.
        if let Ok(data) = frame.map_err(broken)?.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

async fn read(file: &std::path::Path) -> Result<Vec<u8>> {
    let path = file.to_owned();
    let read = tokio::task::spawn_blocking(move || std::fs::read(path)).await;
    read.unwrap_or_else(|error| Err(std::io::Error::other(error))).map_err(|error| {
        let why = format!("{} cannot be read; is this a Pod with a service account?", file.display());
        Error::new(ErrorKind::Permission, "kubernetes", why).with_source(error)
    })
}

fn broken(error: hyper::Error) -> Error {
    Error::new(ErrorKind::Unreachable, "kubernetes", "the connection to the API server broke")
        .with_source(error)
}

fn refused(status: StatusCode) -> Error {
    let (kind, hint) = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            (ErrorKind::Permission, ": let the Pod's service account get, list and watch endpointslices")
        }
        StatusCode::NOT_FOUND => (ErrorKind::NotFound, ""),
        _ => (ErrorKind::Io, ""),
    };
    Error::new(kind, "kubernetes", format!("the API server answered {status}{hint}"))
}

fn protocol(why: String) -> Error {
    Error::new(ErrorKind::Protocol, "kubernetes", why)
}
