//! An explanation for people.

use std::fmt;

use super::Explanation;

/// Bytes, in the largest unit that leaves nothing over.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        1.. if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        1.. if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} of {} to {}", self.operation.name(), size(self.bytes), self.peer)?;
        for (at, choice) in self.transports.iter().enumerate() {
            let head = if at == 0 { "transport" } else { "" };
            let verdict = if choice.taken { "taken" } else { "not taken" };
            writeln!(f, "  {head:<10} {}: {verdict}: {}", choice.transport, choice.why)?;
        }
        if let Some(path) = self.path {
            writeln!(f, "  {:<10} {path}", "region by")?;
        }
        if let Some(reason) = &self.staging_reason {
            writeln!(f, "  {:<10} {reason}", "local by")?;
        }
        match &self.queued {
            None => writeln!(f, "  {:<10} the calling thread, at once", "runs in")?,
            Some(why) => writeln!(f, "  {:<10} the transport's worker: {why}", "runs in")?,
        }
        let way = if self.streams { "past the caches" } else { "through the caches" };
        writeln!(f, "  {:<10} {way}, where the processor copies", "bytes go")?;
        writeln!(f, "  {:<10} {}", "imm", self.imm.unwrap_or("none"))?;
        let width = self.rails.iter().map(|rail| rail.device.len()).max().unwrap_or(0).max("device".len());
        write!(f, "  {:>4}  {:<width$}  {:>8}  {:>9}", "rail", "device", "requests", "bytes")?;
        for rail in &self.rails {
            let bytes = size(rail.bytes);
            write!(f, "\n  {:>4}  {:<width$}  {:>8}  {bytes:>9}", rail.rail, rail.device, rail.requests)?;
            if let Some(why) = rail.unusable {
                write!(f, "  {why}")?;
            }
        }
        Ok(())
    }
}
