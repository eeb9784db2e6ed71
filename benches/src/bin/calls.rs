//! What calls of the library cost from Rust: the twin of `benches/python/pair.py`, for `benches/python/compare.py`.
//!
//! `calls` starts a target in a process of its own, and serves the command `calls`, one a line of its input. It answers
//! each with a line of JSON: medians in microseconds. It ends with its input.

use std::io::BufRead;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use backend_loopback::Loopback;
use benches::processes::transport;
use benches::{BenchResult, LIMIT, exit_code};
use transport_core::{Access, Fabric, FabricBuilder, Pages, Peer, Region, RemoteRegion, wait};

/// How long a process may be silent. `compare.py` stops the processes while another program runs.
const PAUSE: Duration = Duration::from_secs(600);
/// As in `pair.py`.
const PAGE: usize = 4096;
const PAGES: u32 = 16_384;
const WRITES: usize = 20_000;
const POSTS: usize = 40;
/// The pages of an operation that takes some 20 µs.
const SHORT_PAGES: u32 = 64;

fn main() -> ExitCode {
    let done = match std::env::args().nth(1).as_deref() {
        Some("target") => target(),
        None => initiator(),
        Some(_) => Err("calls takes no arguments".into()),
    };
    exit_code("calls", done.map(|()| ExitCode::SUCCESS))
}

fn open() -> BenchResult<(Fabric, Region)> {
    let loopback = Loopback::new();
    let fabric = FabricBuilder::new().transport(transport(loopback, None)?).peer_timeout(PAUSE).open()?;
    let region = fabric.alloc(PAGE * PAGES as usize, Access::all())?;
    Ok((fabric, region))
}

/// Prints its address, and serves its region until the input ends.
fn target() -> BenchResult<()> {
    let (fabric, region) = open()?;
    fabric.publish("region", &region)?;
    let listener = wait(fabric.listen("127.0.0.1:0"), LIMIT)??;
    println!("{}", listener.local_addr());
    std::io::stdin().lines().try_for_each(|line| line.map(drop))?;
    Ok(())
}

fn initiator() -> BenchResult<()> {
    let mut target = Command::new(std::env::current_exe()?);
    let mut target = target.arg("target").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut address = String::new();
    std::io::BufReader::new(target.stdout.take().ok_or("no output")?).read_line(&mut address)?;
    let (fabric, region) = open()?;
    let peer = wait(fabric.connect(address.trim()), LIMIT)??;
    let remote = wait(peer.region("region"), LIMIT)??;
    println!(r#"{{"ready":true}}"#);
    for command in std::io::stdin().lines() {
        match command?.as_str() {
            "calls" => println!("{}", round(&peer, &region, &remote)?),
            other => return Err(format!("no such command: {other}").into()),
        }
    }
    drop(peer);
    drop(target.stdin.take());
    target.wait()?;
    Ok(())
}

/// The times of a round, as JSON.
fn round(peer: &Peer, region: &Region, remote: &RemoteRegion) -> BenchResult<String> {
    let write = median(WRITES, || Ok(peer.write(region, 0..PAGE, remote, 0)?.wait(LIMIT).map(drop)?))?;
    let (from, to) = (shuffled(PAGES, 1), shuffled(PAGES, 2));
    let mut posts = Vec::new();
    for _ in 0..POSTS {
        let begun = Instant::now();
        let mut op = peer.write_pages(region, Pages::new(&from[..]), remote, Pages::new(&to[..]), PAGE)?;
        posts.push(begun.elapsed());
        op.wait(LIMIT)?;
    }
    let (from, to) = (Pages::new(&from[..SHORT_PAGES as usize]), Pages::new(&to[..SHORT_PAGES as usize]));
    let short = median(WRITES / 10, || {
        Ok(peer.write_pages(region, &from, remote, &to, PAGE)?.wait(LIMIT).map(drop)?)
    })?;
    Ok(format!(r#"{{"write":{write:.4},"post":{:.3},"short":{short:.3}}}"#, micros(&mut posts)))
}

/// The median time of a call.
fn median(times: usize, call: impl Fn() -> BenchResult<()>) -> BenchResult<f64> {
    let mut measured = Vec::with_capacity(times);
    for _ in 0..times {
        let begun = Instant::now();
        call()?;
        measured.push(begun.elapsed());
    }
    Ok(micros(&mut measured))
}

fn micros(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    1e6 * times[times.len() / 2].as_secs_f64()
}

/// The numbers below `count`, in a random order that is the same in each run.
fn shuffled(count: u32, seed: u64) -> Vec<u32> {
    let mut numbers: Vec<_> = (0..count).collect();
    fastrand::Rng::with_seed(seed).shuffle(&mut numbers);
    numbers
}
