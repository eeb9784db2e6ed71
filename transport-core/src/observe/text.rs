//! How a dump is printed.

use std::fmt;
use std::time::Duration;

use super::{Dump, PeerDump, RailDump, TransportDump, WorkerState};
use crate::engine::trace::{HumanDuration, Printable};

impl fmt::Display for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let opened = HumanDuration(Duration::from_nanos(self.time.as_nanos()));
        writeln!(
            f,
            "dump of {}, process {}, incarnation {:016x}, at {opened}",
            Printable(&self.host),
            self.process,
            self.incarnation
        )?;
        self.transports.iter().try_for_each(|transport| write!(f, "{transport}"))?;
        self.peers.iter().try_for_each(|peer| writeln!(f, "{peer}"))?;
        for transport in self.transports.iter().filter(|transport| !transport.records.is_empty()) {
            let count = transport.records.len();
            writeln!(f, "last {count} records of transport {}", Printable(&transport.label))?;
            transport.records.iter().try_for_each(|record| writeln!(f, "  {record}"))?;
        }
        Ok(())
    }
}

impl fmt::Display for TransportDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (label, backend) = (Printable(&self.label), Printable(&self.backend));
        writeln!(
            f,
            "transport {label} ({backend}), {}: {} operations under way, {} queued, {} receives posted",
            self.worker,
            self.operations.len(),
            self.queued,
            self.receives
        )?;
        self.rails.iter().try_for_each(|rail| writeln!(f, "  {rail}"))?;
        self.operations.iter().try_for_each(|operation| writeln!(f, "  {operation}"))?;
        self.recent_failures.iter().try_for_each(|operation| writeln!(f, "  cut short: {operation}"))
    }
}

impl fmt::Display for WorkerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "worker running",
            Self::Parked => "worker parked",
            Self::Blocked => "worker blocked: it does not answer",
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
             queue full {}, retries {}, waits for grants {}, direct {}, direct bytes {}, taken over {}",
            counts.rail,
            Printable(&counts.device),
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
            counts.direct_bytes,
            counts.taken_over
        )?;
        if self.lost {
            f.write_str("; its device is lost")?;
        }
        if self.retired { f.write_str("; its device is taken out of service") } else { Ok(()) }
    }
}

impl fmt::Display for PeerDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.heard {
            Some(heard) => write!(f, "{}: last heard {} ago", self.name, HumanDuration(heard)),
            None => write!(f, "{}: in this process", self.name),
        }
    }
}
