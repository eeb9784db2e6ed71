//! The two comparisons: the latency of our ping-pong with that of libibverbs' own (`benches/verbs/pingpong.c`), and the
//! bandwidth of our writes with that of `ib_write_bw`.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use benches::BenchResult;
use benches::compare::{Compared, median, read};
use benches::inside::is_in_machine;
use benches::ping_pong::AnnouncedBy;
use benches::processes::{BenchDevices, ConnectedWriter, ProcessRole, pin};

use crate::perftest::row;
use crate::{Ports, WriteLoop};

/// Bytes of a write.
const SIZE: usize = 8;
/// Round trips of a run.
const COUNT: usize = 2000;
/// The maximum of the median ratio.
const LIMIT: f64 = 1.1;

/// The measured side of our ping-pong.
#[derive(clap::Args)]
pub struct Pings {
    #[command(flatten)]
    ports: Ports,
}

impl Pings {
    /// Prints half of the median round trip.
    pub fn run(self) -> BenchResult<ExitCode> {
        let writer = ConnectedWriter::echo(&self.ports, SIZE, AnnouncedBy::Imm)?;
        pin(ProcessRole::Writer)?;
        let latency = writer.ping_pong(SIZE, AnnouncedBy::Imm)?.latency(COUNT)?;
        println!(r#"{{"size":{SIZE},"count":{COUNT},"latency_us":{:.3}}}"#, latency.as_secs_f64() * 1e6);
        Ok(ExitCode::SUCCESS)
    }
}

/// Compiles the program in C beside this program. In the virtual machine it is there already.
pub fn compile(here: bool) -> BenchResult<PathBuf> {
    match is_in_machine() && !here {
        true => Ok(std::env::current_exe()?.with_file_name("pingpong")),
        false => benches::compare::compile("verbs/pingpong", "ibverbs", "libibverbs-dev"),
    }
}

/// Prints the latencies. Returns true if the ratio is within its limit.
pub fn latency(ports: &Ports, pairs: usize, pingpong: &Path) -> BenchResult<bool> {
    let (size, count) = (SIZE.to_string(), COUNT.to_string());
    let our = || -> BenchResult<f64> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("pings").args(ports.arguments());
        read(command, "latency_us")
    };
    let their = || {
        let mut command = Command::new(pingpong);
        command.args(ports.arguments()).args(["--size", &size, "--count", &count]);
        read(command, "latency_us")
    };
    let compared = Compared::of(pairs, our, their)?;
    // The target of ib_write_lat polls memory and gets no completion: this is the limit of that method.
    let typical = |_| -> BenchResult<f64> {
        let row = row("ib_write_lat", ports, SIZE, &["-n", &count])?;
        Ok(*row.get(4).ok_or("ib_write_lat has no typical time")?)
    };
    let polled = (0..5).map(typical).collect::<BenchResult<Vec<f64>>>()?;
    println!("half a round trip of {SIZE} bytes with imm, us");
    println!("     ours  pingpong.c  median ratio  at most  ib_write_lat (no imm)");
    println!(
        "{:>9.2}  {:>10.2}  {:>12.3}  {LIMIT:>7}  {:>21.2}",
        compared.ours(),
        compared.theirs(),
        compared.ratio(),
        median(&polled)
    );
    Ok(compared.ratio() <= LIMIT)
}

/// Writes under way. This is the default of perftest.
const WRITES_UNDER_WAY: usize = 128;
/// The sizes, and the number of writes of a run.
const BANDWIDTH_SIZES: [(usize, u64); 2] = [(65_536, 1500), (1 << 20, 192)];
/// The minimum of the ratio's lower bound.
const ASKED: f64 = 0.97;
/// The megabyte of `ib_write_bw` has 2^20 bytes.
const GB_PER_MB: f64 = 1.048_576e-3;

/// Prints a table. Returns true if all ratios reach their minimum.
pub fn bandwidth(ports: &Ports, pairs: usize) -> BenchResult<bool> {
    println!("{pairs} pairs, 1 queue pair, {WRITES_UNDER_WAY} writes under way, GB/s");
    println!("     size     ours  ib_write_bw  median ratio  surely (95 %)  asked");
    let mut is_well = true;
    for (size, count) in BANDWIDTH_SIZES {
        // As ib_write_bw does: one write at a time, always the same memory, and a target that sleeps.
        let load = WriteLoop {
            inflight: WRITES_UNDER_WAY,
            batch: 1,
            region: size,
            count: Some(count),
            worker: true,
            ..WriteLoop::of(ports.clone(), size)
        };
        let our = || read(load.command()?, "gb_per_s");
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
