//! What each rail carried.

use multirail::Fabric;
use serde::Serialize;

use crate::cli::failure::Done;
use crate::cli::output;
use crate::cli::units::round;

/// Bytes by rail.
#[derive(Debug, Serialize)]
pub struct Rails {
    rails: Vec<Rail>,
    /// What the busiest carried more than the least busy one, in percent of the mean.
    imbalance_percent: f64,
}

#[derive(Debug, Serialize)]
struct Rail {
    device: String,
    bytes: u64,
}

impl Rails {
    /// What `fabric` moved so far.
    pub fn of(fabric: &Fabric) -> Self {
        let rail = |counters: multirail::RailCounters| Rail {
            device: counters.device,
            bytes: counters.bytes + counters.direct_bytes,
        };
        Self::new(fabric.counters().into_iter().map(rail).collect())
    }

    fn new(rails: Vec<Rail>) -> Self {
        let bytes = || rails.iter().map(|rail| rail.bytes);
        let (most, least) = (bytes().max().unwrap_or(0), bytes().min().unwrap_or(0));
        let mean = bytes().sum::<u64>() as f64 / rails.len().max(1) as f64;
        let imbalance_percent = if mean > 0.0 { round((most - least) as f64 / mean * 100.0) } else { 0.0 };
        Self { rails, imbalance_percent }
    }

    /// What came since `before`.
    pub fn since(self, before: &Self) -> Self {
        let left = |(now, before): (Rail, &Rail)| Rail { bytes: now.bytes - before.bytes, ..now };
        Self::new(self.rails.into_iter().zip(&before.rails).map(left).collect())
    }

    /// Prints a table where there is more than one.
    pub fn print(&self) -> Done {
        if self.rails.len() < 2 {
            return Ok(());
        }
        let total = self.rails.iter().map(|rail| rail.bytes).sum::<u64>() as f64;
        let cells = |rail: &Rail| {
            let share = if total > 0.0 { rail.bytes as f64 / total * 100.0 } else { 0.0 };
            vec![rail.device.clone(), format!("{:.3}", rail.bytes as f64 / 1e9), format!("{share:.2}")]
        };
        output::table(&["rail", "GB", "% of all"], self.rails.iter().map(cells).collect(), 1..3)?;
        output::line(&format!("{:.2} GB in all, imbalance {:.2} %", total / 1e9, self.imbalance_percent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rails(bytes: &[u64]) -> Rails {
        Rails::new(bytes.iter().map(|bytes| Rail { device: "card".into(), bytes: *bytes }).collect())
    }

    #[test]
    fn imbalance_is_of_the_mean() {
        assert_eq!(rails(&[100, 100]).imbalance_percent, 0.0);
        let since = rails(&[110, 120]).since(&rails(&[10, 10]));
        assert!((since.imbalance_percent - 10.0 / 105.0 * 100.0).abs() < 0.01, "{since:?}");
        assert_eq!(rails(&[0, 0]).imbalance_percent, 0.0);
        assert_eq!(rails(&[]).imbalance_percent, 0.0);
    }
}
