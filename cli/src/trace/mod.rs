//! `multirail trace`: prints a recording of dumps as a timeline, or converts it for a trace viewer.

pub(super) mod chrome;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use multirail::observe::{MAX_RECORDING, Record};
use multirail::{Recording, Time};

use super::failure::{CommandFailure, CommandResult};

#[derive(clap::Args)]
pub struct TraceArguments {
    /// The recording, made with --dump
    #[arg(value_name = "FILE")]
    file: PathBuf,

    /// Write Chrome trace JSON here instead, for chrome://tracing or ui.perfetto.dev
    #[arg(long, value_name = "OUT.json")]
    chrome: Option<PathBuf>,
}

/// Prints or converts a recording.
pub fn run(arguments: &TraceArguments) -> CommandResult {
    let bytes = read(&arguments.file)?;
    let recording = Recording::from_bytes(&bytes).map_err(|error| {
        CommandFailure::new(format!("{}: {}: {}", arguments.file.display(), error.kind(), error.context()))
    })?;
    if recording.cut_off {
        let what = format!("{} ends in the middle of its last dump", arguments.file.display());
        match recording.dumps.len() {
            0 => return Err(CommandFailure::new(format!("{what}, and it has no other dump"))),
            _ => super::output::print_error(&format!("{what}; the dumps before it are shown")),
        }
    }
    let Some(out) = &arguments.chrome else { return super::output::text(&timeline(&recording)) };
    let failed = |error| CommandFailure::new(format!("cannot write {}: {error}", out.display()));
    let mut file = BufWriter::new(File::create(out).map_err(failed)?);
    serde_json::to_writer(&mut file, &chrome::trace(&recording)).map_err(|error| failed(error.into()))?;
    file.flush().map_err(failed)
}

/// Reads a file, up to one byte more than the maximum of a recording.
fn read(path: &Path) -> CommandResult<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MAX_RECORDING as u64 + 1).read_to_end(&mut bytes))
        .map_err(|error| CommandFailure::new(format!("cannot read {}: {error}", path.display())))?;
    Ok(bytes)
}

/// One event of a fabric: a record of a transport, or a dump. It has time, sequence number and text.
type TimedText = (Time, u64, String);

/// The records and dumps of every fabric, in the order of time.
pub fn timeline(recording: &Recording) -> String {
    let mut text = String::new();
    let all = tracks(recording);
    let mut fabrics: Vec<_> = all.iter().map(Track::fabric).collect();
    fabrics.dedup();
    for fabric in fabrics {
        let of_fabric: Vec<_> = all.iter().filter(|track| track.fabric() == fabric).collect();
        let mut events: Vec<TimedText> = of_fabric.iter().flat_map(|track| records(track)).collect();
        events.extend(dumps(recording, fabric));
        events.sort_by_key(|(time, sequence, _)| (*time, *sequence));
        let (process, incarnation) = fabric;
        text.push_str(&format!("process {process}, incarnation {incarnation:016x}\n"));
        events.iter().for_each(|(.., line)| text.push_str(line));
    }
    text
}

fn records<'a>(track: &'a Track<'_>) -> impl Iterator<Item = TimedText> + 'a {
    let line = |record: &Record| {
        let label = super::failure::printable(track.label);
        (record.time, record.sequence, format!("{:>14.9} {label}: {}\n", seconds(record.time), record.event))
    };
    track.records.values().map(line)
}

fn dumps(recording: &Recording, fabric: (u32, u64)) -> impl Iterator<Item = TimedText> + '_ {
    recording.dumps.iter().filter(move |dump| (dump.process, dump.incarnation) == fabric).map(|dump| {
        let mut lines = format!("{:>14.9} dump taken\n", seconds(dump.time));
        for transport in &dump.transports {
            for line in transport.to_string().lines() {
                lines.push_str(&format!("{:>15}{line}\n", ""));
            }
        }
        (dump.time, u64::MAX, lines)
    })
}

fn seconds(time: Time) -> f64 {
    time.since(Time::ZERO).as_secs_f64()
}

/// A transport and its records.
pub struct Track<'a> {
    pub host: &'a str,
    pub process: u32,
    pub incarnation: u64,
    pub label: &'a str,
    /// The rail numbers and device names.
    pub devices: Vec<(u32, &'a str)>,
    /// The records by sequence number, because dumps overlap.
    pub records: BTreeMap<u64, Record>,
    /// The time of the last dump.
    pub end: Time,
}

impl Track<'_> {
    /// The identity of the fabric.
    pub fn fabric(&self) -> (u32, u64) {
        (self.process, self.incarnation)
    }
}

/// The tracks of a recording, fabric by fabric.
pub fn tracks(recording: &Recording) -> Vec<Track<'_>> {
    let mut tracks = BTreeMap::new();
    for dump in &recording.dumps {
        for transport in &dump.transports {
            let key = (dump.process, dump.incarnation, &transport.label);
            let track = tracks.entry(key).or_insert_with(|| Track {
                host: &dump.host,
                process: dump.process,
                incarnation: dump.incarnation,
                label: &transport.label,
                devices: transport
                    .rails
                    .iter()
                    .map(|rail| (rail.counters.rail, rail.counters.device.as_str()))
                    .collect(),
                records: BTreeMap::new(),
                end: dump.time,
            });
            track.end = track.end.max(dump.time);
            track.records.extend(transport.records.iter().map(|record| (record.sequence, *record)));
        }
    }
    tracks.into_values().collect()
}

#[cfg(test)]
mod tests;
