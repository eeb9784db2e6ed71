//! Members as DNS lists them, such as those of a headless Service of Kubernetes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use async_trait::async_trait;
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{LookupIpStrategy, NameServerConfig, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::RData;
use multirail::{Error, ErrorKind, Result};
use tokio::sync::OnceCell;

use crate::join_all::{Boxed, join_all};
use crate::url::without_secrets;
use crate::{Listing, MAX_ADDRESSES, Member, REQUEST_LIMIT, Store};

/// How often a watch asks. DNS servers of Kubernetes keep records for 5 s and longer.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// The most targets whose addresses are asked for at once.
const TOGETHER: usize = 64;

/// Members as SRV records list them, or A and AAAA records. Nobody can join: something else writes the records.
///
/// A member has no incarnation. The name of an SRV record's member is its target, without the Service's name behind it:
/// `multirail-0`. The name of an address's member is the address.
pub struct DnsStore {
    url: String,
    name: String,
    /// The port of A and AAAA records. `None`: SRV records have it.
    port: Option<u16>,
    server: Option<SocketAddr>,
    resolver: OnceCell<TokioResolver>,
}

impl DnsStore {
    /// `place` is `[SERVER:PORT/]NAME`, where NAME is `_PORT._tcp.SERVICE` for SRV records, and `SERVICE:PORT` for
    /// addresses. Without a server, those of the system are asked.
    ///
    /// # Errors
    /// `InvalidRequest` if it is not.
    pub fn new(place: &str) -> Result<Self> {
        let refused = |why: &str| {
            let why = format!("dns://{} {why}", without_secrets(place));
            Error::new(ErrorKind::InvalidRequest, "open a directory", why)
        };
        let (server, name) = place.rsplit_once('/').unwrap_or(("", place));
        let server = match server {
            "" => None,
            server => {
                let address = server.parse().or_else(|_| server.parse().map(|ip: IpAddr| (ip, 53).into()));
                Some(address.map_err(|_| refused("names a DNS server otherwise than by IP:PORT"))?)
            }
        };
        let (name, port) = match name.split_once(':') {
            None if name.starts_with('_') => (name, None),
            None => {
                return Err(refused("needs a port behind the name, or a name like _multirail._tcp.SERVICE"));
            }
            Some((name, port)) => match port.parse() {
                Ok(port) => (name, Some(port)),
                Err(_) => return Err(refused("has no number as its port")),
            },
        };
        if name.is_empty() {
            return Err(refused("has no name"));
        }
        let (url, name) = (format!("dns://{place}"), name.to_owned());
        Ok(Self { url, name, port, server, resolver: OnceCell::new() })
    }

    /// The resolver, which begins in the runtime of the directories.
    async fn resolver(&self) -> Result<&TokioResolver> {
        self.resolver.get_or_try_init(|| async { self.new_resolver() }).await
    }

    fn new_resolver(&self) -> Result<TokioResolver> {
        let builder = match self.server {
            Some(server) => {
                let mut config = NameServerConfig::udp_and_tcp(server.ip());
                config.connections.iter_mut().for_each(|connection| connection.port = server.port());
                let config = ResolverConfig::from_parts(None, Vec::new(), vec![config]);
                Ok(TokioResolver::builder_with_config(config, TokioRuntimeProvider::default()))
            }
            None => TokioResolver::builder_tokio(),
        };
        let resolver = builder.and_then(|mut builder| {
            let options = builder.options_mut();
            // Each list shall be of now.
            options.cache_size = 0;
            options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
            options.timeout = REQUEST_LIMIT / 2;
            builder.build()
        });
        resolver.map_err(failed)
    }

    /// The members that SRV records name.
    async fn list_targets(&self) -> Result<Listing> {
        let resolver = self.resolver().await?;
        let Some(found) = existing(resolver.srv_lookup(self.name.as_str()).await)? else {
            return Ok(Listing::default());
        };
        // Servers of Kubernetes add the addresses of the targets.
        let mut addresses = BTreeMap::<String, BTreeSet<IpAddr>>::new();
        for record in found.additionals() {
            if let Some(ip) = address(&record.data) {
                addresses.entry(record.name.to_ascii()).or_default().insert(ip);
            }
        }
        let targets: BTreeMap<(String, u16), u16> = found
            .answers()
            .iter()
            .filter_map(|record| match &record.data {
                RData::SRV(srv) => Some(((srv.target.to_ascii(), srv.port), srv.priority)),
                _ => None,
            })
            .collect();
        let unknown: Vec<_> = targets
            .keys()
            .map(|(target, _)| target.clone())
            .filter(|target| !addresses.contains_key(target))
            .collect();
        for some in unknown.chunks(TOGETHER) {
            let asked = some.iter().map(|target| {
                let asking: Boxed<'_, _> =
                    Box::pin(async move { (target, resolver.lookup_ip(target.as_str()).await) });
                asking
            });
            for (target, found) in join_all(asked.collect()).await {
                if let Some(found) = existing(found)? {
                    addresses.entry(target.clone()).or_default().extend(found.iter());
                }
            }
        }
        let mut listing = Listing::default();
        let service = self.service();
        let mut ordered: Vec<_> = targets.into_iter().collect();
        ordered.sort_by_key(|(_, priority)| *priority);
        for ((target, port), _) in ordered {
            let full = target.trim_end_matches('.');
            let name = full.strip_suffix(&service).filter(|name| !name.is_empty()).unwrap_or(full);
            match addresses.get(&target) {
                Some(ips) => listing.add(member(name, ips.iter().copied(), port)),
                None => listing.refuse(name, format!("{target} has no address")),
            }
        }
        Ok(listing)
    }

    /// The addresses of a name, each a member.
    async fn list_addresses(&self, port: u16) -> Result<Listing> {
        let mut listing = Listing::default();
        if let Some(found) = existing(self.resolver().await?.lookup_ip(self.name.as_str()).await)? {
            for ip in found.iter().collect::<BTreeSet<_>>() {
                listing.add(member(&ip.to_string(), [ip], port));
            }
        }
        Ok(listing)
    }

    /// What follows the members' own names: `.SERVICE` of `_PORT._tcp.SERVICE`.
    fn service(&self) -> String {
        let mut labels = self.name.trim_end_matches('.').splitn(3, '.');
        format!(".{}", labels.nth(2).unwrap_or_default())
    }
}

#[async_trait]
impl Store for DnsStore {
    fn url(&self) -> &str {
        &self.url
    }

    fn poll_interval(&self) -> Duration {
        POLL_INTERVAL
    }

    async fn list(&self) -> Result<Listing> {
        match self.port {
            Some(port) => self.list_addresses(port).await,
            None => self.list_targets().await,
        }
    }
}

fn member(name: &str, ips: impl IntoIterator<Item = IpAddr>, port: u16) -> Member {
    let addresses = ips.into_iter().take(MAX_ADDRESSES).map(|ip| SocketAddr::new(ip, port).to_string());
    addresses.fold(Member::new(name, 0), Member::address)
}

fn address(data: &RData) -> Option<IpAddr> {
    match data {
        RData::A(a) => Some(IpAddr::V4(a.0)),
        RData::AAAA(aaaa) => Some(IpAddr::V6(aaaa.0)),
        _ => None,
    }
}

/// The records that the server has. Returns `None` if it has none, as for a Service without Pods.
fn existing<T>(found: std::result::Result<T, NetError>) -> Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_no_records_found() => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

fn failed(error: NetError) -> Error {
    Error::new(ErrorKind::Unreachable, "dns", "the DNS servers did not answer").with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read() {
        for bad in ["", "name", "name:port", ":1", "server/name:1", "127.0.0.1:53/", "127.0.0.1:53/name"] {
            assert_eq!(DnsStore::new(bad).err().expect(bad).kind(), ErrorKind::InvalidRequest);
        }
        let store = DnsStore::new("[::1]:53/_a._tcp.b.c").unwrap();
        assert_eq!((store.server, store.service()), (Some("[::1]:53".parse().unwrap()), ".b.c".to_owned()));
        assert_eq!(DnsStore::new("10.0.0.10/b:7").unwrap().server, Some("10.0.0.10:53".parse().unwrap()));
        assert_eq!(DnsStore::new("b.c:7411").unwrap().port, Some(7411));
    }
}
