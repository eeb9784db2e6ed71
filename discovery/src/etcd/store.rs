//! The store over etcd.

use std::time::Duration;

use async_trait::async_trait;
use multirail::{Error, ErrorKind, Result};
use tokio::sync::OnceCell;

use super::messages::{
    Compare, Done, KeyValue, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveResponse, LeaseRequest,
    PutRequest, RangeRequest, RangeResponse, RequestOp, TxnRequest, TxnResponse, WatchCreateRequest,
    WatchRequest, WatchResponse,
};
use super::{EtcdClient, Responses};
use crate::url::without_secrets;
use crate::{Changes, Claim, Lease, Listing, MAX_MEMBERS, Renewal, Store};

/// How often a watch lists the keys although etcd told of no change.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The keys of one response.
const PAGE: i64 = 512;
/// The prefix of a URL without one.
const DEFAULT_PREFIX: &str = "/multirail";
/// The shortest lease that etcd grants with its default settings.
const MIN_TTL: u64 = 2;

/// How often a member tries to write its key while others change it.
const ATTEMPTS: u32 = 5;

const RANGE: &str = "/etcdserverpb.KV/Range";
const TXN: &str = "/etcdserverpb.KV/Txn";
const WATCH: &str = "/etcdserverpb.Watch/Watch";
const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";

/// Members as keys in etcd: the key is the prefix, `/` and the name, the value is JSON. Each member has a lease of
/// etcd, which counts whole seconds.
pub struct EtcdStore {
    url: String,
    /// With the `/` behind it.
    prefix: String,
    servers: Vec<String>,
    client: OnceCell<EtcdClient>,
}

impl EtcdStore {
    /// `place` is `HOST:PORT[,HOST:PORT...][/PREFIX]`.
    ///
    /// # Errors
    /// `InvalidRequest` if it is not.
    pub fn new(place: &str) -> Result<Self> {
        if place.contains('@') {
            let shown = without_secrets(place);
            let why = format!("etcd://{shown}: users and passwords are not supported, nor is @ in a prefix");
            return Err(Error::new(ErrorKind::InvalidRequest, "open a directory", why));
        }
        let (hosts, prefix) = place.find('/').map_or((place, DEFAULT_PREFIX), |at| place.split_at(at));
        let prefix = prefix.trim_end_matches('/');
        let prefix = if prefix.is_empty() { DEFAULT_PREFIX } else { prefix };
        let servers: Vec<_> = hosts.split(',').map(str::to_owned).collect();
        if servers.iter().any(String::is_empty) {
            let why = format!("etcd://{place} has an empty address: write HOST:PORT");
            return Err(Error::new(ErrorKind::InvalidRequest, "open a directory", why));
        }
        let url = format!("etcd://{hosts}{prefix}");
        Ok(Self { url, prefix: format!("{prefix}/"), servers, client: OnceCell::new() })
    }

    /// The client, which begins in the runtime of the directories.
    async fn client(&self) -> Result<&EtcdClient> {
        self.client.get_or_try_init(|| async { EtcdClient::new(&self.servers) }).await
    }

    fn key(&self, name: &str) -> Vec<u8> {
        format!("{}{name}", self.prefix).into_bytes()
    }

    /// The first key behind all keys of the prefix: `0` follows `/`.
    fn end(&self) -> Vec<u8> {
        let mut end = self.prefix.clone().into_bytes();
        end.pop();
        end.push(b'0');
        end
    }
}

#[async_trait]
impl Store for EtcdStore {
    fn url(&self) -> &str {
        &self.url
    }

    fn poll_interval(&self) -> Duration {
        POLL_INTERVAL
    }

    fn granted(&self, lease: Duration) -> Duration {
        Duration::from_secs(lease.as_millis().div_ceil(1000).max(MIN_TTL.into()) as u64)
    }

    async fn list(&self) -> Result<Listing> {
        let (client, mut listing, mut count) = (self.client().await?, Listing::default(), 0);
        let mut key = self.prefix.clone().into_bytes();
        loop {
            let request = RangeRequest { key, range_end: self.end(), limit: PAGE };
            let page: RangeResponse = client.call(RANGE, request).await?;
            for pair in &page.kvs {
                count += 1;
                let name = pair.key.strip_prefix(self.prefix.as_bytes()).unwrap_or_default();
                match std::str::from_utf8(name) {
                    Ok(name) => listing.add_record(name, &pair.value),
                    Err(_) => {
                        listing.refuse(&String::from_utf8_lossy(name), "its name is no UTF-8".to_owned());
                    }
                }
            }
            match page.kvs.into_iter().next_back() {
                Some(last) if page.more && count < 2 * MAX_MEMBERS => {
                    key = last.key;
                    key.push(0);
                }
                _ => return Ok(listing),
            }
        }
    }

    async fn changes(&self) -> Result<Box<dyn Changes>> {
        let client = self.client().await?;
        let create = WatchCreateRequest { key: self.prefix.clone().into_bytes(), range_end: self.end() };
        let (first, responses) = client.stream(WATCH, WatchRequest { create: Some(create) }).await?;
        check_watch(&first)?;
        Ok(Box::new(EtcdChanges(responses)))
    }

    async fn claim(
        &self,
        name: &str,
        record: &[u8],
        lease: Duration,
        claim: Claim,
    ) -> Result<Option<Box<dyn Lease>>> {
        let (client, key) = (self.client().await?.clone(), self.key(name));
        let ttl = i64::try_from(lease.as_secs()).unwrap_or(i64::MAX);
        let granted: LeaseGrantResponse = client.call(GRANT, LeaseGrantRequest { ttl }).await?;
        if !granted.error.is_empty() {
            return Err(Error::new(ErrorKind::Exhausted, "join", granted.error));
        }
        let put = PutRequest { key: key.clone(), value: record.to_owned(), lease: granted.id };
        let held = EtcdLease { client, key, record: record.to_owned(), id: granted.id };
        // Each transaction counts for the key as it was read. A request that this side has given up may come late, and
        // would bind the key to a lease that nobody renews.
        for _ in 0..ATTEMPTS {
            let found = held.read().await?;
            if claim == Claim::Restore && found.as_ref().is_some_and(|found| found.value != record) {
                // The lease without a key ends by itself.
                return Ok(None);
            }
            let revision = found.map_or(0, |found| found.mod_revision);
            let success = vec![RequestOp { put: Some(put.clone()) }];
            let compare = vec![Compare::is_unchanged(&held.key, revision)];
            let done: TxnResponse = held.client.call(TXN, TxnRequest { compare, success }).await?;
            if done.succeeded {
                return Ok(Some(Box::new(held)));
            }
        }
        let why =
            format!("the entry of {name:?} changes all the time: several processes join with this name");
        Err(Error::new(ErrorKind::Busy, "join", why))
    }
}

/// A watch of etcd.
struct EtcdChanges(Responses<WatchResponse>);

#[async_trait]
impl Changes for EtcdChanges {
    async fn next(&mut self) -> Result<()> {
        check_watch(&self.0.next().await?)
    }
}

fn check_watch(response: &WatchResponse) -> Result<()> {
    if response.canceled {
        let why = format!("etcd has ended the watch: {}", response.cancel_reason);
        return Err(Error::new(ErrorKind::Closed, "watch", why));
    }
    Ok(())
}

/// A member's key and its lease.
struct EtcdLease {
    client: EtcdClient,
    key: Vec<u8>,
    record: Vec<u8>,
    id: i64,
}

impl EtcdLease {
    /// The key as it is.
    async fn read(&self) -> Result<Option<KeyValue>> {
        let request = RangeRequest { key: self.key.clone(), range_end: Vec::new(), limit: 1 };
        let found: RangeResponse = self.client.call(RANGE, request).await?;
        Ok(found.kvs.into_iter().next())
    }
}

#[async_trait]
impl Lease for EtcdLease {
    async fn renew(&mut self) -> Result<Renewal> {
        let (kept, _stream): (LeaseKeepAliveResponse, _) =
            self.client.stream(KEEP_ALIVE, LeaseRequest { id: self.id }).await?;
        Ok(match self.read().await? {
            // It may be another's lease that keeps the key.
            Some(pair) if pair.value != self.record => Renewal::Replaced,
            Some(_) if kept.ttl > 0 => Renewal::Kept,
            _ => Renewal::Expired,
        })
    }

    async fn release(&mut self) -> Result<()> {
        // Removes the key only if it still has this lease.
        let revoked: Result<Done> = self.client.call(REVOKE, LeaseRequest { id: self.id }).await;
        match revoked {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read() {
        let store = EtcdStore::new("a:1,[::1]:2/fleet/x/").unwrap();
        assert_eq!((store.url(), store.prefix.as_str()), ("etcd://a:1,[::1]:2/fleet/x", "/fleet/x/"));
        assert_eq!(store.end(), b"/fleet/x0");
        assert_eq!(store.servers, ["a:1", "[::1]:2"]);
        assert_eq!(EtcdStore::new("a:1").unwrap().prefix, "/multirail/");
        assert_eq!(EtcdStore::new("a:1/").unwrap().prefix, "/multirail/");
        for bad in ["", "/x", "a:1,,b:2", "user:secret@a:1/x"] {
            assert_eq!(EtcdStore::new(bad).err().unwrap().kind(), ErrorKind::InvalidRequest);
        }
        assert_eq!(store.granted(Duration::from_millis(2001)), Duration::from_secs(3));
        assert_eq!(store.granted(Duration::from_secs(1)), Duration::from_secs(2));
    }
}
