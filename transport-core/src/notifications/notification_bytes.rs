//! What the fragments of one notification carry.

use std::borrow::Cow;

use super::MAX_LEN;
use crate::TraceContext;

/// The bytes of a notification, behind its trace context if it has one.
#[derive(Debug)]
pub(crate) struct NotificationBytes<'a> {
    bytes: Cow<'a, [u8]>,
    is_traced: bool,
}

impl<'a> NotificationBytes<'a> {
    /// The most bytes that fragments carry.
    pub const MAX: usize = MAX_LEN + TraceContext::LEN;

    /// The content of a notification of these bytes.
    #[inline]
    pub fn new(bytes: &'a [u8], trace: Option<TraceContext>) -> Self {
        let bytes = match trace {
            None => Cow::Borrowed(bytes),
            Some(trace) => Cow::Owned([&trace.to_bytes(), bytes].concat()),
        };
        Self { bytes, is_traced: trace.is_some() }
    }

    /// What the fragments carry.
    #[inline]
    pub fn on_wire(&self) -> &[u8] {
        &self.bytes
    }

    #[inline]
    pub fn is_traced(&self) -> bool {
        self.is_traced
    }

    /// The length of the notification in bytes, without its trace context.
    #[inline]
    pub fn len(&self) -> usize {
        self.bytes.len() - if self.is_traced { TraceContext::LEN } else { 0 }
    }

    /// Takes the trace context and the bytes apart that fragments have carried. The error says how the peer has broken the
    /// protocol.
    #[inline]
    pub fn parse(on_wire: Vec<u8>, is_traced: bool) -> Result<(Option<TraceContext>, Vec<u8>), String> {
        if is_traced { Self::parse_traced(on_wire) } else { Ok((None, on_wire)) }
    }

    #[cold]
    fn parse_traced(mut on_wire: Vec<u8>) -> Result<(Option<TraceContext>, Vec<u8>), String> {
        let Some((trace, bytes)) = on_wire.split_first_chunk::<{ TraceContext::LEN }>() else {
            return Err("a notification with a trace context is shorter than one".to_owned());
        };
        let (trace, len) = (TraceContext::from_bytes(*trace), bytes.len());
        let trace =
            trace.map_err(|error| format!("a notification has a trace context without ids: {error}"))?;
        on_wire.drain(..on_wire.len() - len);
        Ok((Some(trace), on_wire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_and_bytes_come_apart_again() {
        let trace = TraceContext::new([7; 16], [9; 8], 1).unwrap();
        for bytes in [&b""[..], b"block 7"] {
            for trace in [None, Some(trace)] {
                let content = NotificationBytes::new(bytes, trace);
                assert_eq!((content.len(), content.is_traced()), (bytes.len(), trace.is_some()));
                let parsed = NotificationBytes::parse(content.on_wire().to_vec(), content.is_traced());
                assert_eq!(parsed, Ok((trace, bytes.to_vec())));
            }
        }
        assert!(NotificationBytes::parse(vec![1; TraceContext::LEN - 1], true).is_err());
        assert!(NotificationBytes::parse(vec![0; TraceContext::LEN], true).is_err());
    }
}
