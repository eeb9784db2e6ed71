//! The initiator, which measures.

use std::time::{Duration, Instant};

use benches::list_load::{ENTRY, STRIDE, scattered};
use benches::{BenchResult, LIMIT};
use transport_core::{
    Fabric, LocalList, Op, Peer, PreparedTransfer, ReadOptions, RemoteList, Result, WriteOptions, wait,
};

use crate::ListsConfig;
use crate::memory::ListMemory;
use crate::target::{TargetProcess, inverse, region_name};

/// Serves `write` and `read` until the input ends.
pub fn run(config: &ListsConfig) -> BenchResult<()> {
    let mut initiator = Initiator::connect(config)?;
    println!(r#"{{"ready":true}}"#);
    for command in std::io::stdin().lines() {
        let direction = match command?.as_str() {
            "write" => Direction::Write,
            "read" => Direction::Read,
            other => return Err(format!("no such command: {other}").into()),
        };
        println!("{}", initiator.round(direction)?.as_json());
    }
    Ok(())
}

#[derive(Clone, Copy)]
enum Direction {
    Write,
    Read,
}

/// The times of a round. A round transfers the list three times.
struct ListTimes {
    /// `prepare_write_list` or `prepare_read_list`.
    prepare: Duration,
    /// The first post of the prepared transfer.
    post: Duration,
    /// The second post of the prepared transfer, and until the transfer was done.
    again: CallTimes,
    /// `write_list` or `read_list`, and until the transfer was done.
    list: CallTimes,
}

/// The times of a transfer.
struct CallTimes {
    /// Until the call returned.
    call: Duration,
    /// Until the transfer was done.
    whole: Duration,
}

impl ListTimes {
    /// The times in microseconds.
    fn as_json(&self) -> String {
        let fields = [
            ("prepare", self.prepare),
            ("post", self.post),
            ("together", self.list.call),
            ("whole", self.list.whole),
            ("post_again", self.again.call),
            ("whole_again", self.again.whole),
        ];
        let fields = fields.map(|(name, time)| format!(r#""{name}":{:.3}"#, 1e6 * time.as_secs_f64()));
        format!("{{{}}}", fields.join(","))
    }
}

struct Initiator {
    // Before the target: the connection ends first.
    peer: Peer,
    _fabric: Fabric,
    target: TargetProcess,
    memory: ListMemory,
    local: LocalList,
    remote: RemoteList,
    /// The entries of the local list, in the order of the transfer.
    from: Vec<u32>,
    /// The entries of the remote list, in the order of the transfer.
    to: Vec<u32>,
    /// The remote entry for each entry of the local list.
    sources: Vec<u32>,
}

impl Initiator {
    fn connect(config: &ListsConfig) -> BenchResult<Self> {
        let (target, address) = TargetProcess::start(config)?;
        let fabric = config.open()?;
        let memory = ListMemory::register(&fabric, config)?;
        let peer = wait(fabric.connect(&address), LIMIT)??;
        let (mut local, mut remote) = (LocalList::new(), RemoteList::new());
        for (number, mine) in (0..).zip(&memory.regions) {
            let theirs = wait(peer.region(&region_name(number)), LIMIT)??;
            local.push_strided(mine, 0, ENTRY, memory.per_region, STRIDE)?;
            remote.push_strided(&theirs, 0, ENTRY, memory.per_region, STRIDE)?;
        }
        let (from, to) = scattered(config.regions, config.entries);
        let sources = inverse(&from, &to);
        Ok(Self { peer, _fabric: fabric, target, memory, local, remote, from, to, sources })
    }

    fn round(&mut self, direction: Direction) -> BenchResult<ListTimes> {
        match direction {
            Direction::Write => self.memory.fill()?,
            Direction::Read => self.target.ask("fill")?,
        }
        self.clear(direction)?;
        let begun = Instant::now();
        let prepared = self.prepare(direction)?;
        let prepare = begun.elapsed();
        let post = timed(|| prepared.post())?.call;
        self.check(direction)?;
        self.clear(direction)?;
        let again = timed(|| prepared.post())?;
        self.check(direction)?;
        self.clear(direction)?;
        let list = timed(|| self.transfer(direction))?;
        self.check(direction)?;
        Ok(ListTimes { prepare, post, again, list })
    }

    fn prepare(&self, direction: Direction) -> Result<PreparedTransfer> {
        let Self { local, from, remote, to, .. } = self;
        match direction {
            Direction::Write => self.peer.prepare_write_list(local, from, remote, to, &WriteOptions::new()),
            Direction::Read => self.peer.prepare_read_list(local, from, remote, to, &ReadOptions::new()),
        }
    }

    fn transfer(&self, direction: Direction) -> Result<Op> {
        let Self { local, from, remote, to, .. } = self;
        match direction {
            Direction::Write => self.peer.write_list(local, from, remote, to, &WriteOptions::new()),
            Direction::Read => self.peer.read_list(local, from, remote, to, &ReadOptions::new()),
        }
    }

    /// Clears the side that the bytes go to.
    fn clear(&mut self, direction: Direction) -> BenchResult<()> {
        match direction {
            Direction::Write => self.target.ask("clear"),
            Direction::Read => self.memory.clear(),
        }
    }

    /// Compares all bytes of the side that the bytes went to.
    fn check(&mut self, direction: Direction) -> BenchResult<()> {
        match direction {
            Direction::Write => self.target.ask("check"),
            Direction::Read => self.memory.check(&self.sources),
        }
    }
}

/// Posts a transfer and waits for its end.
fn timed(post: impl FnOnce() -> Result<Op>) -> BenchResult<CallTimes> {
    let begun = Instant::now();
    let mut op = post()?;
    let call = begun.elapsed();
    op.wait(LIMIT)?;
    Ok(CallTimes { call, whole: begun.elapsed() })
}
