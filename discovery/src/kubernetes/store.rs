//! The store over EndpointSlices.

use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use multirail::{Error, ErrorKind, Result};

use super::{Api, LineStream, SliceList, WatchedChange};
use crate::url::without_secrets;
use crate::{Changes, Listing, Store};

/// How often a watch lists the slices although the API server told of no change.
const POLL_INTERVAL: Duration = Duration::from_secs(15);
/// Where Kubernetes puts the service account of a Pod.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The ready endpoints of a Service, as Kubernetes' API lists them in EndpointSlices. Nobody joins: Pods do, by being
/// ready.
///
/// In a Pod it takes the API server of the cluster, with the token and the certificates of the Pod's service account,
/// which must be allowed to `get`, `list` and `watch` endpointslices. A member has no incarnation; the attribute `uid`
/// is the Pod's.
pub struct KubernetesStore {
    url: String,
    api: Api,
    /// The path of a list.
    path: String,
    port: Option<String>,
}

impl KubernetesStore {
    /// `place` is `NAMESPACE/SERVICE[:PORT-NAME][?api=http://HOST:PORT]`. `api` names a server to ask without TLS and
    /// token, such as `kubectl proxy`.
    ///
    /// # Errors
    /// `InvalidRequest` if it is not; `Unsupported` outside of Pods without `api`.
    pub fn new(place: &str) -> Result<Self> {
        let (service, options) =
            place.split_once('?').map_or((place, None), |(service, rest)| (service, Some(rest)));
        Self::with_api(service, || match options {
            None => in_cluster(),
            Some(options) => {
                let authority = options.strip_prefix("api=http://");
                let authority = authority
                    .ok_or_else(|| refused(place, "has an option that is not ?api=http://HOST:PORT"))?;
                Api::new(authority.trim_end_matches('/'), None, None)
            }
        })
    }

    /// As in a Pod whose service account is in `account`, with the API server at `HOST:PORT`, by TLS.
    ///
    /// # Errors
    /// As [`KubernetesStore::new`].
    pub fn at(place: &str, server: &str, account: &Path) -> Result<Self> {
        Self::with_api(place, || Api::new(server, Some(account.join("ca.crt")), Some(account.join("token"))))
    }

    fn with_api(place: &str, api: impl FnOnce() -> Result<Api>) -> Result<Self> {
        let Some((namespace, service)) = place.split_once('/') else {
            return Err(refused(place, "is not NAMESPACE/SERVICE"));
        };
        let (service, port) =
            service.split_once(':').map_or((service, None), |(name, port)| (name, Some(port)));
        // Names of Kubernetes have these characters alone, so that the path needs no escapes.
        let is_name = |name: &str| {
            let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            (1..=63).contains(&name.len()) && name.bytes().all(is_allowed)
        };
        if ![namespace, service, port.unwrap_or("a")].into_iter().all(is_name) {
            return Err(refused(place, "has a name that Kubernetes does not allow"));
        }
        let path = format!(
            "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector=kubernetes.io%2F\
             service-name%3D{service}"
        );
        Ok(Self { url: format!("k8s://{place}"), api: api()?, path, port: port.map(str::to_owned) })
    }
}

/// The API server as Pods know it.
fn in_cluster() -> Result<Api> {
    let (host, port) = (std::env::var("KUBERNETES_SERVICE_HOST"), std::env::var("KUBERNETES_SERVICE_PORT"));
    let (Ok(host), Ok(port)) = (host, port) else {
        let why = "this is no Pod of Kubernetes; start `kubectl proxy`, and add ?api=http://127.0.0.1:8001";
        return Err(Error::new(ErrorKind::Unsupported, "open a directory", why));
    };
    let server = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let account = Path::new(ACCOUNT);
    Api::new(&server, Some(account.join("ca.crt")), Some(account.join("token")))
}

#[async_trait]
impl Store for KubernetesStore {
    fn url(&self) -> &str {
        &self.url
    }

    fn poll_interval(&self) -> Duration {
        POLL_INTERVAL
    }

    async fn list(&self) -> Result<Listing> {
        let answer = self.api.get(&self.path).await?;
        let slices: SliceList = serde_json::from_slice(&answer).map_err(unread)?;
        Ok(slices.into_listing(self.port.as_deref()))
    }

    async fn changes(&self) -> Result<Box<dyn Changes>> {
        // Without a version, a watch begins with what there is, so that no change is missed.
        let path = format!("{}&watch=1&timeoutSeconds=600", self.path);
        Ok(Box::new(Watched(self.api.lines(&path).await?)))
    }
}

/// A watch of the API.
struct Watched(LineStream);

#[async_trait]
impl Changes for Watched {
    async fn next(&mut self) -> Result<()> {
        let ended = || Error::new(ErrorKind::Closed, "watch", "the API server has ended the watch");
        let line = self.0.next().await?.ok_or_else(ended)?;
        let change: WatchedChange = serde_json::from_slice(&line).map_err(unread)?;
        match change.kind.as_str() {
            "ERROR" => Err(Error::new(ErrorKind::Closed, "watch", "the API server tells of an error")),
            _ => Ok(()),
        }
    }
}

fn unread(error: serde_json::Error) -> Error {
    Error::new(ErrorKind::Protocol, "kubernetes", "an answer of the API server does not parse")
        .with_source(error)
}

#[cold]
fn refused(place: &str, why: &str) -> Error {
    let why = format!("k8s://{} {why}", without_secrets(place));
    Error::new(ErrorKind::InvalidRequest, "open a directory", why)
}
