//! Our ping-pong against one of libibverbs' own, `benches/verbs/pingpong.c`.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use benches::BenchResult;
use benches::compare::{Compared, median, read};
use benches::ends::{BenchDevices, ConnectedWriter};
use benches::ends::{ProcessRole, pin};

use crate::Ports;
use crate::machine::is_inside;
use crate::perftest::row;

/// Bytes of a write.
const SIZE: usize = 8;
/// Round trips of a run.
const COUNT: usize = 2000;
/// The most that the median ratio may be.
const LIMIT: f64 = 1.1;

/// Our measured side.
#[derive(clap::Args)]
pub struct Pings {
    #[command(flatten)]
    ports: Ports,
}

impl Pings {
    /// Prints half of the median round trip.
    pub fn run(self) -> BenchResult<ExitCode> {
        let ends = ConnectedWriter::echo(&self.ports, SIZE)?;
        pin(ProcessRole::Writer)?;
        let latency = ends.volley(SIZE).latency(COUNT)?;
        println!(r#"{{"size":{SIZE},"count":{COUNT},"latency_us":{:.3}}}"#, latency.as_secs_f64() * 1e6);
        Ok(ExitCode::SUCCESS)
    }
}

/// The program in C, beside this one; in the machine it is there.
pub fn compile(here: bool) -> BenchResult<PathBuf> {
    match is_inside() && !here {
        true => Ok(std::env::current_exe()?.with_file_name("pingpong")),
        false => benches::compare::compile("verbs/pingpong", "ibverbs", "libibverbs-dev"),
    }
}

/// Prints a table; whether the ratio is as asked.
pub fn compare(ports: &Ports, pairs: usize, pingpong: &Path) -> BenchResult<bool> {
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
    // Its target polls memory, and gets no completion: the limit of another way to do it.
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
