//! How the streaming copies of this process advance: how many ranges side by side, and in which bursts.

use std::fmt;
use std::sync::OnceLock;

use crate::{Error, ErrorKind, Result};

/// The variable that sets the loop.
const VARIABLE: &str = "MULTIRAIL_STREAM_LOOP";

/// The bursts that a loop may have, in bytes.
pub(super) const BURSTS: [usize; 5] = [128, 256, 512, 1024, 2048];

/// A loop of streaming copies. It copies `streams` ranges side by side, `burst` bytes of one before it continues with
/// the next.
///
/// The best loop differs by processor. GB/s of one thread, from memory to memory in huge pages:
///
/// | | Zen 3 | Zen 4 | Sapphire Rapids |
/// |---|---|---|---|
/// | memcpy | 7.4 | 14.9 | |
/// | 1 stream | 9.2 | 23.9 | 9.5 |
/// | 2 streams | 11.4 | 23.2 | |
/// | 4 streams, bursts of 128 B | 3.8 | 24.5 | 13.9 |
/// | 4 streams, bursts of 512 B | 13.3 | 22.2 | |
///
/// So the process starts with the loop that is known of its kind of processor, and tries the others on its first
/// copies ([`StreamChoice`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamLoop {
    /// Ranges side by side: 1, 2 or 4.
    pub streams: usize,
    /// Bytes of one range before the next: 128, 256, 512, 1024 or 2048. A single stream ignores it.
    pub burst: usize,
}

impl StreamLoop {
    pub(super) const fn new(streams: usize, burst: usize) -> Self {
        Self { streams, burst }
    }
}

impl fmt::Display for StreamLoop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.streams {
            1 => write!(f, "1 stream"),
            streams => write!(f, "{streams} streams in bursts of {} B", self.burst),
        }
    }
}

/// Where a [`StreamLoop`] comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoopOrigin {
    /// The environment variable `MULTIRAIL_STREAM_LOOP`.
    Setting,
    /// The table of loops by processor.
    Processor,
    /// The first copies of this process: the loop was clearly faster than the known one.
    Measured,
}

impl fmt::Display for LoopOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Setting => VARIABLE,
            Self::Processor => "known of this processor",
            Self::Measured => "measured",
        })
    }
}

/// The loop of a process, and where it comes from.
///
/// A process copies its first streamed bytes by each loop in turn, and measures the time. No other memory is copied,
/// and no thread waits: slow loops cost a process 1 to 2 ms in all. The choice changes the order in which bytes are
/// copied, and nothing else: a run with a seed and a virtual clock is the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamChoice {
    /// The loop that copies take now.
    pub stream_loop: StreamLoop,
    /// The origin of that loop.
    pub origin: LoopOrigin,
    /// Whether no later copy changes it.
    pub is_final: bool,
}

impl StreamChoice {
    /// The choice for ranges. `None` where there is only one loop: on all processors but those of x86_64.
    pub fn of_ranges() -> Option<Self> {
        #[cfg(all(target_arch = "x86_64", not(any(miri, multirail_loom))))]
        return Some(super::trials::RANGES.choice());
        #[cfg(not(all(target_arch = "x86_64", not(any(miri, multirail_loom)))))]
        None
    }

    /// The choice for four scattered pages at once ([`stream_four`](super::stream_four)). These are always four
    /// streams, so that their TLB misses overlap.
    pub fn of_pages() -> Option<Self> {
        #[cfg(all(target_arch = "x86_64", not(any(miri, multirail_loom))))]
        return Some(super::trials::PAGES.choice());
        #[cfg(not(all(target_arch = "x86_64", not(any(miri, multirail_loom)))))]
        None
    }

    /// Returns an error if `MULTIRAIL_STREAM_LOOP` has a value that means nothing. Copies then take the default.
    ///
    /// # Errors
    /// `InvalidRequest`, with the values that are allowed.
    pub fn check_setting() -> Result<()> {
        let given = Setting::of_this_process().clone();
        given.map(drop).map_err(|why| Error::new(ErrorKind::InvalidRequest, "read the environment", why))
    }
}

impl fmt::Display for StreamChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let not_yet = if self.is_final { "" } else { ", until the first copies are measured" };
        write!(f, "{} ({}{not_yet})", self.stream_loop, self.origin)
    }
}

/// The meaning of the variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(all(target_arch = "x86_64", not(any(miri, multirail_loom)))), allow(dead_code))]
pub(super) enum Setting {
    /// Measures, and takes the known loop unless another one is faster.
    Measure,
    /// Takes the loop that is known of this processor.
    Processor,
    /// Takes this loop.
    Loop(StreamLoop),
}

impl Setting {
    /// The value of the variable. The first call reads it.
    pub(super) fn of_this_process() -> &'static std::result::Result<Self, String> {
        static GIVEN: OnceLock<std::result::Result<Setting, String>> = OnceLock::new();
        GIVEN.get_or_init(|| Self::parse(&std::env::var_os(VARIABLE).unwrap_or_default().to_string_lossy()))
    }

    fn parse(given: &str) -> std::result::Result<Self, String> {
        let known = match given.trim() {
            "" | "measure" => Some(Self::Measure),
            "processor" => Some(Self::Processor),
            "1" => Some(Self::Loop(StreamLoop::new(1, 512))),
            shape => Self::parse_loop(shape),
        };
        known.ok_or_else(|| {
            format!(
                "{VARIABLE} is {given:?}; give measure, processor, 1, or 2 or 4 streams with a burst of 128, 256, 512, \
                 1024 or 2048 bytes, for example 4x512"
            )
        })
    }

    fn parse_loop(shape: &str) -> Option<Self> {
        let (streams, burst) = shape.split_once('x')?;
        let burst = BURSTS.into_iter().find(|known| known.to_string() == burst)?;
        let streams = [2, 4].into_iter().find(|known| known.to_string() == streams)?;
        Some(Self::Loop(StreamLoop::new(streams, burst)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_names_a_loop_or_is_an_error_that_says_what_to_give() {
        assert_eq!(Setting::parse(""), Ok(Setting::Measure));
        assert_eq!(Setting::parse(" measure "), Ok(Setting::Measure));
        assert_eq!(Setting::parse("processor"), Ok(Setting::Processor));
        assert_eq!(Setting::parse("2x1024"), Ok(Setting::Loop(StreamLoop::new(2, 1024))));
        assert!(matches!(Setting::parse("1"), Ok(Setting::Loop(StreamLoop { streams: 1, .. }))));
        for wrong in ["4", "4x", "4x100", "3x128", "x128", "4x128x1", "-4x128", "auto", "4X128", "4x0512"] {
            let why = Setting::parse(wrong).unwrap_err();
            assert!(why.contains(VARIABLE) && why.contains("4x512"), "{why}");
        }
    }

    #[test]
    fn a_choice_says_what_it_is() {
        let stream_loop = StreamLoop::new(4, 512);
        let known = StreamChoice { stream_loop, origin: LoopOrigin::Processor, is_final: false };
        assert_eq!(
            known.to_string(),
            "4 streams in bursts of 512 B (known of this processor, until the first copies are measured)"
        );
        let one = StreamChoice {
            stream_loop: StreamLoop::new(1, 512),
            origin: LoopOrigin::Setting,
            is_final: true,
        };
        assert_eq!(one.to_string(), "1 stream (MULTIRAIL_STREAM_LOOP)");
    }
}
