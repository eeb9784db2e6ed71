//! GIDs, the addresses of a port on RoCE and InfiniBand, and the choice among several.
//!
//! A wrong GID is the most frequent reason why a connection does not come up: routers do not forward RoCE v1, and a
//! link-local address may belong to another card of the same host.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use multirail_spi::{Error, ErrorKind, Result};

/// The packet format of a GID (`enum ibv_gid_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GidType {
    InfiniBand,
    RoceV1,
    RoceV2,
}

/// An address of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gid {
    pub index: u8,
    pub bytes: [u8; 16],
    pub wire: GidType,
}

/// The scope of an address: where its packets can go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum GidScope {
    /// The same link only.
    Link,
    /// Other links too, by IPv6 routing.
    Global,
    /// Other links too, by IPv4 routing, for which most RoCE networks are set up.
    Ipv4,
}

impl Gid {
    fn address(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.bytes)
    }

    /// The IPv4 address, if the GID has one.
    pub(crate) fn ipv4(&self) -> Option<Ipv4Addr> {
        self.address().to_ipv4_mapped()
    }

    fn scope(&self) -> GidScope {
        match (self.ipv4(), self.address().is_unicast_link_local()) {
            (Some(_), _) => GidScope::Ipv4,
            (None, true) => GidScope::Link,
            (None, false) => GidScope::Global,
        }
    }

    /// The reason why an Ethernet port cannot use the GID. `None` if it can.
    fn refusal(&self) -> Option<&'static str> {
        match self.wire {
            GidType::RoceV2 => None,
            GidType::RoceV1 => Some("RoCE v1, which no router forwards"),
            GidType::InfiniBand => Some("of InfiniBand"),
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ipv4() {
            Some(address) => write!(f, "{} ({address})", self.index),
            None => write!(f, "{} ({})", self.index, self.address()),
        }
    }
}

/// The most GIDs that are offered to a peer.
pub(crate) const MOST: usize = 16;

/// The usable GIDs of a port, the best one first. If the user asked for a GID, only that one. On Ethernet, the GIDs of
/// RoCE v2, sorted by scope. On InfiniBand, the first GID.
fn candidates(all: &[Gid], is_ethernet: bool, asked: Option<u8>) -> Vec<Gid> {
    let mut usable: Vec<_> = match asked {
        Some(index) => all.iter().filter(|gid| gid.index == index).copied().collect(),
        None if is_ethernet => all.iter().filter(|gid| gid.refusal().is_none()).copied().collect(),
        None => all.iter().take(1).copied().collect(),
    };
    usable.sort_by_key(|gid| std::cmp::Reverse(gid.scope()));
    usable.truncate(MOST);
    usable
}

/// Chooses a GID of each side for a connection. Both GIDs have the same scope, the widest that both sides have. Among
/// those, the two share the longest prefix, as addresses of one network do. Both sides choose the same two.
pub(crate) fn choose_common(ours: &[Gid], theirs: &[[u8; 16]]) -> Option<(Gid, [u8; 16])> {
    let number = |bytes: [u8; 16]| u128::from_be_bytes(bytes);
    let two = ours.iter().flat_map(|our| theirs.iter().map(move |their| (*our, *their)));
    let alike = two.filter(|(our, their)| our.scope() == Gid { bytes: *their, ..*our }.scope());
    alike.max_by_key(|(our, their)| {
        let (a, b) = (number(our.bytes), number(*their));
        // If several pairs are equally good, both sides take the lowest.
        (our.scope(), (a ^ b).leading_zeros(), std::cmp::Reverse((a.min(b), a.max(b))))
    })
}

/// The GID that a port prefers, and the reasons against the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GidChoice {
    pub gid: Gid,
    /// All usable GIDs, the best one first. The first is `gid`.
    pub candidates: Vec<Gid>,
    /// Each other GID, and why it was not chosen.
    pub others: Vec<(Gid, &'static str)>,
}

/// Chooses the preferred GID of a port. `asked` is the index that the user asked for.
pub(crate) fn choose(all: &[Gid], is_ethernet: bool, asked: Option<u8>) -> Result<GidChoice> {
    let list = || all.iter().map(Gid::to_string).collect::<Vec<_>>().join(", ");
    let candidates = candidates(all, is_ethernet, asked);
    let Some(gid) = candidates.first().copied() else {
        let context = match asked {
            Some(index) => format!("the port has no GID {index}; it has {}", list()),
            None if all.is_empty() => "the port has no GID: give its network interface an address".to_owned(),
            None => format!("no GID of RoCE v2 among {}: turn RoCE v2 on", list()),
        };
        return Err(Error::new(ErrorKind::NotFound, "choose a GID", context));
    };
    let why = |other: &Gid| match other.refusal().filter(|_| is_ethernet) {
        Some(why) => why,
        None if asked.is_some() => "another one was asked for",
        None if is_ethernet && other.scope() == GidScope::Link => "reaches its own link only",
        None if is_ethernet && other.scope() < gid.scope() => "IPv4 comes first",
        None => "for peers of its own network",
    };
    let others = all.iter().filter(|other| **other != gid).map(|other| (*other, why(other))).collect();
    Ok(GidChoice { gid, candidates, others })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, address: &str, wire: GidType) -> Gid {
        Gid { index, bytes: address.parse::<Ipv6Addr>().unwrap().octets(), wire }
    }

    /// The GIDs of a card with an IPv4 and an IPv6 address.
    fn usual() -> Vec<Gid> {
        vec![
            gid(0, "fe80::1", GidType::RoceV1),
            gid(1, "fe80::1", GidType::RoceV2),
            gid(2, "::ffff:10.77.0.1", GidType::RoceV1),
            gid(3, "::ffff:10.77.0.1", GidType::RoceV2),
            gid(4, "2001:db8::1", GidType::RoceV2),
            gid(5, "::ffff:10.78.0.1", GidType::RoceV2),
        ]
    }

    #[test]
    fn ipv4_over_roce_v2_comes_first() {
        let choice = choose(&usual(), true, None).unwrap();
        assert_eq!((choice.gid.index, choice.gid.to_string()), (3, "3 (10.77.0.1)".into()));
        let whys: Vec<_> = choice.others.iter().map(|(gid, why)| (gid.index, *why)).collect();
        assert_eq!(
            whys,
            [
                (0, "RoCE v1, which no router forwards"),
                (1, "reaches its own link only"),
                (2, "RoCE v1, which no router forwards"),
                (4, "IPv4 comes first"),
                (5, "for peers of its own network"),
            ]
        );
        let global: Vec<_> = usual().into_iter().filter(|gid| gid.ipv4().is_none()).collect();
        assert_eq!(choose(&global, true, None).unwrap().gid.index, 4);
        assert_eq!(choose(&global[..2], true, None).unwrap().gid.index, 1);
    }

    #[test]
    fn a_connection_takes_two_of_one_network() {
        let ours = candidates(&usual(), true, None);
        assert_eq!(ours.iter().map(|gid| gid.index).collect::<Vec<_>>(), [3, 5, 4, 1]);
        let theirs = |all: &[&str]| -> Vec<Gid> {
            (0..).zip(all).map(|(index, address)| gid(index, address, GidType::RoceV2)).collect()
        };
        let bytes = |gids: &[Gid]| gids.iter().map(|gid| gid.bytes).collect::<Vec<_>>();
        for (peer, want) in [
            (&["::ffff:10.77.0.2", "::ffff:10.78.0.2"][..], Some((3, 0))),
            (&["fe80::2", "::ffff:10.78.0.2"], Some((5, 1))),
            (&["::ffff:192.168.1.1"], Some((3, 0))),
            (&["fe80::2", "2001:db8::2"], Some((4, 1))),
            (&["fe80::2"], Some((1, 0))),
            (&[], None),
        ] {
            let peer = theirs(peer);
            let met = choose_common(&ours, &bytes(&peer));
            assert_eq!(met.map(|(our, _)| our.index), want.map(|(our, _)| our), "{peer:?}");
            // The other side chooses the same two.
            let there = choose_common(&peer, &bytes(&ours));
            assert_eq!(
                there.map(|(their, our)| (our, their.bytes)),
                met.map(|(our, their)| (our.bytes, their))
            );
            assert_eq!(there.map(|(their, _)| their.index), want.map(|(_, their)| their), "{peer:?}");
        }
        let only_ipv6 = candidates(&usual()[4..5], true, None);
        assert_eq!(choose_common(&only_ipv6, &bytes(&theirs(&["::ffff:10.77.0.2"]))), None);
    }

    #[test]
    fn the_user_has_the_last_word() {
        assert_eq!(choose(&usual(), true, Some(0)).unwrap().gid.index, 0);
        let error = choose(&usual(), true, Some(9)).unwrap_err();
        assert!(error.context().contains("3 (10.77.0.1)"), "{error}");
    }

    #[test]
    fn what_does_not_work_says_why() {
        let error = choose(&usual()[..1], true, None).unwrap_err();
        assert!(error.context().contains("turn RoCE v2 on"), "{error}");
        assert!(choose(&[], true, None).unwrap_err().context().contains("give its network interface"));
        assert_eq!(choose(&[gid(0, "fe80::2", GidType::InfiniBand)], false, None).unwrap().gid.index, 0);
    }
}
