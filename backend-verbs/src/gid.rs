//! The address of a port on RoCE and InfiniBand, and which of several stands for it.
//!
//! The wrong one is the most frequent reason for a connection that never comes up: RoCE v1 does not
//! cross a router, a link-local address may mean another card of the same host.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use multirail_spi::{Error, ErrorKind, Result};

/// How packets to a GID look on the wire (`enum ibv_gid_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wire {
    InfiniBand,
    RoceV1,
    RoceV2,
}

/// One of a port's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gid {
    pub index: u8,
    pub bytes: [u8; 16],
    pub wire: Wire,
}

/// How far an address reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum GidScope {
    /// The same link.
    Link,
    /// Beyond it, as IPv6 is routed.
    Global,
    /// Beyond it, as IPv4 is routed: what most RoCE networks are set up for.
    Ipv4,
}

impl Gid {
    fn address(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.bytes)
    }

    /// As IPv4, if it is such.
    pub(crate) fn ipv4(&self) -> Option<Ipv4Addr> {
        self.address().to_ipv4_mapped()
    }

    fn reach(&self) -> GidScope {
        match (self.ipv4(), self.address().is_unicast_link_local()) {
            (Some(_), _) => GidScope::Ipv4,
            (None, true) => GidScope::Link,
            (None, false) => GidScope::Global,
        }
    }

    /// Why it does not stand for a port of Ethernet; `None` if it may.
    fn refusal(&self) -> Option<&'static str> {
        match self.wire {
            Wire::RoceV2 => None,
            Wire::RoceV1 => Some("RoCE v1, which no router forwards"),
            Wire::InfiniBand => Some("of InfiniBand"),
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

/// GIDs that are offered to a peer, at most.
pub(crate) const MOST: usize = 16;

/// Those of a port's GIDs that may stand for it, the best one first: the one asked for; or of Ethernet
/// those of RoCE v2, by how far they reach; of InfiniBand the first.
fn candidates(all: &[Gid], is_ethernet: bool, asked: Option<u8>) -> Vec<Gid> {
    let mut usable: Vec<_> = match asked {
        Some(index) => all.iter().filter(|gid| gid.index == index).copied().collect(),
        None if is_ethernet => all.iter().filter(|gid| gid.refusal().is_none()).copied().collect(),
        None => all.iter().take(1).copied().collect(),
    };
    usable.sort_by_key(|gid| std::cmp::Reverse(gid.reach()));
    usable.truncate(MOST);
    usable
}

/// Which of ours and which of theirs stand for a connection: of those of one kind that reach farthest,
/// the two that have most in common, as addresses of one network do. Both sides come to the same two.
pub(crate) fn meet(ours: &[Gid], theirs: &[[u8; 16]]) -> Option<(Gid, [u8; 16])> {
    let number = |bytes: [u8; 16]| u128::from_be_bytes(bytes);
    let two = ours.iter().flat_map(|our| theirs.iter().map(move |their| (*our, *their)));
    let alike = two.filter(|(our, their)| our.reach() == Gid { bytes: *their, ..*our }.reach());
    alike.max_by_key(|(our, their)| {
        let (a, b) = (number(our.bytes), number(*their));
        // Where several are as good: whatever both sides agree on, the lowest.
        (our.reach(), (a ^ b).leading_zeros(), std::cmp::Reverse((a.min(b), a.max(b))))
    })
}

/// The GID that stands for a port where the peer leaves the choice, and what is to be said of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GidChoice {
    pub gid: Gid,
    /// It, and what else may stand for the port, the best one first.
    pub candidates: Vec<Gid>,
    /// Each other one, and why not that.
    pub others: Vec<(Gid, &'static str)>,
}

/// Chooses among a port's GIDs.
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
        None if is_ethernet && other.reach() == GidScope::Link => "reaches its own link only",
        None if is_ethernet && other.reach() < gid.reach() => "IPv4 comes first",
        None => "for peers of its own network",
    };
    let others = all.iter().filter(|other| **other != gid).map(|other| (*other, why(other))).collect();
    Ok(GidChoice { gid, candidates, others })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, address: &str, wire: Wire) -> Gid {
        Gid { index, bytes: address.parse::<Ipv6Addr>().unwrap().octets(), wire }
    }

    /// As a card of two addresses shows them.
    fn usual() -> Vec<Gid> {
        vec![
            gid(0, "fe80::1", Wire::RoceV1),
            gid(1, "fe80::1", Wire::RoceV2),
            gid(2, "::ffff:10.77.0.1", Wire::RoceV1),
            gid(3, "::ffff:10.77.0.1", Wire::RoceV2),
            gid(4, "2001:db8::1", Wire::RoceV2),
            gid(5, "::ffff:10.78.0.1", Wire::RoceV2),
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
            (0..).zip(all).map(|(index, address)| gid(index, address, Wire::RoceV2)).collect()
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
            let met = meet(&ours, &bytes(&peer));
            assert_eq!(met.map(|(our, _)| our.index), want.map(|(our, _)| our), "{peer:?}");
            // The other side comes to the same.
            let there = meet(&peer, &bytes(&ours));
            assert_eq!(
                there.map(|(their, our)| (our, their.bytes)),
                met.map(|(our, their)| (our.bytes, their))
            );
            assert_eq!(there.map(|(their, _)| their.index), want.map(|(_, their)| their), "{peer:?}");
        }
        let only_ipv6 = candidates(&usual()[4..5], true, None);
        assert_eq!(meet(&only_ipv6, &bytes(&theirs(&["::ffff:10.77.0.2"]))), None);
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
        assert_eq!(choose(&[gid(0, "fe80::2", Wire::InfiniBand)], false, None).unwrap().gid.index, 0);
    }
}
