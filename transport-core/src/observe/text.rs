//! Dumps and records for people.

use std::fmt;
use std::time::Duration;

use super::{Dump, OperationDump, PeerDump, PeerName, RailDump, Record, TransportDump, What, WorkerState};

/// Text from outside, safe on a terminal and in one line.
pub(super) struct Clean<'a>(pub &'a str);

impl fmt::Display for Clean<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 256;
        self.0.chars().take(LONGEST).try_for_each(|c| write!(f, "{}", if c.is_control() { ' ' } else { c }))
    }
}

/// A span in seconds, or in the unit that shows it.
struct Span(Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_nanos() {
            0..1_000_000 => write!(f, "{:.1} µs", self.0.as_secs_f64() * 1e6),
            1_000_000..1_000_000_000 => write!(f, "{:.1} ms", self.0.as_secs_f64() * 1e3),
            _ => write!(f, "{:.1} s", self.0.as_secs_f64()),
        }
    }
}

impl fmt::Display for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let opened = Span(Duration::from_nanos(self.time.as_nanos()));
        writeln!(
            f,
            "dump of {}, process {}, incarnation {:016x}, at {opened}",
            Clean(&self.host),
            self.process,
            self.incarnation
        )?;
        self.transports.iter().try_for_each(|transport| write!(f, "{transport}"))?;
        self.peers.iter().try_for_each(|peer| writeln!(f, "{peer}"))?;
        for transport in self.transports.iter().filter(|transport| !transport.records.is_empty()) {
            let count = transport.records.len();
            writeln!(f, "last {count} records of transport {}", Clean(&transport.label))?;
            transport.records.iter().try_for_each(|record| writeln!(f, "  {record}"))?;
        }
        Ok(())
    }
}

impl fmt::Display for TransportDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (label, backend) = (Clean(&self.label), Clean(&self.backend));
        writeln!(
            f,
            "transport {label} ({backend}), {}: {} operations under way, {} not taken yet, {} receives posted",
            self.worker,
            self.operations.len(),
            self.queued,
            self.receives
        )?;
        self.rails.iter().try_for_each(|rail| writeln!(f, "  {rail}"))?;
        self.operations.iter().try_for_each(|operation| writeln!(f, "  {operation}"))?;
        self.casualties.iter().try_for_each(|operation| writeln!(f, "  cut short: {operation}"))
    }
}

impl fmt::Display for WorkerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "worker running",
            Self::Parked => "worker parked",
            Self::Blocked => "worker blocked, no answer from it",
            Self::Closed => "worker ended",
        })
    }
}

impl fmt::Display for RailDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = &self.counters;
        write!(
            f,
            "rail {} ({}): {} of {} posted; posts {}, doorbells {}, bytes {}, completions {}, errors {}, \
             queue full {}, retries {}, waits for grants {}, direct {}, direct bytes {}",
            counts.rail,
            Clean(&counts.device),
            self.outstanding,
            self.depth,
            counts.posts,
            counts.doorbells,
            counts.bytes,
            counts.completions,
            counts.errors,
            counts.queue_full,
            counts.retries,
            counts.grant_waits,
            counts.direct,
            counts.direct_bytes
        )?;
        if self.lost { f.write_str("; its device is lost") } else { Ok(()) }
    }
}

impl fmt::Display for OperationDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op {} {} of {} bytes", self.id, self.kind.name(), self.bytes)?;
        if let Some(imm) = self.imm {
            write!(f, " with imm {imm:#x}")?;
        }
        if let Some(peer) = &self.peer {
            write!(f, " with {peer}")?;
        }
        write!(f, ": {} old, no progress for {}", Span(self.age), Span(self.idle))?;
        match self.left {
            Some(left) if left.is_zero() => f.write_str(", deadline passed")?,
            Some(left) => write!(f, ", deadline in {}", Span(left))?,
            None => {}
        }
        for share in &self.rails {
            let (rail, device) = (share.rail, Clean(&share.device));
            write!(
                f,
                "; rail {rail} ({device}): {} unposted, {} outstanding",
                share.unposted, share.outstanding
            )?;
        }
        for (at, wait) in self.waits.iter().enumerate() {
            write!(f, "{} {wait}", if at == 0 { "; waits for" } else { ", and for" })?;
        }
        match self.ending {
            Some(kind) => write!(f, "; ends with: {kind}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peer {} ({}", self.id, Clean(&self.host))?;
        if let Some(address) = &self.address {
            write!(f, ", {}", Clean(address))?;
        }
        write!(f, ", incarnation {:016x})", self.incarnation)
    }
}

impl fmt::Display for PeerDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.heard {
            Some(heard) => write!(f, "{}: last heard {} ago", self.name, Span(heard)),
            None => write!(f, "{}: of this process", self.name),
        }
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>14.9} {}", Duration::from_nanos(self.time.as_nanos()).as_secs_f64(), self.what)
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Begun { op, kind, peer, bytes } => {
                write!(f, "op {op} begun: {} of {bytes} bytes with peer {peer}", kind.name())
            }
            Self::Ended { op, error: None } => write!(f, "op {op} done"),
            Self::Ended { op, error: Some(kind) } => write!(f, "op {op} failed: {kind}"),
            Self::Posted { rail, op, requests, bytes } => {
                write!(f, "rail {rail}: posted {requests} requests, {bytes} bytes, of op {op} first")
            }
            Self::Completed { rail, requests, failed: 0 } => write!(f, "rail {rail}: {requests} completions"),
            Self::Completed { rail, requests, failed } => {
                write!(f, "rail {rail}: {requests} completions, {failed} failures")
            }
            Self::Pressure { rail, op, refused } => {
                write!(f, "rail {rail}: back-pressure at op {op}, {refused} requests not taken")
            }
            Self::QueueFull { rail } => write!(f, "rail {rail}: send queue full"),
            Self::Imm { rail, peer, imm } => write!(f, "rail {rail}: imm {imm:#x} of peer {peer}"),
            Self::Message { rail, peer, bytes } => {
                write!(f, "rail {rail}: message of {bytes} bytes of peer {peer}")
            }
            Self::Cancelled { op } => write!(f, "op {op} is to be cancelled"),
            Self::Expired { op } => write!(f, "op {op} is past its deadline"),
            Self::Aborted { peer } => write!(f, "work posted to peer {peer} torn down"),
            Self::PeerLinked { peer } => write!(f, "peer {peer} linked"),
            Self::PeerFailed { peer, error } => write!(f, "peer {peer} ended: {error}"),
            Self::PeerGone { rail, peer } => write!(f, "rail {rail}: the backend let go of peer {peer}"),
            Self::DeviceLost { rail } => write!(f, "rail {rail}: device lost"),
            Self::Parked => f.write_str("worker parked"),
            Self::Woken => f.write_str("worker woken"),
            Self::Stalled { op } => write!(f, "op {op} stalled"),
            Self::Triggered { op } => write!(f, "op {op} was triggered"),
        }
    }
}
