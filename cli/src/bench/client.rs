//! The measuring side of a bench.

use std::sync::Arc;
use std::time::{Duration, Instant};

use multirail::{Access, Fabric, Peer, Region, wait};

use super::failing::RailFailure;
use super::layout::PageLayout;
use super::limit::CopyLimit;
use super::load::{BenchLoad, OpKind};
use super::load_runner::LoadRunner;
use super::protocol::{ClientMessage, PROTOCOL, ServerMessage, VERSION, region_name};
use super::rails::Rails;
use super::report::RowReport;
use super::row::{BenchRow, FailedRail};
use super::sampler::Sampler;
use super::{MeasureOptions, content, verification};
use crate::failure::{CommandFailure, CommandResult, printable};
use crate::units::{Size, gbytes_per_s};
use crate::wire::{MESSAGE_BYTES, MessageReceiver, MessageSender, RECEIVES, RESPONSE_LIMIT};

/// How long the server may take to allocate, fill, overwrite or compare 4 GiB, on a slow machine and in a debug build.
const WORK: Duration = Duration::from_secs(600);

/// The minimum number of rounds for a median.
const ROUNDS: usize = 3;

/// The duration of a round. It is far above the clock's resolution, and short enough that the rounds of the limit and
/// of the transfer run under the same conditions.
const ROUND: Duration = Duration::from_millis(10);

/// A client in a session with a server.
pub struct Client<'a> {
    fabric: &'a Fabric,
    peer: Peer,
    outgoing: MessageSender,
    incoming: MessageReceiver,
    backend: String,
    /// The rail that is to fail, until it has failed.
    failure: Option<Arc<RailFailure>>,
}

impl<'a> Client<'a> {
    /// Waits for the server's greeting. `failure` is the rail of `fabric` that is to fail in the first measurement.
    pub fn connect(
        fabric: &'a Fabric,
        peer: &Peer,
        failure: Option<Arc<RailFailure>>,
    ) -> CommandResult<Self> {
        let mut incoming = MessageReceiver::new(fabric.recv_pool(RECEIVES, MESSAGE_BYTES)?, peer);
        let outgoing = MessageSender::new(fabric, peer)?;
        match incoming.receive(RESPONSE_LIMIT)? {
            ServerMessage::Hello { protocol: PROTOCOL, version: VERSION } => {}
            ServerMessage::Hello { protocol: PROTOCOL, version } => {
                return Err(CommandFailure::new(format!(
                    "the bench server uses protocol version {version}, this client {VERSION}; run the same multirail version on both sides"
                )));
            }
            _ => return Err(CommandFailure::new("no `multirail bench server` listens on that address")),
        }
        let mut names: Vec<_> = fabric.transports().iter().map(|t| t.backend.to_string()).collect();
        names.dedup();
        Ok(Self { fabric, peer: peer.clone(), outgoing, incoming, backend: names.join("+"), failure })
    }

    /// The size of the largest message.
    pub fn max_message(&self) -> u64 {
        self.peer.max_message()
    }

    /// Measures one load and reports it. After a failure or a signal, reports the rounds until then.
    pub fn measure(
        &mut self,
        load: &BenchLoad,
        asked: &MeasureOptions,
        report: &RowReport<BenchRow>,
    ) -> CommandResult {
        let verify = !asked.no_verify;
        if load.kind == OpKind::Send && load.size > self.max_message() {
            let (size, most) = (Size(load.size), Size(self.max_message()));
            return Err(CommandFailure::new(format!(
                "a message of {size} exceeds the maximum of {most}; use a smaller --size"
            )));
        }
        let layout = PageLayout::new(load);
        let local = layout.alloc(load.local(), self.fabric, Access::LOCAL)?;
        self.ask(&ClientMessage::Prepare(load.clone()))?;
        match load.kind.is_read() {
            true => content::overwrite(&local)?,
            false => content::fill(&local, load)?,
        }
        let import = |number| wait(self.peer.region(&region_name(number)), RESPONSE_LIMIT);
        let remote = match load.kind {
            OpKind::Send => Vec::new(),
            _ => (0..local.len())
                .map(|number| import(number).map_err(|_| no_answer())?)
                .collect::<multirail::Result<_>>()?,
        };
        let peer = self.peer.clone();
        let mut runner = LoadRunner::new(&peer, &local, remote, load, layout, asked)?;
        tracing::info!(op = load.kind.name(), size = load.size, pages = load.pages, "measuring");

        let (began, before, explained) = (Instant::now(), Rails::of(self.fabric), runner.explain()?);
        runner.pass(verify)?;
        if verify {
            self.check(&local, load, runner.operations())?;
            match load.kind.is_read() {
                true => content::overwrite(&local)?,
                false => self.ask(&ClientMessage::Overwrite)?,
            }
        }
        let limit = match asked.no_limit {
            true => None,
            false => Some(CopyLimit::new(self.fabric, &local, load)?),
        };
        let failure = self.failure.take();
        if let Some(failure) = &failure {
            failure.begin();
        }
        let (measured, ended) = rounds(limit, load, &mut runner, asked.duration, report);
        let ended = match &failure {
            Some(failure) => explain_failure(ended, failure),
            None => ended,
        };
        let is_cut_short = ended.is_err() || report.is_interrupted();
        if verify && !is_cut_short {
            if load.kind == OpKind::Send {
                runner.pass(true)?;
            }
            self.check(&local, load, runner.operations())?;
        }
        if let Some(measured) = measured {
            let rails = Rails::of(self.fabric).since(&before);
            let failed = failure.map(|failure| FailedRail::new(&failure, &rails));
            let rails = rails.used_by(&explained);
            let mut paths: Vec<_> = explained.into_iter().filter_map(|part| part.path).collect();
            paths.dedup();
            let path = Some(paths.join("; ")).filter(|path| !path.is_empty());
            let verified = verify && !is_cut_short;
            let row =
                BenchRow::new(&self.backend, load, &measured, verified, path, rails).failed_rail(failed);
            report.add(row.began_at(began).cut_short(is_cut_short), is_cut_short)?;
        }
        ended
    }

    /// Ends the session in good order.
    pub fn finish(mut self) -> CommandResult {
        self.outgoing.send(&ClientMessage::Bye)?;
        match self.incoming.receive(RESPONSE_LIMIT)? {
            ServerMessage::Bye => {
                self.peer.disconnect();
                Ok(())
            }
            other => Err(unexpected(other)),
        }
    }

    fn ask(&mut self, request: &ClientMessage) -> CommandResult {
        self.outgoing.send(request)?;
        match self.incoming.receive(WORK)? {
            ServerMessage::Ready => Ok(()),
            other => Err(unexpected(other)),
        }
    }

    fn check(&mut self, local: &[Region], load: &BenchLoad, operations: u64) -> CommandResult {
        let wrong = match load.kind.is_read() {
            true => verification::first_mismatch(local, load)?
                .map(|offset| format!("the bytes read differ from the server's content near byte {offset}")),
            false => {
                self.outgoing.send(&ClientMessage::Check { operations })?;
                match self.incoming.receive(WORK)? {
                    ServerMessage::Checked(checked) => checked.err(),
                    other => return Err(unexpected(other)),
                }
            }
        };
        match wrong {
            None => Ok(()),
            Some(wrong) => Err(CommandFailure::new(format!("verification failed: {}", printable(&wrong)))),
        }
    }
}

/// The results of the rounds of one load.
pub struct RoundResults {
    /// The median of the transfer's rounds, in decimal GB/s.
    pub speed: f64,
    /// The latencies of the transfer's operations.
    pub latencies: Sampler,
    /// The mean number of work requests of an operation, and of pages that shared one with the page before them.
    pub requests: (f64, f64),
    /// The same of the limit, whose operation copies all pages. `None` with `--no-limit`.
    pub limit: Option<(f64, Sampler)>,
}

/// Alternates rounds of the limit and of the transfer, until the time is over, a round fails, or a signal arrives.
fn rounds(
    limit: Option<CopyLimit>,
    load: &BenchLoad,
    runner: &mut LoadRunner<'_>,
    duration: Duration,
    report: &RowReport<BenchRow>,
) -> (Option<RoundResults>, CommandResult) {
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
    let Rounds { speeds, latencies, .. } = transfer;
    let requests = runner.mean_requests();
    (Some(RoundResults { speed: median(speeds), latencies, requests, limit }), ended)
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

/// The end of a measurement in which a rail was to fail.
fn explain_failure(ended: CommandResult, failure: &RailFailure) -> CommandResult {
    let device = &failure.rail().device;
    match ended {
        Ok(()) if failure.is_lost() => Ok(()),
        Ok(()) => Err(CommandFailure::new(format!(
            "the measurement has ended, and {device} was not lost, because no request was outstanding there; use more \
             --inflight, or an operation that uses several rails, such as write-pages"
        ))),
        Err(error) if failure.is_lost() => Err(error.context(format!(
            "the transfer did not survive the loss of {device}; rails heal over loopback, verbs and libfabric, but not with \
             staging, nor with emulated writes of libfabric 1.17"
        ))),
        Err(error) => Err(error),
    }
}

fn unexpected(answer: ServerMessage) -> CommandFailure {
    match answer {
        ServerMessage::Refused(reason) => {
            CommandFailure::new(format!("the server refused: {}", printable(&reason)))
        }
        other => CommandFailure::new(format!(
            "the server sent an unexpected message: {}",
            printable(&format!("{other:?}"))
        )),
    }
}

fn no_answer() -> multirail::Error {
    let context = format!("the server did not describe its regions within {} s", RESPONSE_LIMIT.as_secs());
    multirail::Error::new(multirail::ErrorKind::DeadlineExceeded, "region", context)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use multirail::{FabricBuilder, TransportConfig};

    use super::*;

    /// A server of an older version may not know an operation.
    #[test]
    fn a_server_of_another_version_is_refused() {
        let open = || {
            let loopback = TransportConfig::new("loopback", Arc::new(backend_loopback::Loopback::new()));
            FabricBuilder::new().transport(loopback).open().unwrap()
        };
        let (here, there) = (open(), open());
        let (peer, origin) = here.connect_local(&there).unwrap();
        let hello = ServerMessage::Hello { protocol: PROTOCOL, version: VERSION - 1 };
        // The server's fabric stays open until the client has read the message.
        let refused = std::thread::scope(|scope| {
            let sent = scope.spawn(|| MessageSender::new(&there, &origin)?.send(&hello));
            let refused = Client::connect(&here, &peer, None).err().expect("a refusal");
            sent.join().expect("no panic").unwrap();
            refused
        });
        let words = format!("uses protocol version {}, this client {VERSION}", VERSION - 1);
        assert!(refused.message().contains(&words), "{refused:?}");
    }
}
