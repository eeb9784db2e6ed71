//! A recording as Chrome trace events: a track per rail, operations as async spans.
//!
//! The format: <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>.

use std::collections::BTreeMap;

use multirail::observe::{Record, TraceEvent};
use multirail::{OpId, Recording, Time};
use serde_json::{Value, json};

use super::{Track, tracks};

/// The thread number of the worker. Rails have the numbers after it.
const WORKER: u32 = 0;

/// Converts a recording.
pub fn trace(recording: &Recording) -> Value {
    let mut events = Vec::new();
    for (number, track) in (1..).zip(&tracks(recording)) {
        let first = track.records.values().map(|record| record.time).min();
        let first = first.unwrap_or(track.end);
        Events { number, track, first, events: &mut events, open: BTreeMap::new(), parked: None }.add();
    }
    json!({ "traceEvents": events, "displayTimeUnit": "ns" })
}

/// The events of one track, which is a "process" of the format.
struct Events<'a> {
    number: u32,
    track: &'a Track<'a>,
    /// The time of the track's earliest record.
    first: Time,
    events: &'a mut Vec<Value>,
    /// The names of open spans.
    open: BTreeMap<String, String>,
    parked: Option<Time>,
}

impl Events<'_> {
    fn add(mut self) {
        let Track { host, process, incarnation, label, .. } = self.track;
        let name = format!("{label} of {host}, process {process}, incarnation {incarnation:016x}");
        self.name("process_name", WORKER, &name);
        self.name("thread_name", WORKER, "worker");
        for (rail, device) in &self.track.devices {
            self.name("thread_name", rail + 1, &format!("rail {rail} ({device})"));
        }
        for record in self.track.records.values() {
            self.record(record);
        }
        let end = self.track.records.values().map(|record| record.time).fold(self.track.end, Time::max);
        self.wake(end);
        for (key, name) in std::mem::take(&mut self.open) {
            self.span("e", &key, &name, end);
        }
    }

    fn record(&mut self, record: &Record) {
        let (time, what) = (record.time, record.event);
        match what {
            TraceEvent::Started { op, kind, bytes, .. } => {
                self.end(op, time);
                self.begin(op, &format!("{} of {bytes} bytes", kind.name()), time);
            }
            TraceEvent::Ended { op, .. } => {
                self.note(op, &what, time);
                self.end(op, time);
            }
            TraceEvent::Cancelled { op }
            | TraceEvent::Expired { op }
            | TraceEvent::Stalled { op }
            | TraceEvent::Continued { op, .. }
            | TraceEvent::Triggered { op } => self.note(op, &what, time),
            TraceEvent::Parked => self.parked = Some(time),
            TraceEvent::Woken => self.wake(time),
            TraceEvent::Posted { rail, .. }
            | TraceEvent::Completed { rail, .. }
            | TraceEvent::Backpressure { rail, .. }
            | TraceEvent::QueueFull { rail }
            | TraceEvent::Imm { rail, .. }
            | TraceEvent::Message { rail, .. }
            | TraceEvent::PeerGone { rail, .. }
            | TraceEvent::DeviceLost { rail } => self.instant(u32::from(rail) + 1, &what, time),
            _ => self.instant(WORKER, &what, time),
        }
    }

    fn name(&mut self, which: &str, thread: u32, name: &str) {
        let args = json!({ "name": name });
        self.events
            .push(json!({ "ph": "M", "name": which, "pid": self.number, "tid": thread, "args": args }));
    }

    fn instant(&mut self, thread: u32, what: &TraceEvent, time: Time) {
        let (name, ts) = (what.to_string(), micros(time));
        self.events
            .push(json!({ "ph": "i", "s": "t", "name": name, "pid": self.number, "tid": thread, "ts": ts }));
    }

    /// Ends the worker's sleep at `time`.
    fn wake(&mut self, time: Time) {
        let Some(since) = self.parked.take() else { return };
        let (ts, dur) = (micros(since), time.since(since).as_secs_f64() * 1e6);
        self.events.push(
            json!({ "ph": "X", "name": "parked", "pid": self.number, "tid": WORKER, "ts": ts, "dur": dur }),
        );
    }

    fn begin(&mut self, op: OpId, name: &str, time: Time) {
        let key = self.key(op);
        self.span("b", &key, name, time);
        self.open.insert(key, name.to_owned());
    }

    fn end(&mut self, op: OpId, time: Time) {
        let key = self.key(op);
        if let Some(name) = self.open.remove(&key) {
            self.span("e", &key, &name, time);
        }
    }

    /// Adds an event of an operation, which may have begun before the first record.
    fn note(&mut self, op: OpId, what: &TraceEvent, time: Time) {
        let key = self.key(op);
        if !self.open.contains_key(&key) {
            self.begin(op, "operation", self.first.min(time));
        }
        self.span("n", &key, &what.to_string(), time);
    }

    fn span(&mut self, phase: &str, id: &str, name: &str, time: Time) {
        let ts = micros(time);
        self.events.push(json!({
            "ph": phase, "cat": "operation", "id": id, "name": name, "pid": self.number, "tid": WORKER, "ts": ts
        }));
    }

    /// The id of an operation, which is unique in the file.
    fn key(&self, op: OpId) -> String {
        format!("{}:{op}", self.number)
    }
}

fn micros(time: Time) -> f64 {
    time.since(Time::ZERO).as_secs_f64() * 1e6
}
