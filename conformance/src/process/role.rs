//! What a helper process does: it obeys one order per line until its input ends.
//!
//! | order | answer |
//! |---|---|
//! | `open`, `open-patient`, `close` | |
//! | `open-several LABELS BYTES IMMS MESSAGES` | with these transports, in groups, and windows for its peers |
//! | `listen` | the address |
//! | `accept`, `connect ADDRESS` | the peer's incarnation |
//! | `alloc NAME LEN SEED` | allocates, fills and publishes a region |
//! | `fill NAME SEED`, `check NAME AT LEN SEED` | |
//! | `holds NAME` | checks the whole region |
//! | `descriptor NAME`, `revoke NAME`, `unpublish NAME`, `free NAME` | |
//! | `write SRC FROM LEN REMOTE AT IMM`, `read DST AT LEN REMOTE FROM` | |
//! | `pages SRC REMOTE COUNT PAGE SEED IMM` | |
//! | `send SRC FROM LEN IMM`, `receive DST AT LEN`, `received` | length and imm |
//! | `sends SRC FROM LEN COUNT`, `pool COUNT SIZE`, `pooled COUNT SIZE` | |
//! | `imms IMM COUNT`, `expect IMM COUNT`, `barrier NAME` | |
//! | `ended` | the kind of error the peer's end gave |
//! | `census` | threads, descriptors, processor time |
//!
//! Answers are `ok ...` or `err KIND TEXT`. Every wait has a limit.

use std::collections::HashMap;
use std::io::BufRead;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use transport_core::{Grant, Listener, Op, Pages, Peer, PeerGroup, RecvPool, SendOptions, WriteOptions};

use super::{Census, LIMIT, live, patient, several};
use crate::check::{Failure, Verdict, same, within};
use crate::end::End;
use crate::ground::{Ground, OPEN, content};
use crate::subject::{Subject, Variant};
use crate::trial::Context;

/// The environment that makes a process a helper.
pub(super) const SUBJECT: &str = "MULTIRAIL_HELPER_SUBJECT";
pub(super) const VARIANT: &str = "MULTIRAIL_HELPER_VARIANT";
pub(super) const SEED: &str = "MULTIRAIL_HELPER_SEED";

/// Whether this process is a helper: a subject may give it other devices.
pub fn is_helper() -> bool {
    std::env::var_os(SUBJECT).is_some()
}

/// Plays the part of a helper, if this process is one.
pub(crate) fn role(subjects: &[Arc<dyn Subject>]) -> Option<ExitCode> {
    let name = std::env::var(SUBJECT).ok()?;
    let variant = std::env::var(VARIANT).unwrap_or_default();
    let variant =
        [Variant::Plain, Variant::Queued, Variant::Slow].into_iter().find(|known| known.name() == variant);
    let subject = subjects.iter().find(|subject| subject.name() == name);
    let seed = std::env::var(SEED).ok().and_then(|seed| seed.parse().ok());
    let (Some(subject), Some(variant), Some(seed)) = (subject, variant, seed) else {
        eprintln!("a helper for {name:?} cannot be started");
        return Some(ExitCode::FAILURE);
    };
    let mut helper = Helper::new(Context::new(subject.clone(), variant, seed));
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match helper.obey(&line) {
            Ok(answer) => println!("ok {answer}"),
            Err(Refusal(kind, text)) => println!("err {kind} {text}"),
        }
    }
    Some(ExitCode::SUCCESS)
}

/// A kind and a sentence.
struct Refusal(String, String);

impl From<Failure> for Refusal {
    fn from(failure: Failure) -> Self {
        Self("Failure".into(), failure.to_string())
    }
}

impl From<transport_core::Error> for Refusal {
    fn from(error: transport_core::Error) -> Self {
        Self(format!("{:?}", error.kind()), error.to_string())
    }
}

struct Helper {
    context: Context,
    fabric: Option<End>,
    listener: Option<Listener>,
    peer: Option<Peer>,
    grounds: HashMap<String, Ground>,
    receive: Option<Op>,
    pool: Option<RecvPool>,
}

/// Words of an order, taken one by one.
struct Words<'a>(std::str::SplitWhitespace<'a>);

impl Words<'_> {
    fn next<T: FromStr>(&mut self) -> Verdict<T> {
        let word = self.0.next().ok_or_else(|| Failure::new("a word is missing"))?;
        word.parse().map_err(|_| Failure::new(format!("{word:?} was not expected")))
    }

    /// `-` is none.
    fn option<T: FromStr>(&mut self) -> Verdict<Option<T>> {
        let word: String = self.next()?;
        if word == "-" { Ok(None) } else { Words(word.split_whitespace()).next().map(Some) }
    }
}

impl Helper {
    fn new(context: Context) -> Self {
        let (fabric, listener, peer, receive, pool) = (None, None, None, None, None);
        Self { context, fabric, listener, peer, grounds: HashMap::new(), receive, pool }
    }

    fn obey(&mut self, line: &str) -> Result<String, Refusal> {
        let mut words = Words(line.split_whitespace());
        let order: String = words.next()?;
        match order.as_str() {
            "open" => self.fabric = Some(live(&self.context)?),
            "open-patient" => self.fabric = Some(patient(&self.context)?),
            "open-several" => {
                let labels: String = words.next()?;
                let labels: Vec<&str> = labels.split(',').collect();
                let windows = Grant { bytes: words.next()?, imms: words.next()?, messages: words.next()? };
                self.fabric = Some(several(&self.context, &labels, windows)?);
            }
            "close" => self.close(),
            "listen" => {
                let listener = within(LIMIT, "listen", self.fabric()?.listen("127.0.0.1:0"))??;
                let address = listener.local_addr();
                self.listener = Some(listener);
                return Ok(address);
            }
            "accept" => {
                let listener = self.listener.as_ref().ok_or_else(|| Failure::new("nobody listens"))?;
                return Ok(self.met(within(LIMIT, "accept", listener.accept())??));
            }
            "connect" => {
                let address: String = words.next()?;
                let peer = within(LIMIT, "connect", self.fabric()?.connect(&address))??;
                return Ok(self.met(peer));
            }
            "ended" => {
                let error = within(LIMIT, "the end of the peer", self.peer()?.closed())?;
                return Ok(format!("{:?}", error.kind()));
            }
            "census" => return Ok(Census::take().map_err(Failure::from)?.to_string()),
            "alloc" | "fill" | "check" | "holds" | "descriptor" | "revoke" | "unpublish" | "free" => {
                return self.memory(&order, &mut words);
            }
            _ => return self.operation(&order, &mut words),
        }
        Ok(String::new())
    }

    fn close(&mut self) {
        (self.listener, self.peer, self.receive, self.pool) = (None, None, None, None);
        self.grounds.clear();
        if let Some(fabric) = self.fabric.take() {
            fabric.close();
        }
    }

    fn met(&mut self, peer: Peer) -> String {
        self.peer.insert(peer).incarnation().to_string()
    }

    fn memory(&mut self, order: &str, words: &mut Words<'_>) -> Result<String, Refusal> {
        let name: String = words.next()?;
        if order == "alloc" {
            let ground = Ground::new(self.fabric()?, words.next()?, OPEN, words.next()?)?;
            self.fabric()?.publish(&name, &ground.region)?;
            self.grounds.insert(name, ground);
            return Ok(String::new());
        }
        if order == "unpublish" || order == "free" {
            self.fabric()?.unpublish(&name);
            if order == "free" {
                self.grounds.remove(&name);
            }
            return Ok(String::new());
        }
        if order == "revoke" {
            self.ground(&name)?.take_back(self.fabric()?)?;
            return Ok(String::new());
        }
        let ground = self.grounds.get_mut(&name).ok_or_else(|| Failure::new(format!("no region {name}")))?;
        match order {
            "fill" => ground.fill(words.next()?)?,
            "holds" => ground.check(&name)?,
            "check" => {
                let (at, len): (usize, usize) = (words.next()?, words.next()?);
                ground.expect(at, &content(words.next()?, len));
                ground.check(&name)?;
            }
            "descriptor" => {
                let bytes = ground.region.descriptor().to_bytes();
                return Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect());
            }
            _ => return Err(Failure::new(format!("{order:?} is no order")).into()),
        }
        Ok(String::new())
    }

    fn operation(&mut self, order: &str, words: &mut Words<'_>) -> Result<String, Refusal> {
        match order {
            "write" | "pages" => self.write(order, words)?,
            "read" => {
                let (name, at, len): (String, usize, usize) = (words.next()?, words.next()?, words.next()?);
                let remote = self.remote(&words.next::<String>()?)?;
                let range = at..at + len;
                self.peer()?.read(&self.ground(&name)?.region, range, &remote, words.next()?)?.wait(LIMIT)?;
            }
            "send" => {
                let (name, from, len): (String, usize, usize) = (words.next()?, words.next()?, words.next()?);
                let options =
                    words.option()?.map_or_else(SendOptions::new, |imm| SendOptions::new().imm(imm));
                let region = &self.ground(&name)?.region;
                self.peer()?.send_with(region, from..from + len, &options)?.wait(LIMIT)?;
            }
            "sends" => {
                let (name, from, len): (String, usize, usize) = (words.next()?, words.next()?, words.next()?);
                let (peer, region, count) = (self.peer()?, &self.ground(&name)?.region, words.next()?);
                let ops: Result<Vec<Op>, _> =
                    (0..count).map(|_: u32| peer.send(region, from..from + len)).collect();
                for mut op in ops? {
                    op.wait(LIMIT)?;
                }
            }
            "pool" => self.pool = Some(self.fabric()?.recv_pool(words.next()?, words.next()?)?),
            "pooled" => {
                let pool = self.pool.as_ref().ok_or_else(|| Failure::new("nothing is being received"))?;
                let (count, size): (u32, usize) = (words.next()?, words.next()?);
                for _ in 0..count {
                    same("bytes of a message", pool.next().wait(LIMIT)?.len(), size)?;
                }
            }
            "receive" => {
                let (name, at, len): (String, usize, usize) = (words.next()?, words.next()?, words.next()?);
                self.receive = Some(self.fabric()?.recv(&self.ground(&name)?.region, at..at + len)?);
            }
            "received" => {
                let mut receive =
                    self.receive.take().ok_or_else(|| Failure::new("nothing is being received"))?;
                let outcome = receive.wait(LIMIT)?;
                return Ok(format!("{} {:?}", outcome.bytes, outcome.imm));
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
            _ => return Err(Failure::new(format!("{order:?} is no order")).into()),
        }
        Ok(String::new())
    }

    fn write(&self, order: &str, words: &mut Words<'_>) -> Result<(), Refusal> {
        let (peer, src) = (self.peer()?, self.ground(&words.next::<String>()?)?);
        let options =
            |imm: Option<u32>| imm.map_or_else(WriteOptions::new, |imm| WriteOptions::new().imm(imm));
        if order == "write" {
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

    fn fabric(&self) -> Verdict<&End> {
        self.fabric.as_ref().ok_or_else(|| Failure::new("no fabric is open"))
    }

    fn peer(&self) -> Verdict<&Peer> {
        self.peer.as_ref().ok_or_else(|| Failure::new("no peer was met"))
    }

    fn ground(&self, name: &str) -> Verdict<&Ground> {
        self.grounds.get(name).ok_or_else(|| Failure::new(format!("no region {name}")))
    }

    fn remote(&self, name: &str) -> Result<transport_core::RemoteRegion, Refusal> {
        Ok(within(LIMIT, "a lookup", self.peer()?.region(name))??)
    }
}

/// Source and destination pages of a paged write that both sides can compute.
pub(crate) fn permutation(count: u32, seed: u64) -> (Vec<u32>, Vec<u32>) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut lists = ((0..count).collect::<Vec<_>>(), (0..count).collect::<Vec<_>>());
    random.shuffle(&mut lists.0);
    random.shuffle(&mut lists.1);
    lists
}
