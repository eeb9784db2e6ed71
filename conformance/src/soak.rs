//! Soak test: random work between two processes for a long time.
//!
//! The test checks every byte and prints the resources that both processes hold.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use transport_core::spi::Operations;
use transport_core::{ErrorKind, Op, Pages, Peer, RemoteRegion, SendOptions};

use crate::backend_under_test::{BackendUnderTest, Variant};
use crate::check::{TestResult, TrialFailure, ensure_eq, ensure_err, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS, content};
use crate::process::{self, HelperProcess, LIMIT, ResourceUsage, default_fabric, permutation};
use crate::trial::{TrialContext, TrialFabric};

const LEN: usize = 4 << 20;
/// The number of printed rows after the first.
const ROWS: u32 = 10;
const GONE: &[ErrorKind] = &[ErrorKind::Closed, ErrorKind::PeerDied, ErrorKind::Cancelled];
const REFUSALS: &[ErrorKind] = &[ErrorKind::Revoked, ErrorKind::RemoteAccess];

/// The duration, the seed, and the excluded steps of a soak test.
#[derive(Debug, Clone)]
pub struct SoakConfig {
    /// The duration.
    pub span: Duration,
    /// The seed of all random choices.
    pub seed: u64,
    /// Names of excluded steps: exclude steps to find the one that leaks memory.
    pub without: Vec<String>,
}

/// Runs the soak test against `backend`. This is the `main` of a test without harness, and of its helper process.
pub fn soak(backend: Arc<dyn BackendUnderTest>, config: &SoakConfig) -> ExitCode {
    if let Some(code) = process::run_if_helper(std::slice::from_ref(&backend)) {
        return code;
    }
    let context = TrialContext::new(backend, Variant::Plain, config.seed);
    match Soak::new(&context, config).and_then(|mut soak| soak.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            println!("soak FAILED, seed {}: {failure}", config.seed);
            ExitCode::FAILURE
        }
    }
}

/// A random step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SoakStep {
    Write,
    Pages,
    Read,
    Send,
    Imms,
    PeerWrite,
    Cancel,
    Revoke,
    Reconnect,
}

impl SoakStep {
    /// The relative frequency of each step.
    const WEIGHTS: [(Self, u32); 9] = [
        (Self::Write, 30),
        (Self::Pages, 15),
        (Self::Read, 15),
        (Self::Send, 15),
        (Self::Imms, 10),
        (Self::PeerWrite, 15),
        (Self::Cancel, 10),
        (Self::Revoke, 8),
        (Self::Reconnect, 1),
    ];

    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

struct Soak {
    random: fastrand::Rng,
    config: SoakConfig,
    fabric: TrialFabric,
    helper: HelperProcess,
    address: String,
    peer: Peer,
    near: CheckedRegion,
    remote: RemoteRegion,
    /// The imms that the helper has received since it connected.
    imms: u64,
    supported: Operations,
    steps: BTreeMap<SoakStep, u64>,
    bytes: u64,
}

impl Soak {
    fn new(context: &TrialContext, config: &SoakConfig) -> TestResult<Self> {
        let fabric = default_fabric(context)?;
        let mut helper = HelperProcess::spawn_idle(context)?;
        helper.command("open-default")?;
        let address = helper.command("listen")?;
        let peer = helper.connect(&fabric, &address)?;
        helper.command(&format!("alloc far {LEN} 1"))?;
        let near = CheckedRegion::new(&fabric, LEN, FULL_ACCESS, 2)?;
        fabric.publish("near", &near.region)?;
        let remote = within(LIMIT, "a lookup", peer.region("far"))??;
        let supported = fabric.transports()[0].capabilities.operations;
        let (random, steps) = (fastrand::Rng::with_seed(config.seed), BTreeMap::new());
        let config = config.clone();
        Ok(Self {
            random,
            config,
            fabric,
            helper,
            address,
            peer,
            near,
            remote,
            imms: 0,
            supported,
            steps,
            bytes: 0,
        })
    }

    fn run(&mut self) -> TestResult {
        let begun = Instant::now();
        println!("soak: seed {}, {:?}", self.config.seed, self.config.span);
        println!("| s | steps | GB moved | RSS here, there (MB) | descriptors | threads |");
        println!("|---|---|---|---|---|---|");
        self.row(begun.elapsed())?;
        for row in 1..=ROWS {
            while begun.elapsed() < self.config.span * row / ROWS {
                self.step()?;
            }
            self.row(begun.elapsed())?;
        }
        let steps: Vec<_> =
            self.steps.iter().map(|(step, count)| format!("{} {count}", step.name())).collect();
        println!("steps: {}", steps.join(", "));
        Ok(())
    }

    fn row(&mut self, elapsed: Duration) -> TestResult {
        let (here, there) = (ResourceUsage::of_this_process()?, self.helper.resource_usage()?);
        let megabytes = |usage: &ResourceUsage| usage.resident as f64 / 1e6;
        println!(
            "| {} | {} | {:.2} | {:.1}, {:.1} | {}, {} | {}, {} |",
            elapsed.as_secs(),
            self.steps.values().sum::<u64>(),
            self.bytes as f64 / 1e9,
            megabytes(&here),
            megabytes(&there),
            here.files,
            there.files,
            here.threads,
            there.threads
        );
        Ok(())
    }

    fn step(&mut self) -> TestResult {
        let all: u32 = SoakStep::WEIGHTS.iter().map(|(_, weight)| weight).sum();
        let mut at = self.random.u32(..all);
        let chosen = SoakStep::WEIGHTS.iter().find(|(_, weight)| {
            let is_this = at < *weight;
            at = at.saturating_sub(*weight);
            is_this
        });
        let step = chosen.map_or(SoakStep::Write, |(step, _)| *step);
        let needs = match step {
            SoakStep::Read => Operations::READ,
            SoakStep::Send => Operations::SEND,
            SoakStep::Imms => Operations::WRITE_IMM,
            _ => Operations::empty(),
        };
        if !self.supported.contains(needs) || self.config.without.contains(&step.name()) {
            return Ok(());
        }
        let done = match step {
            SoakStep::Write => self.write(),
            SoakStep::Pages => self.pages(),
            SoakStep::Read => self.read(),
            SoakStep::Send => self.send(),
            SoakStep::Imms => self.imms(),
            SoakStep::PeerWrite => self.peer_write(),
            SoakStep::Cancel => self.cancel(),
            SoakStep::Revoke => self.revoke(),
            SoakStep::Reconnect => self.reconnect(),
        };
        done.map_err(|why| TrialFailure::new(format!("{}, after {:?}: {why}", step.name(), self.steps)))?;
        *self.steps.entry(step).or_default() += 1;
        Ok(())
    }

    /// Chooses a length of a random order of magnitude, and an offset where it fits.
    fn range(&mut self) -> (usize, usize) {
        let most = self.random.u32(0..=22);
        let len = self.random.usize(1..=1 << most);
        (self.random.usize(0..=LEN - len), len)
    }

    fn write(&mut self) -> TestResult {
        let ((at, len), seed) = (self.range(), self.random.u64(..));
        self.near.fill(seed)?;
        self.peer.write(&self.near.region, 0..len, &self.remote, at)?.wait(LIMIT)?;
        self.bytes += len as u64;
        self.helper.command(&format!("check far {at} {len} {seed}")).map(drop)
    }

    /// Writes pages and reads them back to check that each is at its offset.
    fn pages(&mut self) -> TestResult {
        let page = 1 << self.random.u32(6..=16);
        let (count, seed) = (self.random.u32(1..=(LEN / page).min(500) as u32), self.random.u64(..));
        let (from, to) = permutation(count, seed);
        self.near.fill(seed)?;
        let (sources, targets) = (Pages::new(from.clone()), Pages::new(to.clone()));
        let (near, remote) = (&self.near.region, &self.remote);
        self.peer.write_pages(near, &sources, remote, &targets, page)?.wait(LIMIT)?;
        self.bytes += 2 * u64::from(count) * page as u64;
        if self.supported.contains(Operations::READ) {
            let sent = content(seed, LEN);
            for (from, to) in from.into_iter().zip(to) {
                let (from, to) = (from as usize * page, to as usize * page);
                self.near.expect(to, &sent[from..from + page]);
            }
            let all = count as usize * page;
            self.peer.read(&self.near.region, 0..all, &self.remote, 0)?.wait(LIMIT)?;
            self.near.check("pages that were read back")?;
        }
        self.helper.command(&format!("fill far {seed}")).map(drop)
    }

    fn read(&mut self) -> TestResult {
        let ((at, len), seed) = (self.range(), self.random.u64(..));
        self.helper.command(&format!("fill far {seed}"))?;
        self.peer.read(&self.near.region, at..at + len, &self.remote, at)?.wait(LIMIT)?;
        self.bytes += len as u64;
        let there = content(seed, LEN);
        self.near.expect(at, &there[at..at + len]);
        self.near.check("the bytes read")
    }

    fn send(&mut self) -> TestResult {
        let len = self.random.usize(1..=64 << 10);
        let (at, seed) = (self.random.usize(0..=LEN - len), self.random.u64(..));
        self.near.fill(seed)?;
        self.helper.command(&format!("receive far {at} {len}"))?;
        self.peer.send_with(&self.near.region, 0..len, &SendOptions::new().imm(9))?.wait(LIMIT)?;
        self.bytes += len as u64;
        ensure_eq("the received message", self.helper.command("wait-receive")?, format!("{len} Some(9)"))?;
        self.helper.command(&format!("check far {at} {len} {seed}")).map(drop)
    }

    fn imms(&mut self) -> TestResult {
        let count = self.random.u64(1..=300);
        let ops: Result<Vec<Op>, _> = (0..count).map(|_| self.peer.write_imm(5)).collect();
        for mut op in ops? {
            op.wait(LIMIT)?;
        }
        self.imms += count;
        let came = self.helper.command(&format!("expect 5 {}", self.imms))?;
        ensure_eq("imms", came, self.imms.to_string())
    }

    /// The helper writes to this process.
    fn peer_write(&mut self) -> TestResult {
        let ((at, len), seed) = (self.range(), self.random.u64(..));
        self.helper.command(&format!("fill far {seed}"))?;
        self.helper.command(&format!("write far 0 {len} near {at} -"))?;
        self.bytes += len as u64;
        self.near.expect(at, &content(seed, len));
        self.near.check("the bytes that the helper wrote")
    }

    /// Cancels outstanding writes. Once the cancels have returned, only the owner writes the target's memory.
    fn cancel(&mut self) -> TestResult {
        let mut left = Vec::new();
        for _ in 0..self.random.usize(1..=8) {
            let (at, len) = self.range();
            let op = self.peer.write(&self.near.region, 0..len, &self.remote, at)?;
            match self.random.bool() {
                true => match op.cancel().wait(LIMIT) {
                    Ok(outcome) => self.bytes += outcome.bytes,
                    Err(error) => drop(ensure_err::<()>("a cancelled write", Err(error), GONE)?),
                },
                false => left.push(op),
            }
        }
        for mut op in left {
            self.bytes += op.wait(LIMIT)?.bytes;
        }
        let seed = self.random.u64(..);
        self.helper.command(&format!("fill far {seed}"))?;
        self.helper.command("check-all far").map(drop)
    }

    /// Revokes the region of one side while writes to it are outstanding, and replaces it by a new region.
    fn revoke(&mut self) -> TestResult {
        let (seed, is_ours) = (self.random.u64(..), self.random.bool());
        if is_ours {
            self.near.revoke_and_wait(&self.fabric)?;
            self.helper
                .expect_error("write far 0 1000 near 0 -", &["Revoked", "RemoteAccess", "NotFound"])?;
            self.near = CheckedRegion::new(&self.fabric, LEN, FULL_ACCESS, seed)?;
            self.fabric.unpublish("near");
            return Ok(self.fabric.publish("near", &self.near.region)?);
        }
        let ops: Result<Vec<Op>, _> =
            (0..4).map(|_| self.peer.write(&self.near.region, 0..LEN / 4, &self.remote, 0)).collect();
        self.helper.command("revoke far")?;
        for mut op in ops? {
            if let Err(error) = op.wait(LIMIT) {
                ensure_err::<()>("an outstanding write", Err(error), REFUSALS)?;
            }
        }
        let late =
            self.peer.write(&self.near.region, 0..8, &self.remote, 0).and_then(|mut op| op.wait(LIMIT));
        ensure_err("a write to a revoked region", late, REFUSALS)?;
        self.helper.command("free far")?;
        self.helper.command(&format!("alloc far {LEN} {seed}"))?;
        self.remote = within(LIMIT, "a lookup", self.peer.region("far"))??;
        Ok(())
    }

    fn reconnect(&mut self) -> TestResult {
        let op = self.peer.write(&self.near.region, 0..LEN, &self.remote, 0)?;
        self.peer.disconnect();
        let mut op = op;
        if let Err(error) = op.wait(LIMIT) {
            ensure_err::<()>("an outstanding write", Err(error), GONE)?;
        }
        self.helper.command("wait-closed")?;
        let address = self.address.clone();
        self.peer = self.helper.connect(&self.fabric, &address)?;
        self.imms = 0;
        self.remote = within(LIMIT, "a lookup", self.peer.region("far"))??;
        let seed = self.random.u64(..);
        self.helper.command(&format!("fill far {seed}")).map(drop)
    }
}
