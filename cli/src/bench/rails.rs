//! The bytes that each rail carried.

use multirail::{Explanation, Fabric};
use serde::Serialize;

use crate::failure::CommandResult;
use crate::output::{self, TextTable};
use crate::units::{Size, round};

/// The bytes of each rail that can be used.
#[derive(Debug, Serialize)]
pub struct Rails {
    rails: Vec<RailReport>,
    /// The difference between the busiest and the least busy rail, in percent of the mean. `None` if all bytes used one
    /// rail, as small operations do.
    imbalance_percent: Option<f64>,
}

#[derive(Debug, Serialize)]
struct RailReport {
    #[serde(skip)]
    transport: String,
    /// The number in the transport.
    #[serde(skip)]
    rail: u32,
    device: String,
    bytes: u64,
    /// The requests that were posted again after the loss of another rail, and their bytes.
    #[serde(skip)]
    replayed: (u64, u64),
}

impl Rails {
    /// The bytes that each rail of `fabric` has moved so far.
    pub fn of(fabric: &Fabric) -> Self {
        let rail = |counters: multirail::RailCounters| RailReport {
            transport: counters.transport,
            rail: counters.rail,
            device: counters.device,
            bytes: counters.bytes + counters.direct_bytes,
            replayed: (counters.replayed, counters.replayed_bytes),
        };
        Self::new(fabric.counters().into_iter().map(rail).collect())
    }

    fn new(rails: Vec<RailReport>) -> Self {
        let bytes = || rails.iter().map(|rail| rail.bytes);
        let (most, least) = (bytes().max().unwrap_or(0), bytes().min().unwrap_or(0));
        let mean = bytes().sum::<u64>() as f64 / rails.len().max(1) as f64;
        let is_spread = bytes().filter(|bytes| *bytes > 0).count() > 1;
        let imbalance_percent = is_spread.then(|| round((most - least) as f64 / mean * 100.0));
        Self { rails, imbalance_percent }
    }

    /// The bytes since `before`.
    pub fn since(self, before: &Self) -> Self {
        let left = |(now, before): (RailReport, &RailReport)| RailReport {
            bytes: now.bytes - before.bytes,
            replayed: (now.replayed.0 - before.replayed.0, now.replayed.1 - before.replayed.1),
            ..now
        };
        Self::new(self.rails.into_iter().zip(&before.rails).map(left).collect())
    }

    /// Keeps the rails that the explained parts of an operation can use. Rails of other transports, and rails without a
    /// rail of the peer, carry no bytes and are no imbalance.
    pub fn used_by(mut self, explained: &[Explanation]) -> Self {
        let is_used = |rail: &RailReport, part: &Explanation| {
            let taken = part.transports.iter().find(|choice| choice.taken);
            taken.is_some_and(|choice| choice.transport == rail.transport)
                && part.rails.iter().any(|plan| plan.rail == rail.rail && plan.unusable.is_none())
        };
        self.rails.retain(|rail| explained.iter().any(|part| is_used(rail, part)));
        Self::new(self.rails)
    }

    /// Prints a table of the rails, if there are several.
    pub fn print(&self) -> CommandResult {
        if self.rails.len() < 2 {
            return Ok(());
        }
        let total = self.bytes() as f64;
        let mut table = TextTable::named_by(0).text("rail").number("GB").number("% of total");
        for rail in &self.rails {
            let share = if total > 0.0 { rail.bytes as f64 / total * 100.0 } else { 0.0 };
            table.row(vec![rail.device.clone(), gigabytes(rail.bytes), format!("{share:.2}")]);
        }
        output::line("")?;
        table.print()?;
        output::print_text(&format!("{:.2} GB in total, {}", total / 1e9, self.imbalance()))
    }

    /// Prints a table of the rails of several measurements, with one row per page size.
    pub fn print_sizes<'a>(of_sizes: impl Iterator<Item = (Size, &'a Self)>) -> CommandResult {
        let table = TextTable::named_by(0)
            .number("size")
            .number("rails")
            .optional(1)
            .text("busiest rail")
            .number("GB");
        let mut table =
            table.text("least busy rail").number("GB").number("GB in total").optional(2).text("spread");
        let mut is_one = true;
        for (size, of_size) in of_sizes {
            let bytes = |rail: &&RailReport| rail.bytes;
            let Some(most) = of_size.rails.iter().max_by_key(bytes) else { continue };
            let Some(least) = of_size.rails.iter().min_by_key(bytes) else { continue };
            is_one &= of_size.rails.len() < 2;
            let (total, rails) = (gigabytes(of_size.bytes()), of_size.rails.len().to_string());
            let [most, least] = [most, least].map(|rail| (rail.device.clone(), gigabytes(rail.bytes)));
            let spread = of_size.imbalance();
            table.row(vec![size.to_string(), rails, most.0, most.1, least.0, least.1, total, spread]);
        }
        if is_one {
            return Ok(());
        }
        output::line("")?;
        table.print()
    }

    /// The requests that were posted again after the loss of a rail, and their bytes.
    pub fn replayed(&self) -> (u64, u64) {
        let add = |sum: (u64, u64), rail: &RailReport| (sum.0 + rail.replayed.0, sum.1 + rail.replayed.1);
        self.rails.iter().fold((0, 0), add)
    }

    fn bytes(&self) -> u64 {
        self.rails.iter().map(|rail| rail.bytes).sum()
    }

    fn imbalance(&self) -> String {
        self.imbalance_percent
            .map_or("all on one rail".to_owned(), |percent| format!("imbalance {percent:.2} %"))
    }
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.3}", bytes as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use multirail::{Access, FabricBuilder, WriteOptions};

    use super::*;

    fn rails(bytes: &[u64]) -> Rails {
        let rail = |(rail, bytes): (usize, &u64)| RailReport {
            transport: "cards".into(),
            rail: rail as u32,
            device: "card".into(),
            bytes: *bytes,
            replayed: (0, 0),
        };
        Rails::new(bytes.iter().enumerate().map(rail).collect())
    }

    #[test]
    fn imbalance_is_of_the_mean() {
        assert_eq!(rails(&[100, 100]).imbalance_percent, Some(0.0));
        let since = rails(&[110, 120]).since(&rails(&[10, 10]));
        let percent = since.imbalance_percent.expect("two rails carried bytes");
        assert!((percent - 10.0 / 105.0 * 100.0).abs() < 0.01, "{since:?}");
    }

    #[test]
    fn bytes_on_one_rail_have_no_imbalance() {
        for one in [&[8, 0][..], &[0, 0], &[7], &[]] {
            assert_eq!(rails(one).imbalance_percent, None, "{one:?}");
            assert_eq!(rails(one).imbalance(), "all on one rail");
        }
    }

    /// Two transports of two rails each. The peer has the second transport only.
    #[test]
    fn rails_that_the_peer_cannot_use_do_not_count() {
        const LEN: usize = 4 << 20;
        let transport = |label: &str, rails| {
            let config = backend_loopback::LoopbackConfig::default().devices(rails);
            multirail::TransportConfig::new(label, Arc::new(backend_loopback::Loopback::with(config)))
        };
        let open = |transports: Vec<_>| {
            let builder = transports.into_iter().fold(FabricBuilder::new(), FabricBuilder::transport);
            builder.open().unwrap()
        };
        let here = open(vec![transport("near", 2), transport("far", 2)]);
        let there = open(vec![transport("far", 2)]);
        let (peer, _) = here.connect_local(&there).unwrap();
        let src = here.alloc(LEN, Access::LOCAL).unwrap();
        let dst = there.alloc(LEN, Access::REMOTE_WRITE).unwrap();
        let remote = peer.import(&dst.descriptor()).unwrap();
        let options = WriteOptions::new();
        let explained = peer.explain_write(&src, 0..LEN, &remote, 0, &options).unwrap();
        let before = Rails::of(&here);
        peer.write(&src, 0..LEN, &remote, 0).unwrap().wait(Duration::from_secs(30)).unwrap();
        let all = Rails::of(&here).since(&before);
        assert_eq!(all.rails.len(), 4);
        assert!(all.imbalance_percent.is_some_and(|percent| percent >= 200.0), "{all:?}");
        let used = all.used_by(&[explained]);
        assert_eq!(used.rails.iter().map(|rail| rail.bytes).sum::<u64>(), LEN as u64, "{used:?}");
        assert!(
            used.rails.len() == 2 && used.imbalance_percent.is_some_and(|percent| percent < 1.0),
            "{used:?}"
        );
    }
}
