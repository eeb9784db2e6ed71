//! Which span of which trace an operation belongs to.

use std::fmt;
use std::str::FromStr;

use crate::{Error, ErrorKind, Result};

/// A span of a distributed trace, as [W3C's Trace Context](https://www.w3.org/TR/trace-context/) names it: OpenTelemetry and
/// others write it as `traceparent`, which this type parses and prints.
///
/// A caller gives it to an operation ([`WriteOptions::trace`](crate::WriteOptions::trace)); then the operation is a child of
/// that span, and a notification takes it along to the peer ([`Notification::trace`](crate::Notification::trace)).
///
/// ```
/// use multirail_core::{TraceContext, WriteOptions};
///
/// let request: TraceContext = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse()?;
/// let options = WriteOptions::new().notify(*b"block 7").trace(request);
/// # Ok::<(), multirail_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    trace_id: [u8; 16],
    span_id: [u8; 8],
    flags: u8,
}

impl TraceContext {
    /// Its bytes in a notification: trace, span, flags.
    pub(crate) const LEN: usize = 25;
    /// The flag of a trace that its beginner records.
    pub const SAMPLED: u8 = 1;

    /// The span `span_id` of the trace `trace_id`, with W3C's `trace-flags`.
    ///
    /// # Errors
    /// `InvalidRequest` if one of the ids is 0, which names no trace and no span.
    pub fn new(trace_id: [u8; 16], span_id: [u8; 8], flags: u8) -> Result<Self> {
        if trace_id == [0; 16] || span_id == [0; 8] {
            return Err(invalid("the id of the trace or of the span is 0"));
        }
        Ok(Self { trace_id, span_id, flags })
    }

    /// The trace, in the order of `traceparent`.
    pub fn trace_id(&self) -> [u8; 16] {
        self.trace_id
    }

    /// The span, in the order of `traceparent`.
    pub fn span_id(&self) -> [u8; 8] {
        self.span_id
    }

    /// W3C's `trace-flags`: [`TraceContext::SAMPLED`] and others.
    pub fn flags(&self) -> u8 {
        self.flags
    }

    pub(crate) fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..16].copy_from_slice(&self.trace_id);
        bytes[16..24].copy_from_slice(&self.span_id);
        bytes[24] = self.flags;
        bytes
    }

    /// Reads what a peer has sent.
    pub(crate) fn from_bytes(bytes: [u8; Self::LEN]) -> Result<Self> {
        let [trace @ .., flags] = bytes;
        let (trace, span) = trace.split_at(16);
        let mut context = Self { trace_id: [0; 16], span_id: [0; 8], flags };
        context.trace_id.copy_from_slice(trace);
        context.span_id.copy_from_slice(span);
        Self::new(context.trace_id, context.span_id, flags)
    }
}

impl fmt::Display for TraceContext {
    /// As a `traceparent` of version 00.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (trace, span) = (u128::from_be_bytes(self.trace_id), u64::from_be_bytes(self.span_id));
        write!(f, "00-{trace:032x}-{span:016x}-{:02x}", self.flags)
    }
}

impl FromStr for TraceContext {
    type Err = Error;

    /// Reads a `traceparent`. A version later than 00 may have more parts, which are skipped.
    ///
    /// # Errors
    /// `InvalidRequest` if the text is none.
    fn from_str(text: &str) -> Result<Self> {
        const FORM: &str = "it has the form 00-TRACE-SPAN-FLAGS, in 2, 32, 16 and 2 digits of 0-9 and a-f";
        let mut parts = text.split('-');
        let mut part = |digits: usize| {
            let part = parts.next().filter(|part| part.len() == digits)?;
            let is_hex = part.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
            if is_hex { u128::from_str_radix(part, 16).ok() } else { None }
        };
        let (Some(version), Some(trace), Some(span), Some(flags)) = (part(2), part(32), part(16), part(2))
        else {
            return Err(invalid(FORM));
        };
        if version == 0xff || (version == 0 && parts.next().is_some()) {
            return Err(invalid(FORM));
        }
        Self::new(trace.to_be_bytes(), (span as u64).to_be_bytes(), flags as u8)
    }
}

fn invalid(why: &str) -> Error {
    Error::new(ErrorKind::InvalidRequest, "trace", format!("this is no traceparent: {why}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The examples of W3C's recommendation, and what it forbids.
    #[test]
    fn a_traceparent_is_read_as_w3c_says() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let context: TraceContext = text.parse().unwrap();
        assert_eq!(context.to_string(), text);
        assert_eq!(
            (context.trace_id()[0], context.span_id()[1], context.flags()),
            (0x4b, 0xf0, TraceContext::SAMPLED)
        );
        let later = "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-what-comes";
        assert_eq!(later.parse::<TraceContext>().unwrap(), context);
        for wrong in [
            "",
            "00",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-+1",
            "00-4bf92f3577b34da6a3ce929d0e0e473-600f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0ä",
        ] {
            assert_eq!(
                wrong.parse::<TraceContext>().unwrap_err().kind(),
                ErrorKind::InvalidRequest,
                "{wrong:?}"
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..Default::default() })]

        #[test]
        fn what_is_written_is_read(bytes: [u8; TraceContext::LEN]) {
            if let Ok(context) = TraceContext::from_bytes(bytes) {
                prop_assert_eq!(context.to_bytes(), bytes);
                prop_assert_eq!(context.to_string().parse::<TraceContext>().unwrap(), context);
            }
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".{0,80}") {
            let _ = text.parse::<TraceContext>();
        }
    }
}
