//! Random work between two processes for a long time, every byte checked, and what both hold meanwhile.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use transport_core::spi::Operations;
use transport_core::{ErrorKind, Op, Pages, Peer, RemoteRegion, SendOptions};

use crate::check::{Failure, Verdict, refused, same, within};
use crate::end::End;
use crate::ground::{Ground, OPEN, content};
use crate::process::{self, Census, Child, LIMIT, patient, permutation};
use crate::subject::{Subject, Variant};
use crate::trial::Context;

const LEN: usize = 4 << 20;
/// Rows that are printed, after the first.
const ROWS: u32 = 10;
const GONE: &[ErrorKind] = &[ErrorKind::Closed, ErrorKind::PeerDied, ErrorKind::Cancelled];
const REFUSALS: &[ErrorKind] = &[ErrorKind::Revoked, ErrorKind::RemoteAccess];

/// How long a soak takes, by which seed, and what it leaves out.
#[derive(Debug, Clone)]
pub struct Soaking {
    /// How long.
    pub span: Duration,
    /// Chooses all that is random.
    pub seed: u64,
    /// Names of steps that are left out, to find out which of them costs memory.
    pub without: Vec<String>,
}

/// Soaks `subject`, and prints what both processes hold. The `main` of a test without harness; a
/// helper process of it comes here too.
pub fn soak(subject: Arc<dyn Subject>, soaking: &Soaking) -> ExitCode {
    if let Some(code) = process::role(std::slice::from_ref(&subject)) {
        return code;
    }
    let context = Context::new(subject, Variant::Plain, soaking.seed);
    match Soak::new(&context, soaking).and_then(|mut soak| soak.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            println!("soak FAILED, seed {}: {failure}", soaking.seed);
            ExitCode::FAILURE
        }
    }
}

/// What is done at random.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Write,
    Pages,
    Read,
    Send,
    Imms,
    Theirs,
    Cancel,
    Revoke,
    Reconnect,
}

impl Step {
    /// How often each is done.
    const SHARES: [(Self, u32); 9] = [
        (Self::Write, 30),
        (Self::Pages, 15),
        (Self::Read, 15),
        (Self::Send, 15),
        (Self::Imms, 10),
        (Self::Theirs, 15),
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
    soaking: Soaking,
    fabric: End,
    child: Child,
    address: String,
    peer: Peer,
    near: Ground,
    remote: RemoteRegion,
    /// Imms that the helper has of ours since it met us.
    imms: u64,
    offered: Operations,
    steps: BTreeMap<Step, u64>,
    bytes: u64,
}

impl Soak {
    fn new(context: &Context, soaking: &Soaking) -> Verdict<Self> {
        let fabric = patient(context)?;
        let mut child = Child::spawn_idle(context)?;
        child.ask("open-patient")?;
        let address = child.ask("listen")?;
        let peer = child.meets(&fabric, &address)?;
        child.ask(&format!("alloc far {LEN} 1"))?;
        let near = Ground::new(&fabric, LEN, OPEN, 2)?;
        fabric.publish("near", &near.region)?;
        let remote = within(LIMIT, "a lookup", peer.region("far"))??;
        let offered = fabric.transports()[0].capabilities.operations;
        let (random, steps) = (fastrand::Rng::with_seed(soaking.seed), BTreeMap::new());
        let soaking = soaking.clone();
        Ok(Self {
            random,
            soaking,
            fabric,
            child,
            address,
            peer,
            near,
            remote,
            imms: 0,
            offered,
            steps,
            bytes: 0,
        })
    }

    fn run(&mut self) -> Verdict {
        let begun = Instant::now();
        println!("soak: seed {}, {:?}", self.soaking.seed, self.soaking.span);
        println!("| s | steps | GB moved | RSS here, there (MB) | descriptors | threads |");
        println!("|---|---|---|---|---|---|");
        self.row(begun.elapsed())?;
        for row in 1..=ROWS {
            while begun.elapsed() < self.soaking.span * row / ROWS {
                self.step()?;
            }
            self.row(begun.elapsed())?;
        }
        let steps: Vec<_> =
            self.steps.iter().map(|(step, count)| format!("{} {count}", step.name())).collect();
        println!("steps: {}", steps.join(", "));
        Ok(())
    }

    fn row(&mut self, elapsed: Duration) -> Verdict {
        let (here, there) = (Census::take()?, self.child.census()?);
        let megabytes = |census: &Census| census.resident as f64 / 1e6;
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

    fn step(&mut self) -> Verdict {
        let all: u32 = Step::SHARES.iter().map(|(_, share)| share).sum();
        let mut at = self.random.u32(..all);
        let chosen = Step::SHARES.iter().find(|(_, share)| {
            let is_this = at < *share;
            at = at.saturating_sub(*share);
            is_this
        });
        let step = chosen.map_or(Step::Write, |(step, _)| *step);
        let needs = match step {
            Step::Read => Operations::READ,
            Step::Send => Operations::SEND,
            Step::Imms => Operations::WRITE_IMM,
            _ => Operations::empty(),
        };
        if !self.offered.contains(needs) || self.soaking.without.contains(&step.name()) {
            return Ok(());
        }
        let done = match step {
            Step::Write => self.write(),
            Step::Pages => self.pages(),
            Step::Read => self.read(),
            Step::Send => self.send(),
            Step::Imms => self.imms(),
            Step::Theirs => self.theirs(),
            Step::Cancel => self.cancel(),
            Step::Revoke => self.revoke(),
            Step::Reconnect => self.reconnect(),
        };
        done.map_err(|why| Failure::new(format!("{}, after {:?}: {why}", step.name(), self.steps)))?;
        *self.steps.entry(step).or_default() += 1;
        Ok(())
    }

    /// A length of any order of magnitude, and a place where so much fits.
    fn range(&mut self) -> (usize, usize) {
        let most = self.random.u32(0..=22);
        let len = self.random.usize(1..=1 << most);
        (self.random.usize(0..=LEN - len), len)
    }

    fn write(&mut self) -> Verdict {
        let ((at, len), seed) = (self.range(), self.random.u64(..));
        self.near.fill(seed)?;
        self.peer.write(&self.near.region, 0..len, &self.remote, at)?.wait(LIMIT)?;
        self.bytes += len as u64;
        self.child.ask(&format!("check far {at} {len} {seed}")).map(drop)
    }

    /// Reads them back to see that each is at its place.
    fn pages(&mut self) -> Verdict {
        let page = 1 << self.random.u32(6..=16);
        let (count, seed) = (self.random.u32(1..=(LEN / page).min(500) as u32), self.random.u64(..));
        let (from, to) = permutation(count, seed);
        self.near.fill(seed)?;
        let (sources, targets) = (Pages::new(from.clone()), Pages::new(to.clone()));
        let (near, remote) = (&self.near.region, &self.remote);
        self.peer.write_pages(near, &sources, remote, &targets, page)?.wait(LIMIT)?;
        self.bytes += 2 * u64::from(count) * page as u64;
        if self.offered.contains(Operations::READ) {
            let sent = content(seed, LEN);
            for (from, to) in from.into_iter().zip(to) {
                let (from, to) = (from as usize * page, to as usize * page);
                self.near.expect(to, &sent[from..from + page]);
            }
            let all = count as usize * page;
            self.peer.read(&self.near.region, 0..all, &self.remote, 0)?.wait(LIMIT)?;
            self.near.check("pages that were read back")?;
        }
        self.child.ask(&format!("fill far {seed}")).map(drop)
    }

    fn read(&mut self) -> Verdict {
        let ((at, len), seed) = (self.range(), self.random.u64(..));
        self.child.ask(&format!("fill far {seed}"))?;
        self.peer.read(&self.near.region, at..at + len, &self.remote, at)?.wait(LIMIT)?;
        self.bytes += len as u64;
        let there = content(seed, LEN);
        self.near.expect(at, &there[at..at + len]);
        self.near.check("what was read")
    }

    fn send(&mut self) -> Verdict {
        let len = self.random.usize(1..=64 << 10);
        let (at, seed) = (self.random.usize(0..=LEN - len), self.random.u64(..));
        self.near.fill(seed)?;
        self.child.ask(&format!("receive far {at} {len}"))?;
        self.peer.send_with(&self.near.region, 0..len, &SendOptions::new().imm(9))?.wait(LIMIT)?;
        self.bytes += len as u64;
        same("what was received", self.child.ask("received")?, format!("{len} Some(9)"))?;
        self.child.ask(&format!("check far {at} {len} {seed}")).map(drop)
    }

    fn imms(&mut self) -> Verdict {
        let count = self.random.u64(1..=300);
        let ops: Result<Vec<Op>, _> = (0..count).map(|_| self.peer.write_imm(5)).collect();
        for mut op in ops? {
            op.wait(LIMIT)?;
        }
        self.imms += count;
        let came = self.child.ask(&format!("expect 5 {}", self.imms))?;
        same("imms", came, self.imms.to_string())
    }

    /// The helper writes to us, or reads.
    fn theirs(&mut self) -> Verdict {
        let ((at, len), seed) = (self.range(), self.random.u64(..));
        self.child.ask(&format!("fill far {seed}"))?;
        self.child.ask(&format!("write far 0 {len} near {at} -"))?;
        self.bytes += len as u64;
        self.near.expect(at, &content(seed, len));
        self.near.check("what the helper wrote")
    }

    /// Writes under way are cancelled; once they are, the target's memory is its owner's.
    fn cancel(&mut self) -> Verdict {
        let mut left = Vec::new();
        for _ in 0..self.random.usize(1..=8) {
            let (at, len) = self.range();
            let op = self.peer.write(&self.near.region, 0..len, &self.remote, at)?;
            match self.random.bool() {
                true => match op.cancel().wait(LIMIT) {
                    Ok(outcome) => self.bytes += outcome.bytes,
                    Err(error) => drop(refused::<()>("a cancelled write", Err(error), GONE)?),
                },
                false => left.push(op),
            }
        }
        for mut op in left {
            self.bytes += op.wait(LIMIT)?.bytes;
        }
        let seed = self.random.u64(..);
        self.child.ask(&format!("fill far {seed}"))?;
        self.child.ask("holds far").map(drop)
    }

    /// Either side's region is revoked with writes to it under way, and a new one takes its place.
    fn revoke(&mut self) -> Verdict {
        let (seed, is_ours) = (self.random.u64(..), self.random.bool());
        if is_ours {
            self.near.take_back(&self.fabric)?;
            self.child.refuses("write far 0 1000 near 0 -", &["Revoked", "RemoteAccess", "NotFound"])?;
            self.near = Ground::new(&self.fabric, LEN, OPEN, seed)?;
            self.fabric.unpublish("near");
            return Ok(self.fabric.publish("near", &self.near.region)?);
        }
        let ops: Result<Vec<Op>, _> =
            (0..4).map(|_| self.peer.write(&self.near.region, 0..LEN / 4, &self.remote, 0)).collect();
        self.child.ask("revoke far")?;
        for mut op in ops? {
            if let Err(error) = op.wait(LIMIT) {
                refused::<()>("a write under way", Err(error), REFUSALS)?;
            }
        }
        let late =
            self.peer.write(&self.near.region, 0..8, &self.remote, 0).and_then(|mut op| op.wait(LIMIT));
        refused("a write to a revoked region", late, REFUSALS)?;
        self.child.ask("free far")?;
        self.child.ask(&format!("alloc far {LEN} {seed}"))?;
        self.remote = within(LIMIT, "a lookup", self.peer.region("far"))??;
        Ok(())
    }

    fn reconnect(&mut self) -> Verdict {
        let op = self.peer.write(&self.near.region, 0..LEN, &self.remote, 0)?;
        self.peer.disconnect();
        let mut op = op;
        if let Err(error) = op.wait(LIMIT) {
            refused::<()>("a write under way", Err(error), GONE)?;
        }
        self.child.ask("ended")?;
        let address = self.address.clone();
        self.peer = self.child.meets(&self.fabric, &address)?;
        self.imms = 0;
        self.remote = within(LIMIT, "a lookup", self.peer.region("far"))??;
        let seed = self.random.u64(..);
        self.child.ask(&format!("fill far {seed}")).map(drop)
    }
}
