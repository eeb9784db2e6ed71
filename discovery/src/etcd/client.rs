//! Calls of etcd's services.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

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
/// A request that is dropped without an answer after less is no sign of a server that is mute.
const PATIENCE: Duration = Duration::from_millis(250);
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
        let place = self.current.load(Ordering::Relaxed);
        self.ask(place, async {
            let (mut grpc, path) = (self.ready(place, path).await?, PathAndQuery::from_static(path));
            let response = grpc.unary(Request::new(request), path, ProstCodec::default()).await;
            response.map(tonic::Response::into_inner).map_err(|status| self.failed(place, status))
        })
        .await
    }

    /// Sends one request on a stream that stays open. Returns the first response, and the stream of the others.
    pub async fn stream<I, O>(&self, path: &'static str, request: I) -> Result<(O, Responses<O>)>
    where
        I: Message + Send + Sync + Unpin + 'static,
        O: Message + Default + Send + Sync + 'static,
    {
        let place = self.current.load(Ordering::Relaxed);
        self.ask(place, async {
            let (mut grpc, path) = (self.ready(place, path).await?, PathAndQuery::from_static(path));
            let request = Request::new(OpenStream(Some(request)));
            let response = grpc.streaming(request, path, ProstCodec::default()).await;
            let stream = response.map_err(|status| self.failed(place, status))?.into_inner();
            let mut responses = Responses { client: self.clone(), place, stream };
            Ok((responses.next().await?, responses))
        })
        .await
    }

    /// Awaits a request of the server at `place`. The next goes to another if this one is dropped before it is
    /// answered: a limit of time drops it, and a mute server gives no other sign.
    async fn ask<T>(&self, place: usize, request: impl Future<Output = Result<T>>) -> Result<T> {
        let mut unanswered = Unanswered { client: self, place, since: Some(Instant::now()) };
        let answer = request.await;
        unanswered.since = None;
        answer
    }

    async fn ready(&self, place: usize, path: &'static str) -> Result<Grpc<Channel>> {
        let channel = self.channels[place % self.channels.len()].clone();
        let mut grpc = Grpc::new(channel).max_decoding_message_size(MAX_RESPONSE);
        match grpc.ready().await {
            Ok(()) => Ok(grpc),
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

/// A request that the server at `place` has not answered.
struct Unanswered<'a> {
    client: &'a EtcdClient,
    place: usize,
    /// None once it is answered.
    since: Option<Instant>,
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if self.since.is_some_and(|since| since.elapsed() >= PATIENCE) {
            self.client.turn_away_from(self.place);
        }
    }
}

/// The responses of a stream.
pub struct Responses<O> {
    client: EtcdClient,
    place: usize,
    stream: Streaming<O>,
}

impl<O> Responses<O> {
    /// The next response. Cancel-safe.
    pub async fn next(&mut self) -> Result<O> {
        match self.stream.message().await {
            Ok(Some(response)) => Ok(response),
            Ok(None) => Err(Error::new(ErrorKind::Unreachable, "etcd", "the server has ended a stream")),
            Err(status) => Err(self.client.failed(self.place, status)),
        }
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use tokio::time::timeout;

    use super::super::messages::{LeaseRequest, RangeRequest, RangeResponse};
    use super::*;

    /// Servers that accept connections and never answer: a request that is given up makes the next go to another.
    #[test]
    fn a_mute_server_is_left() {
        let listeners = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let servers = listeners.each_ref().map(|listener| listener.local_addr().unwrap().to_string());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = EtcdClient::new(&servers).unwrap();
            let place = || client.current.load(Ordering::Relaxed);
            let range = || client.call::<_, RangeResponse>("/x/Range", RangeRequest::default());
            timeout(2 * PATIENCE, range()).await.unwrap_err();
            assert_eq!(place(), 1);
            let watch = client.stream::<_, RangeResponse>("/x/Watch", LeaseRequest::default());
            timeout(2 * PATIENCE, watch).await.err().unwrap();
            assert_eq!(place(), 2);
            // Its caller has not waited for it.
            timeout(Duration::ZERO, range()).await.unwrap_err();
            assert_eq!(place(), 2);
            timeout(2 * PATIENCE, range()).await.unwrap_err();
            assert_eq!(place(), 0);
        });
    }
}
