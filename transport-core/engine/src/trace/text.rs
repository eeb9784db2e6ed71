//! How dumps and records print untrusted text and durations.

use std::fmt;
use std::time::Duration;

/// Untrusted text: prints at most 256 characters, and a space for each control character.
pub struct Printable<'a>(pub &'a str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX_CHARS: usize = 256;
        self.0.chars().take(MAX_CHARS).try_for_each(|c| write!(f, "{}", if c.is_control() { ' ' } else { c }))
    }
}

/// A duration in µs, ms or s.
pub struct HumanDuration(pub Duration);

impl fmt::Display for HumanDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_nanos() {
            0..1_000_000 => write!(f, "{:.1} µs", self.0.as_secs_f64() * 1e6),
            1_000_000..1_000_000_000 => write!(f, "{:.1} ms", self.0.as_secs_f64() * 1e3),
            _ => write!(f, "{:.1} s", self.0.as_secs_f64()),
        }
    }
}
