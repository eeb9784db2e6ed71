//! How fast rails are: the differences between the counters of two dumps.

use std::collections::HashMap;
use std::time::Duration;

use multirail::Dump;
use multirail::observe::RailDump;

/// Bytes and work requests per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rate {
    pub bytes: f64,
    pub requests: f64,
}

/// The rates of the rails of a dump, in the order of the dump's rail groups and rails.
#[derive(Debug, Default)]
pub struct Rates(Vec<Rate>);

impl Rates {
    /// The rates of `after` since `before`. A rail that `before` lacks has counted from zero.
    pub fn between(before: &Dump, after: &Dump) -> Self {
        let took = after.time.since(before.time);
        let earlier: HashMap<_, _> = rails(before).collect();
        let rate = |(rail, (bytes, requests)): (RailKey<'_>, (u64, u64))| {
            let (bytes_then, requests_then) = earlier.get(&rail).copied().unwrap_or_default();
            Rate { bytes: per_s(bytes, bytes_then, took), requests: per_s(requests, requests_then, took) }
        };
        Self(rails(after).map(rate).collect())
    }

    /// The rate of a rail by its position among all rails; zero before the second dump.
    pub fn of(&self, at: usize) -> Rate {
        self.0.get(at).copied().unwrap_or_default()
    }

    /// The rates of all rails together.
    pub fn sum(&self) -> Rate {
        let add = |sum: Rate, rate: &Rate| Rate {
            bytes: sum.bytes + rate.bytes,
            requests: sum.requests + rate.requests,
        };
        self.0.iter().fold(Rate::default(), add)
    }
}

/// A rail group's label and the rail's number.
type RailKey<'a> = (&'a str, u32);

/// The rails of a dump, with their bytes and requests.
fn rails(dump: &Dump) -> impl Iterator<Item = (RailKey<'_>, (u64, u64))> {
    dump.transports.iter().flat_map(|group| {
        let counts = |RailDump { counters, .. }: &RailDump| {
            (counters.bytes + counters.direct_bytes, counters.posts + counters.direct)
        };
        group.rails.iter().map(move |rail| ((group.label.as_str(), rail.counters.rail), counts(rail)))
    })
}

fn per_s(now: u64, then: u64, took: Duration) -> f64 {
    match took.is_zero() {
        true => 0.0,
        false => now.saturating_sub(then) as f64 / took.as_secs_f64(),
    }
}
