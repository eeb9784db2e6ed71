//! The measuring side of a bench.

use std::time::{Duration, Instant};

use multirail::{Access, Fabric, Peer, Region, wait};

use super::limit::Limit;
use super::load::{Kind, Load};
use super::load_runner::LoadRunner;
use super::protocol::{PROTOCOL, REGION, ToClient, ToServer, VERSION};
use super::rails::Rails;
use super::report::Report;
use super::row::Row;
use super::sampler::Sampler;
use super::{Measured as Asked, content, verification};
use crate::failure::{CommandResult, Failure, printable};
use crate::units::{Size, gbytes_per_s};
use crate::wire::{MESSAGE_BYTES, MessageReceiver, MessageSender, RECEIVES, RESPONSE_LIMIT};

/// How long the server may take to allocate, fill, overwrite or compare 4 GiB, on a slow machine and in a debug build.
const WORK: Duration = Duration::from_secs(600);

/// The minimum number of rounds for a median.
const ROUNDS: usize = 3;

/// The duration of a round. It is far above the clock's resolution, and short enough that the rounds of the limit and of
/// the transfer run under the same conditions.
const ROUND: Duration = Duration::from_millis(10);

/// A client in a session with a server.
pub struct Client<'a> {
    fabric: &'a Fabric,
    peer: Peer,
    outgoing: MessageSender,
    incoming: MessageReceiver,
    backend: String,
}

impl<'a> Client<'a> {
    /// Waits for the server's greeting.
    pub fn connect(fabric: &'a Fabric, peer: &Peer) -> CommandResult<Self> {
        let mut incoming = MessageReceiver::new(fabric.recv_pool(RECEIVES, MESSAGE_BYTES)?, peer);
        let outgoing = MessageSender::new(fabric, peer)?;
        match incoming.receive(RESPONSE_LIMIT)? {
            ToClient::Hello { protocol: PROTOCOL, version: VERSION } => {}
            ToClient::Hello { protocol: PROTOCOL, version } => {
                return Err(Failure::new(format!(
                    "the bench server uses protocol version {version}, this client {VERSION}; run the same multirail version on both sides"
                )));
            }
            _ => return Err(Failure::new("no `multirail bench server` listens on that address")),
        }
        let mut names: Vec<_> = fabric.transports().iter().map(|t| t.backend.to_string()).collect();
        names.dedup();
        Ok(Self { fabric, peer: peer.clone(), outgoing, incoming, backend: names.join("+") })
    }

    /// The size of the largest message.
    pub fn max_message(&self) -> u64 {
        self.peer.max_message()
    }

    /// Measures one load and reports it. After a failure or a signal, reports the rounds until then.
    pub fn measure(&mut self, load: &Load, asked: &Asked, report: &Report<Row>) -> CommandResult {
        let verify = !asked.no_verify;
        if load.kind == Kind::Send && load.size > self.max_message() {
            let (size, most) = (Size(load.size), Size(self.max_message()));
            return Err(Failure::new(format!(
                "a message of {size} exceeds the maximum of {most}; use a smaller --size"
            )));
        }
        let local = load.local().alloc(self.fabric, load.total(), Access::LOCAL)?;
        self.ask(&ToServer::Prepare(load.clone()))?;
        match load.kind {
            Kind::Read => content::overwrite(&local)?,
            _ => content::fill(&local, load)?,
        }
        let remote = match load.kind {
            Kind::Send => None,
            _ => Some(wait(self.peer.region(REGION), RESPONSE_LIMIT).map_err(|_| no_answer())??),
        };
        let peer = self.peer.clone();
        let mut runner = LoadRunner::new(&peer, &local, remote, load, asked.cold);
        tracing::info!(op = load.kind.name(), size = load.size, pages = load.pages, "measuring");

        let (before, explained) = (Rails::of(self.fabric), runner.explain()?);
        runner.pass(verify)?;
        if verify {
            self.check(&local, load, runner.operations())?;
            match load.kind {
                Kind::Read => content::overwrite(&local)?,
                _ => self.ask(&ToServer::Overwrite)?,
            }
        }
        let limit = match asked.no_limit {
            true => None,
            false => Some(Limit::new(self.fabric, &local, load)?),
        };
        let (measured, ended) = rounds(limit, load, &mut runner, asked.duration, report);
        let is_cut_short = ended.is_err() || report.is_interrupted();
        if verify && !is_cut_short {
            if load.kind == Kind::Send {
                runner.pass(true)?;
            }
            self.check(&local, load, runner.operations())?;
        }
        if let Some(measured) = measured {
            let rails = Rails::of(self.fabric).since(&before).used_by(&explained);
            let row = Row::new(&self.backend, load, &measured, verify && !is_cut_short, rails);
            report.add(row.cut_short(is_cut_short), is_cut_short)?;
        }
        ended
    }

    /// Ends the session in good order.
    pub fn finish(mut self) -> CommandResult {
        self.outgoing.send(&ToServer::Bye)?;
        match self.incoming.receive(RESPONSE_LIMIT)? {
            ToClient::Bye => {
                self.peer.disconnect();
                Ok(())
            }
            other => Err(unexpected(other)),
        }
    }

    fn ask(&mut self, request: &ToServer) -> CommandResult {
        self.outgoing.send(request)?;
        match self.incoming.receive(WORK)? {
            ToClient::Ready => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    fn check(&mut self, local: &Region, load: &Load, operations: u64) -> CommandResult {
        let wrong = match load.kind {
            Kind::Read => verification::first_mismatch(local, load)?
                .map(|offset| format!("the bytes read differ from the server's content near byte {offset}")),
            _ => {
                self.outgoing.send(&ToServer::Check { operations })?;
                match self.incoming.receive(WORK)? {
                    ToClient::Checked(checked) => checked.err(),
                    other => return Err(unexpected(other)),
                }
            }
        };
        match wrong {
            None => Ok(()),
            Some(wrong) => Err(Failure::new(format!("verification failed: {}", printable(&wrong)))),
        }
    }
}

/// The results of the rounds of one load.
pub struct Measured {
    /// The median of the transfer's rounds, in decimal GB/s.
    pub speed: f64,
    /// The latencies of the transfer's operations.
    pub latencies: Sampler,
    /// The same of the limit, whose operation copies all pages. `None` with `--no-limit`.
    pub limit: Option<(f64, Sampler)>,
}

/// Alternates rounds of the limit and of the transfer, until the time is over, a round fails, or a signal arrives.
fn rounds(
    limit: Option<Limit>,
    load: &Load,
    runner: &mut LoadRunner<'_>,
    duration: Duration,
    report: &Report<Row>,
) -> (Option<Measured>, CommandResult) {
    let bytes = load.total() as u64;
    let calibrated =
        limit.map(|limit| Rounds::new(bytes, 1, move |passes, sampler| limit.run(passes, sampler)));
    let mut limit = match calibrated.transpose() {
        Ok(limit) => limit,
        Err(failure) => return (None, Err(failure)),
    };
    let run = |passes, sampler: &mut Sampler| runner.run(passes, sampler);
    let mut transfer = match Rounds::new(bytes, load.operations(), run) {
        Ok(transfer) => transfer,
        Err(failure) => return (None, Err(failure)),
    };
    let begun = Instant::now();
    let mut ended = Ok(());
    while ended.is_ok()
        && !report.is_interrupted()
        && (begun.elapsed() < duration || transfer.speeds.len() < ROUNDS)
    {
        ended = limit.as_mut().map_or(Ok(()), Rounds::round).and_then(|()| transfer.round());
    }
    if transfer.speeds.is_empty() {
        return (None, ended);
    }
    let limit = limit.map(|limit| (median(limit.speeds), limit.latencies));
    (Some(Measured { speed: median(transfer.speeds), latencies: transfer.latencies, limit }), ended)
}

/// The rounds of the limit or of the transfer.
struct Rounds<R> {
    run: R,
    passes: u64,
    /// The bytes of a round.
    bytes: u64,
    /// The throughput of each round, in decimal GB/s.
    speeds: Vec<f64>,
    latencies: Sampler,
}

impl<R: FnMut(u64, &mut Sampler) -> CommandResult> Rounds<R> {
    /// `run` moves `bytes` with this many operations per pass.
    fn new(bytes: u64, operations: usize, mut run: R) -> CommandResult<Self> {
        let mut ignored = Sampler::new(Duration::MAX);
        let passes = calibrate(|passes| run(passes, &mut ignored))?;
        let begun = Instant::now();
        run(passes, &mut ignored)?;
        let each = begun.elapsed().div_f64(passes as f64 * operations as f64);
        Ok(Self { run, passes, bytes: bytes * passes, speeds: Vec::new(), latencies: Sampler::new(each) })
    }

    fn round(&mut self) -> CommandResult {
        let begun = Instant::now();
        (self.run)(self.passes, &mut self.latencies)?;
        self.speeds.push(gbytes_per_s(self.bytes, begun.elapsed()));
        Ok(())
    }
}

/// The number of passes of a round.
fn calibrate(mut run: impl FnMut(u64) -> CommandResult) -> CommandResult<u64> {
    let mut passes = 1;
    loop {
        let begun = Instant::now();
        run(passes)?;
        let took = begun.elapsed();
        if took >= ROUND / 4 {
            let ratio = ROUND.as_secs_f64() / took.as_secs_f64();
            return Ok((passes as f64 * ratio).ceil().max(1.0) as u64);
        }
        passes *= 2;
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn unexpected(answer: ToClient) -> Failure {
    match answer {
        ToClient::Refused(reason) => Failure::new(format!("the server refused: {}", printable(&reason))),
        other => Failure::new(format!(
            "the server sent an unexpected message: {}",
            printable(&format!("{other:?}"))
        )),
    }
}

fn no_answer() -> multirail::Error {
    let context = format!("the server did not describe its region within {} s", RESPONSE_LIMIT.as_secs());
    multirail::Error::new(multirail::ErrorKind::DeadlineExceeded, "region", context)
}
