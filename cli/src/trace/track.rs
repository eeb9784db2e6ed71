//! The records of one transport, merged from all dumps of its fabric.

use std::collections::BTreeMap;

use multirail::observe::Record;
use multirail::{Recording, Time};

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
