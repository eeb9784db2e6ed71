//! Our writes against `ib_write_bw`'s.

use std::process::Command;

use benches::BenchResult;
use benches::compare::{Compared, read};

use crate::Ports;
use crate::WriteLoop;
use crate::perftest::row;

/// Writes under way: perftest's own.
const WINDOW: usize = 128;
/// Sizes, with the writes of a run.
const SIZES: [(usize, u64); 2] = [(65_536, 1500), (1 << 20, 192)];
/// The least that the ratio must surely be.
const ASKED: f64 = 0.97;
/// The megabyte of `ib_write_bw` has 2^20 bytes.
const GB_PER_MB: f64 = 1.048_576e-3;

/// Prints a table; whether all ratios are as asked.
pub fn compare(ports: &Ports, pairs: usize) -> BenchResult<bool> {
    println!("{pairs} pairs, 1 queue pair, {WINDOW} writes under way, GB/s");
    println!("     size     ours  ib_write_bw  median ratio  surely (95 %)  asked");
    let mut is_well = true;
    for (size, count) in SIZES {
        // As there: write by write, the same memory over and over, and a target that sleeps.
        let load = WriteLoop {
            inflight: WINDOW,
            batch: 1,
            region: size,
            count: Some(count),
            worker: true,
            ..WriteLoop::of(ports.clone(), size)
        };
        let our = || -> BenchResult<f64> {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("ours").args(load.arguments());
            read(command, "gb_per_s")
        };
        let their = || {
            let row = row("ib_write_bw", ports, size, &["-n", &count.to_string(), "-q", "1"])?;
            Ok(row.get(3).ok_or("ib_write_bw has no average")? * GB_PER_MB)
        };
        let compared = Compared::of(pairs, our, their)?;
        let surely = compared.at_least();
        println!(
            "{size:>9}  {:>7.4}  {:>11.4}  {:>12.3}  {surely:>13.3}  {ASKED:>5}",
            compared.ours(),
            compared.theirs(),
            compared.ratio(),
        );
        is_well &= surely >= ASKED;
    }
    Ok(is_well)
}
