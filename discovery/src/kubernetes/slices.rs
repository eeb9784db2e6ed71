//! EndpointSlices as the API gives them.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;

use crate::{Listing, MAX_ADDRESSES, Member};

/// The name of the port that is taken if the URL names none and there are several.
const DEFAULT_PORT: &str = "multirail";

/// The answer to a list.
#[derive(Deserialize)]
pub struct SliceList {
    #[serde(default)]
    items: Vec<Slice>,
}

/// A line of a watch. What has changed is not read: the slices are listed again.
#[derive(Deserialize)]
pub struct WatchedChange {
    #[serde(rename = "type")]
    pub kind: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Slice {
    #[serde(default)]
    ports: Option<Vec<Port>>,
    #[serde(default)]
    endpoints: Option<Vec<Endpoint>>,
}

#[derive(Deserialize)]
struct Port {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    port: Option<u16>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    #[serde(default)]
    addresses: Vec<String>,
    #[serde(default)]
    conditions: Conditions,
    #[serde(default)]
    hostname: Option<String>,
    #[serde(default)]
    target_ref: Option<TargetRef>,
    #[serde(default)]
    node_name: Option<String>,
    #[serde(default)]
    zone: Option<String>,
}

#[derive(Deserialize, Default)]
struct Conditions {
    /// Nothing means ready.
    #[serde(default)]
    ready: Option<bool>,
}

#[derive(Deserialize)]
struct TargetRef {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    uid: Option<String>,
}

impl SliceList {
    /// The ready endpoints, one member for each Pod, whose IPv4 and IPv6 addresses are in different slices.
    pub fn into_listing(self, port: Option<&str>) -> Listing {
        let (mut members, mut listing) = (BTreeMap::<String, Member>::new(), Listing::default());
        for slice in self.items {
            let number = slice.port(port);
            for endpoint in slice
                .endpoints
                .into_iter()
                .flatten()
                .filter(|endpoint| endpoint.conditions.ready != Some(false))
            {
                let Some(name) = endpoint.name() else { continue };
                let Some(number) = number else {
                    listing.refuse(
                        &name,
                        format!("its EndpointSlice has no port {}", port.unwrap_or(DEFAULT_PORT)),
                    );
                    continue;
                };
                let member = members.entry(name.clone()).or_insert_with(|| endpoint.member(name));
                for address in &endpoint.addresses {
                    let address = match address.parse::<IpAddr>() {
                        Ok(ip) => SocketAddr::new(ip, number).to_string(),
                        // A slice of host names.
                        Err(_) => format!("{address}:{number}"),
                    };
                    if member.addresses.len() < MAX_ADDRESSES && !member.addresses.contains(&address) {
                        member.addresses.push(address);
                    }
                }
            }
        }
        members.into_values().for_each(|member| listing.add(member));
        listing
    }
}

impl Slice {
    /// The port of this name, else the one called `multirail`, else the only one.
    fn port(&self, name: Option<&str>) -> Option<u16> {
        let ports = self.ports.as_deref().unwrap_or_default();
        let wanted = name.unwrap_or(DEFAULT_PORT);
        let named = ports.iter().find(|port| port.name.as_deref() == Some(wanted));
        match (named, ports, name) {
            (Some(port), ..) => port.port,
            (None, [only], None) => only.port,
            _ => None,
        }
    }
}

impl Endpoint {
    /// The Pod's name, else its host name, else its address.
    fn name(&self) -> Option<String> {
        let pod = self.target_ref.as_ref().and_then(|target| target.name.clone());
        pod.or_else(|| self.hostname.clone()).or_else(|| self.addresses.first().cloned())
    }

    /// A member without addresses. Another Pod of the name, as a StatefulSet starts it, has another `uid`.
    fn member(&self, name: String) -> Member {
        let uid = self.target_ref.as_ref().and_then(|target| target.uid.as_ref());
        let known = [("uid", uid), ("node", self.node_name.as_ref()), ("zone", self.zone.as_ref())];
        let known = known.into_iter().filter_map(|(key, value)| Some((key, value?)));
        known.fold(Member::new(name, 0), |member, (key, value)| member.attribute(key, value))
    }
}
