//! The helper process: runs one command per line of its standard input until the input ends.
//!
//! | command | response |
//! |---|---|
//! | `open`, `open-default`, `open-notifying`, `close` | |
//! | `open-multi LABELS BYTES IMMS MESSAGES` | opens a fabric with these transports in groups, which grants these windows |
//! | `listen` | the address |
//! | `accept`, `connect ADDRESS` | the peer's incarnation |
//! | `alloc NAME LEN SEED` | allocates, fills and publishes a region |
//! | `fill NAME SEED`, `check NAME AT LEN SEED` | |
//! | `check-all NAME` | checks the whole region |
//! | `descriptor NAME`, `revoke NAME`, `unpublish NAME`, `free NAME` | |
//! | `write SRC FROM LEN REMOTE AT IMM`, `read DST AT LEN REMOTE FROM` | |
//! | `pages SRC REMOTE COUNT PAGE SEED IMM` | |
//! | `send SRC FROM LEN IMM`, `receive DST AT LEN`, `wait-receive` | length and imm, and whether another peer sent it |
//! | `sends SRC FROM LEN COUNT`, `pool COUNT SIZE`, `wait-pool COUNT SIZE` | |
//! | `alloc-catalogue NAME COUNT LEN` | publishes a catalogue of regions, each with the content of its number |
//! | `address NAME NUMBER` | the address of a region of the catalogue |
//! | `notify LEN SEED`, `take-notification LEN SEED` | |
//! | `imms IMM COUNT`, `expect IMM COUNT`, `barrier NAME` | |
//! | `wait-closed` | the kind of error with which the peer closed |
//! | `resource-usage` | threads, descriptors, CPU time, resident memory |
//!
//! A response is `ok ...` or `err KIND TEXT`. Every wait has a limit.

use std::collections::HashMap;
use std::io::BufRead;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use transport_core::{
    Catalogue, Grant, Listener, Op, Pages, Peer, PeerGroup, RecvPool, SendOptions, WriteOptions,
};

use super::{LIMIT, ResourceUsage, default_fabric, multi_transport_fabric, notifying_fabric, worker_fabric};
use crate::backend_under_test::{BackendUnderTest, Variant};
use crate::check::{TestResult, TrialFailure, ensure, ensure_eq, within};
use crate::checked_region::{CheckedRegion, FULL_ACCESS, content};
use crate::trial::{TrialContext, TrialFabric};

/// The environment variables of a helper process.
pub(super) const BACKEND: &str = "MULTIRAIL_HELPER_BACKEND";
pub(super) const VARIANT: &str = "MULTIRAIL_HELPER_VARIANT";
pub(super) const SEED: &str = "MULTIRAIL_HELPER_SEED";

/// Returns true if this process is a helper. A backend may give helpers other devices.
pub fn is_helper() -> bool {
    std::env::var_os(BACKEND).is_some()
}

/// Runs the helper's commands if this process is a helper.
pub(crate) fn run_if_helper(backends: &[Arc<dyn BackendUnderTest>]) -> Option<ExitCode> {
    let name = std::env::var(BACKEND).ok()?;
    let variant = std::env::var(VARIANT).unwrap_or_default();
    let variant =
        [Variant::Plain, Variant::Queued, Variant::Slow].into_iter().find(|known| known.name() == variant);
    let backend = backends.iter().find(|backend| backend.name() == name);
    let seed = std::env::var(SEED).ok().and_then(|seed| seed.parse().ok());
    let (Some(backend), Some(variant), Some(seed)) = (backend, variant, seed) else {
        eprintln!("the helper for {name:?} cannot start: its backend, variant or seed is unknown");
        return Some(ExitCode::FAILURE);
    };
    let mut helper = Helper::new(TrialContext::new(backend.clone(), variant, seed));
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match helper.run(&line) {
            Ok(response) => println!("ok {response}"),
            Err(CommandError(kind, text)) => println!("err {kind} {text}"),
        }
    }
    Some(ExitCode::SUCCESS)
}

/// The kind and the text of an error response.
struct CommandError(String, String);

impl From<TrialFailure> for CommandError {
    fn from(failure: TrialFailure) -> Self {
        Self("Failure".into(), failure.to_string())
    }
}

impl From<transport_core::Error> for CommandError {
    fn from(error: transport_core::Error) -> Self {
        Self(format!("{:?}", error.kind()), error.to_string())
    }
}

struct Helper {
    context: TrialContext,
    fabric: Option<TrialFabric>,
    listener: Option<Listener>,
    peer: Option<Peer>,
    regions: HashMap<String, CheckedRegion>,
    receive: Option<Op>,
    pool: Option<RecvPool>,
    catalogue: Option<Catalogue>,
}

/// The words of a command, taken one by one.
struct Words<'a>(std::str::SplitWhitespace<'a>);

impl Words<'_> {
    fn next<T: FromStr>(&mut self) -> TestResult<T> {
        let word = self.0.next().ok_or_else(|| TrialFailure::new("the command lacks a word"))?;
        word.parse().map_err(|_| TrialFailure::new(format!("{word:?} cannot be parsed")))
    }

    /// Takes a word; `-` stands for `None`.
    fn option<T: FromStr>(&mut self) -> TestResult<Option<T>> {
        let word: String = self.next()?;
        if word == "-" { Ok(None) } else { Words(word.split_whitespace()).next().map(Some) }
    }
}

impl Helper {
    fn new(context: TrialContext) -> Self {
        let (fabric, listener, peer, receive, pool, catalogue) = (None, None, None, None, None, None);
        Self { context, fabric, listener, peer, regions: HashMap::new(), receive, pool, catalogue }
    }

    /// Runs one command and returns the text of its response.
    fn run(&mut self, line: &str) -> Result<String, CommandError> {
        let mut words = Words(line.split_whitespace());
        let command: String = words.next()?;
        match command.as_str() {
            "open" => self.fabric = Some(worker_fabric(&self.context)?),
            "open-notifying" => self.fabric = Some(notifying_fabric(&self.context)?),
            "open-default" => self.fabric = Some(default_fabric(&self.context)?),
            "open-multi" => {
                let labels: String = words.next()?;
                let labels: Vec<&str> = labels.split(',').collect();
                let windows = Grant { bytes: words.next()?, imms: words.next()?, messages: words.next()? };
                self.fabric = Some(multi_transport_fabric(&self.context, &labels, windows)?);
            }
            "close" => self.close(),
            "listen" => {
                let listener = within(LIMIT, "listen", self.fabric()?.listen("127.0.0.1:0"))??;
                let address = listener.local_addr();
                self.listener = Some(listener);
                return Ok(address);
            }
            "accept" => {
                let listener =
                    self.listener.as_ref().ok_or_else(|| TrialFailure::new("the helper does not listen"))?;
                return Ok(self.set_peer(within(LIMIT, "accept", listener.accept())??));
            }
            "connect" => {
                let address: String = words.next()?;
                let peer = within(LIMIT, "connect", self.fabric()?.connect(&address))??;
                return Ok(self.set_peer(peer));
            }
            "wait-closed" => {
                let error = within(LIMIT, "the close of the peer", self.peer()?.closed())?;
                return Ok(format!("{:?}", error.kind()));
            }
            "alloc-catalogue" => {
                let (name, count, len): (String, u64, usize) = (words.next()?, words.next()?, words.next()?);
                let region = |seed| CheckedRegion::new(self.fabric()?, len, FULL_ACCESS, seed);
                let regions = (0..count).map(region).collect::<TestResult<Vec<_>>>()?;
                let catalogue = Catalogue::new(regions.into_iter().map(|checked| checked.region))?;
                catalogue.publish(self.fabric()?, &name)?;
                self.catalogue = Some(catalogue);
            }
            "address" => {
                let (_, number): (String, usize) = (words.next()?, words.next()?);
                let missing = || TrialFailure::new("no catalogue");
                let catalogue = self.catalogue.as_ref().ok_or_else(missing)?;
                return Ok((catalogue.regions()[number].as_ptr() as u64).to_string());
            }
            "notify" => {
                let (len, seed): (usize, u64) = (words.next()?, words.next()?);
                self.peer()?.notify(&notification(len, seed))?.wait(LIMIT)?;
            }
            "take-notification" => {
                let (len, seed): (usize, u64) = (words.next()?, words.next()?);
                let taken = self.fabric()?.notifications()?.next().wait(LIMIT)?;
                let (peer, want) = (self.peer()?.id(), notification(len, seed));
                ensure(
                    taken.peer == peer && taken.bytes == want,
                    format!("got {} bytes", taken.bytes.len()),
                )?;
            }
            "resource-usage" => {
                return Ok(ResourceUsage::of_this_process().map_err(TrialFailure::from)?.to_string());
            }
            "alloc" | "fill" | "check" | "check-all" | "descriptor" | "revoke" | "unpublish" | "free" => {
                return self.memory(&command, &mut words);
            }
            _ => return self.operation(&command, &mut words),
        }
        Ok(String::new())
    }

    fn close(&mut self) {
        (self.listener, self.peer, self.receive, self.pool) = (None, None, None, None);
        self.regions.clear();
        self.catalogue = None;
        if let Some(fabric) = self.fabric.take() {
            fabric.close();
        }
    }

    fn set_peer(&mut self, peer: Peer) -> String {
        self.peer.insert(peer).incarnation().to_string()
    }

    fn memory(&mut self, command: &str, words: &mut Words<'_>) -> Result<String, CommandError> {
        let name: String = words.next()?;
        if command == "alloc" {
            let checked = CheckedRegion::new(self.fabric()?, words.next()?, FULL_ACCESS, words.next()?)?;
            self.fabric()?.publish(&name, &checked.region)?;
            self.regions.insert(name, checked);
            return Ok(String::new());
        }
        if command == "unpublish" || command == "free" {
            self.fabric()?.unpublish(&name);
            if command == "free" {
                self.regions.remove(&name);
            }
            return Ok(String::new());
        }
        if command == "revoke" {
            self.region(&name)?.revoke_and_wait(self.fabric()?)?;
            return Ok(String::new());
        }
        let checked =
            self.regions.get_mut(&name).ok_or_else(|| TrialFailure::new(format!("no region {name}")))?;
        match command {
            "fill" => checked.fill(words.next()?)?,
            "check-all" => checked.check(&name)?,
            "check" => {
                let (at, len): (usize, usize) = (words.next()?, words.next()?);
                checked.expect(at, &content(words.next()?, len));
                checked.check(&name)?;
            }
            "descriptor" => {
                let bytes = checked.region.descriptor().to_bytes();
                return Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect());
            }
            _ => return Err(TrialFailure::new(format!("{command:?} is no command")).into()),
        }
        Ok(String::new())
    }

    fn operation(&mut self, command: &str, words: &mut Words<'_>) -> Result<String, CommandError> {
        match command {
            "write" | "pages" => self.write(command, words)?,
            "read" => {
                let (name, at, len): (String, usize, usize) = (words.next()?, words.next()?, words.next()?);
                let remote = self.remote(&words.next::<String>()?)?;
                let range = at..at + len;
                self.peer()?.read(&self.region(&name)?.region, range, &remote, words.next()?)?.wait(LIMIT)?;
            }
            "send" => {
                let (name, from, len): (String, usize, usize) = (words.next()?, words.next()?, words.next()?);
                let options =
                    words.option()?.map_or_else(SendOptions::new, |imm| SendOptions::new().imm(imm));
                let region = &self.region(&name)?.region;
                self.peer()?.send_with(region, from..from + len, &options)?.wait(LIMIT)?;
            }
            "sends" => {
                let (name, from, len): (String, usize, usize) = (words.next()?, words.next()?, words.next()?);
                let (peer, region, count) = (self.peer()?, &self.region(&name)?.region, words.next()?);
                let ops: Result<Vec<Op>, _> =
                    (0..count).map(|_: u32| peer.send(region, from..from + len)).collect();
                for mut op in ops? {
                    op.wait(LIMIT)?;
                }
            }
            "pool" => self.pool = Some(self.fabric()?.recv_pool(words.next()?, words.next()?)?),
            "wait-pool" => {
                let pool = self.pool.as_ref().ok_or_else(|| TrialFailure::new("no pool is open"))?;
                let (count, size): (u32, usize) = (words.next()?, words.next()?);
                for _ in 0..count {
                    ensure_eq("bytes of a message", pool.next().wait(LIMIT)?.len(), size)?;
                }
            }
            "receive" => {
                let (name, at, len): (String, usize, usize) = (words.next()?, words.next()?, words.next()?);
                self.receive = Some(self.fabric()?.recv(&self.region(&name)?.region, at..at + len)?);
            }
            "wait-receive" => {
                let mut receive =
                    self.receive.take().ok_or_else(|| TrialFailure::new("no receive is posted"))?;
                let outcome = receive.wait(LIMIT)?;
                let is_of_peer = |peer: &Peer| outcome.peer == Some(peer.id());
                let sender = if self.peer.as_ref().is_none_or(is_of_peer) { "" } else { " of another peer" };
                return Ok(format!("{} {:?}{sender}", outcome.bytes, outcome.imm));
            }
            "imms" => {
                let (imm, count): (u32, usize) = (words.next()?, words.next()?);
                let peer = self.peer()?;
                let ops: Result<Vec<Op>, _> = (0..count).map(|_| peer.write_imm(imm)).collect();
                for mut op in ops? {
                    op.wait(LIMIT)?;
                }
            }
            "barrier" => {
                let group = PeerGroup::new([self.peer()?.clone()])?;
                group.barrier(words.next::<String>()?, LIMIT)?.wait()?;
            }
            "expect" => {
                let counter = self.peer()?.imm(words.next()?);
                counter.expect(words.next()?).wait(LIMIT)?;
                return Ok(counter.count().to_string());
            }
            _ => return Err(TrialFailure::new(format!("{command:?} is no command")).into()),
        }
        Ok(String::new())
    }

    fn write(&self, command: &str, words: &mut Words<'_>) -> Result<(), CommandError> {
        let (peer, src) = (self.peer()?, self.region(&words.next::<String>()?)?);
        let options =
            |imm: Option<u32>| imm.map_or_else(WriteOptions::new, |imm| WriteOptions::new().imm(imm));
        if command == "write" {
            let (from, len): (usize, usize) = (words.next()?, words.next()?);
            let remote = self.remote(&words.next::<String>()?)?;
            let (at, options) = (words.next()?, options(words.option()?));
            peer.write_with(&src.region, from..from + len, &remote, at, &options)?.wait(LIMIT)?;
        } else {
            let remote = self.remote(&words.next::<String>()?)?;
            let (count, page, seed): (u32, usize, u64) = (words.next()?, words.next()?, words.next()?);
            let (from, to) = permutation(count, seed);
            let (from, to, options) = (Pages::new(from), Pages::new(to), options(words.option()?));
            peer.write_pages_with(&src.region, &from, &remote, &to, page, &options)?.wait(LIMIT)?;
        }
        Ok(())
    }

    fn fabric(&self) -> TestResult<&TrialFabric> {
        self.fabric.as_ref().ok_or_else(|| TrialFailure::new("no fabric is open"))
    }

    fn peer(&self) -> TestResult<&Peer> {
        self.peer.as_ref().ok_or_else(|| TrialFailure::new("no peer is connected"))
    }

    fn region(&self, name: &str) -> TestResult<&CheckedRegion> {
        self.regions.get(name).ok_or_else(|| TrialFailure::new(format!("no region {name}")))
    }

    fn remote(&self, name: &str) -> Result<transport_core::RemoteRegion, CommandError> {
        Ok(within(LIMIT, "a lookup", self.peer()?.region(name))??)
    }
}

/// The bytes of a notification. Both sides compute them from the seed.
pub(crate) fn notification(len: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    std::iter::repeat_with(|| random.u8(..)).take(len).collect()
}

/// The source and destination pages of a paged write. Both sides compute them from the seed.
pub(crate) fn permutation(count: u32, seed: u64) -> (Vec<u32>, Vec<u32>) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut lists = ((0..count).collect::<Vec<_>>(), (0..count).collect::<Vec<_>>());
    random.shuffle(&mut lists.0);
    random.shuffle(&mut lists.1);
    lists
}
