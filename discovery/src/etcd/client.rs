//! Calls of etcd's services.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;
use multirail::{Error, ErrorKind, Result};
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;
use tonic_prost::prost::Message;

use crate::REQUEST_LIMIT;

/// The interval of HTTP/2's pings, and how long an answer may take: a watch has no other sign of a server that is gone.
const PING: Duration = Duration::from_secs(2);
/// The most bytes of a response.
const MAX_RESPONSE: usize = 64 << 20;

/// Connections to the servers of one cluster, of which one is used until it fails.
#[derive(Clone)]
pub struct EtcdClient {
    channels: Arc<[Channel]>,
    current: Arc<AtomicUsize>,
}

impl EtcdClient {
    /// `servers` are `HOST:PORT`. Connects when it is first used, in a runtime of tokio.
    pub fn new(servers: &[String]) -> Result<Self> {
        let channels: Result<Vec<_>> = servers.iter().map(|server| connect_lazily(server)).collect();
        Ok(Self { channels: channels?.into(), current: Arc::default() })
    }

    /// Sends a request, and returns the response.
    pub async fn call<I, O>(&self, path: &'static str, request: I) -> Result<O>
    where
        I: Message + Send + Sync + 'static,
        O: Message + Default + Send + Sync + 'static,
    {
        let (place, mut grpc) = self.ready(path).await?;
        let path = PathAndQuery::from_static(path);
        let response = grpc.unary(Request::new(request), path, ProstCodec::default()).await;
        response.map(tonic::Response::into_inner).map_err(|status| self.failed(place, status))
    }

    /// Sends one request on a stream that stays open, and returns the responses.
    pub async fn stream<I, O>(&self, path: &'static str, request: I) -> Result<Streaming<O>>
    where
        I: Message + Send + Sync + Unpin + 'static,
        O: Message + Default + Send + Sync + 'static,
    {
        let (place, mut grpc) = self.ready(path).await?;
        let request = Request::new(OpenStream(Some(request)));
        let response = grpc.streaming(request, PathAndQuery::from_static(path), ProstCodec::default()).await;
        response.map(tonic::Response::into_inner).map_err(|status| self.failed(place, status))
    }

    /// The next response of a stream.
    pub async fn next<O>(&self, responses: &mut Streaming<O>) -> Result<O> {
        let place = self.current.load(Ordering::Relaxed);
        match responses.message().await {
            Ok(Some(response)) => Ok(response),
            Ok(None) => Err(Error::new(ErrorKind::Unreachable, "etcd", "the server has ended a stream")),
            Err(status) => Err(self.failed(place, status)),
        }
    }

    async fn ready(&self, path: &'static str) -> Result<(usize, Grpc<Channel>)> {
        let place = self.current.load(Ordering::Relaxed);
        let channel = self.channels[place % self.channels.len()].clone();
        let mut grpc = Grpc::new(channel).max_decoding_message_size(MAX_RESPONSE);
        match grpc.ready().await {
            Ok(()) => Ok((place, grpc)),
            Err(error) => {
                self.turn_away_from(place);
                Err(Error::new(ErrorKind::Unreachable, "etcd", path).with_source(error))
            }
        }
    }

    /// Maps an error, and lets the next request go to another server if this one may be the reason.
    fn failed(&self, place: usize, status: Status) -> Error {
        let kind = match status.code() {
            Code::Unavailable | Code::Unknown | Code::Internal => ErrorKind::Unreachable,
            Code::DeadlineExceeded | Code::Cancelled => ErrorKind::DeadlineExceeded,
            Code::PermissionDenied | Code::Unauthenticated => ErrorKind::Permission,
            Code::NotFound => ErrorKind::NotFound,
            _ => ErrorKind::Io,
        };
        if matches!(kind, ErrorKind::Unreachable | ErrorKind::DeadlineExceeded) {
            self.turn_away_from(place);
        }
        Error::new(kind, "etcd", "a request failed").with_source(status)
    }

    fn turn_away_from(&self, place: usize) {
        let next = (place + 1) % self.channels.len();
        let _ = self.current.compare_exchange(place, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

fn connect_lazily(server: &str) -> Result<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{server}")).map_err(|error| {
        let why = format!("{server:?} is no address of etcd: write HOST:PORT");
        Error::new(ErrorKind::InvalidRequest, "open a directory", why).with_source(error)
    })?;
    let endpoint = endpoint.connect_timeout(REQUEST_LIMIT).http2_keep_alive_interval(PING);
    Ok(endpoint.keep_alive_timeout(PING).keep_alive_while_idle(true).connect_lazy())
}

/// A stream of one request that does not end: the server would end its responses, too.
struct OpenStream<T>(Option<T>);

impl<T: Unpin> Stream for OpenStream<T> {
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<T>> {
        match self.0.take() {
            Some(request) => Poll::Ready(Some(request)),
            None => Poll::Pending,
        }
    }
}
