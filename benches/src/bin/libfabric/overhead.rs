//! Ours against theirs, in turn, so that what the machine does meanwhile falls on both.

use std::process::{Command, ExitCode};

use crate::Done;
use crate::network;
use crate::ours::Load;
use crate::theirs::Writes;

/// A size, what is compared there, and the least that the ratio must surely be.
const SIZES: [(usize, &str, f64); 2] = [(65_536, "gb_per_s", 0.95), (8, "mops", 0.9)];

/// Ours against theirs.
#[derive(clap::Args)]
pub struct Overhead {
    /// Providers.
    #[arg(long, value_delimiter = ',', default_value = "tcp,shm")]
    providers: Vec<String>,
    /// Pairs of runs of each.
    #[arg(long, default_value_t = 61)]
    pairs: usize,
    /// Writes under way.
    #[arg(long, default_value_t = 1024)]
    inflight: usize,
    /// How long a run measures, in milliseconds.
    #[arg(long, default_value_t = 300)]
    millis: u64,
}

impl Overhead {
    /// Prints a table; fails where a bound is not reached.
    pub fn run(self) -> Done<ExitCode> {
        if let Some(code) = network::enter()? {
            return Ok(code);
        }
        let writes = Writes::compile()?;
        let mut code = ExitCode::SUCCESS;
        println!("{} pairs of {} ms, {} writes under way", self.pairs, self.millis, self.inflight);
        println!("provider      size  figure      ours    theirs  median ratio  surely (95 %)  asked");
        for provider in &self.providers {
            for (size, figure, asked) in SIZES {
                let inflight = self.inflight;
                let load = Load { inflight, millis: self.millis, ..Load::of(provider, size) };
                let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
                for pair in 0..self.pairs {
                    // Who goes first changes, in case the second has it easier.
                    let (a, b) = match pair % 2 {
                        0 => (read(our(&load)?, figure)?, read(writes.command(&load), figure)?),
                        _ => {
                            let b = read(writes.command(&load), figure)?;
                            (read(our(&load)?, figure)?, b)
                        }
                    };
                    ours.push(a);
                    theirs.push(b);
                    ratios.push(a / b);
                }
                let surely = lower_bound(&mut ratios);
                let ratio = median(&mut ratios);
                let (ours, theirs) = (median(&mut ours), median(&mut theirs));
                println!(
                    "{provider:<10} {size:>7}  {figure:<8} {ours:>7.4}   {theirs:>7.4}  {ratio:>12.3}  \
                     {surely:>13.3}  {asked:>5}"
                );
                if surely < asked {
                    code = ExitCode::FAILURE;
                }
            }
        }
        Ok(code)
    }
}

/// This program as our side of `load`.
fn our(load: &Load) -> Done<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("ours").args(load.arguments());
    Ok(command)
}

/// Runs a side and reads one of its figures.
fn read(mut command: Command, figure: &str) -> Done<f64> {
    let output = command.output()?;
    let value = find(&String::from_utf8_lossy(&output.stdout), figure).filter(|_| output.status.success());
    let words = || String::from_utf8_lossy(&output.stderr).into_owned();
    Ok(value.ok_or_else(|| format!("{command:?} measured nothing: {}", words()))?)
}

/// A figure of a line of JSON.
pub fn find(line: &str, figure: &str) -> Option<f64> {
    let rest = line.split(&format!("\"{figure}\":")).nth(1)?;
    rest.split([',', '}']).next()?.trim().parse().ok()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        0 => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    }
}

/// What the median is at least, with 95 %: the order statistic with at most 5 % of a fair
/// coin's binomial below it (the sign test, which asks nothing of the distribution). Of fewer
/// than five values nothing is sure.
fn lower_bound(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len() as i32;
    let (mut below, mut chance, mut index) = (0.0, 0.5_f64.powi(n), None);
    for k in 0..n {
        below += chance;
        if below > 0.05 {
            break;
        }
        index = Some(k as usize);
        chance *= f64::from(n - k) / f64::from(k + 1);
    }
    index.map_or(0.0, |index| values[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_those_of_the_sign_test() {
        let values = |n: usize| (1..=n).map(|value| value as f64).collect::<Vec<_>>();
        // Tables of the sign test: of 15 values the 4th, of 20 the 6th; 5 are the fewest.
        for (n, want) in [(4, 0.0), (5, 1.0), (15, 4.0), (20, 6.0)] {
            assert_eq!(lower_bound(&mut values(n)), want, "{n}");
        }
        assert_eq!((median(&mut values(15)), median(&mut values(4))), (8.0, 2.5));
    }
}
