//! The requests and responses of an admin socket, each one line of JSON.

use serde::{Deserialize, Serialize};

use super::json;
use super::json_writer::to_json;
use crate::observe::Dump;
use crate::{Error, ErrorKind, RailCounters, Result};

/// The most bytes of a request, without the end of its line.
pub const MAX_LINE: usize = 4096;

/// The most operations of one rail group in a response. A program may have many thousands of them.
pub const MAX_OPERATIONS: usize = 64;

/// The most peers in a response.
pub const MAX_PEERS: usize = 4096;

/// What a client asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum AdminRequest {
    /// Takes a device out of service, as [`Fabric::drain_device`](crate::Fabric::drain_device) does. The response comes
    /// once no operation uses the device, or after the fabric's default deadline.
    Drain {
        /// The device's name.
        device: String,
    },
    /// Takes a device back into service, as [`Fabric::restore_device`](crate::Fabric::restore_device) does.
    Restore {
        /// The device's name.
        device: String,
    },
    /// Asks for the rails of all transports.
    Rails,
    /// Asks for a snapshot of the fabric, as [`Fabric::dump`](crate::Fabric::dump) takes it.
    Dump,
}

/// What the fabric answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "snake_case")]
#[non_exhaustive]
pub enum AdminResponse {
    /// The device is out of service, or back.
    Done,
    /// The rails of all transports, in order of preference.
    Rails {
        /// The rails.
        rails: Vec<RailStatus>,
    },
    /// A snapshot without records of the flight recorder, with at most [`MAX_OPERATIONS`] operations of each rail group,
    /// those that stall first and then the oldest, and with at most [`MAX_PEERS`] peers, the most silent ones.
    Dump {
        /// The operations that are left out.
        omitted_operations: u64,
        /// The peers that are left out.
        omitted_peers: u64,
        /// The snapshot.
        dump: Box<Dump>,
    },
    /// The request failed, or is none.
    Error {
        /// The kind of the error.
        kind: ErrorKind,
        /// What went wrong, for people.
        error: String,
    },
}

/// One rail: its state and its counters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RailStatus {
    /// Whether operations use the rail.
    pub state: RailState,
    /// The counters since the fabric was opened.
    #[serde(flatten)]
    pub counters: RailCounters,
}

/// Whether operations use a rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RailState {
    /// They do.
    InService,
    /// Its device was taken out of service: new operations use other rails where they can.
    OutOfService,
    /// Its device is lost.
    Lost,
}

impl AdminRequest {
    /// Parses a line.
    ///
    /// # Errors
    /// `Protocol` if the line is no request.
    pub fn parse(line: &[u8]) -> Result<Self> {
        let refuse = |why: &str| {
            let why = format!(
                "this line is no request: {why}; send {{\"request\":\"rails\"}} or \"dump\", or \"drain\" or \"restore\" \
                 with a \"device\""
            );
            Error::new(ErrorKind::Protocol, "admin", why)
        };
        let (mut request, mut device) = (None, None);
        for (name, value) in json::object_of_strings(line).map_err(refuse)? {
            let member = match name.as_str() {
                "request" => &mut request,
                "device" => &mut device,
                _ => return Err(refuse("it has an unknown member")),
            };
            if member.replace(value).is_some() {
                return Err(refuse("it has a member twice"));
            }
        }
        match (request.as_deref(), device) {
            (Some("drain"), Some(device)) => Ok(Self::Drain { device }),
            (Some("restore"), Some(device)) => Ok(Self::Restore { device }),
            (Some("rails"), None) => Ok(Self::Rails),
            (Some("dump"), None) => Ok(Self::Dump),
            (Some("drain" | "restore"), None) => Err(refuse("it has no device")),
            (Some("rails" | "dump"), Some(_)) => Err(refuse("it has a device")),
            (Some(_), _) => Err(refuse("its request is unknown")),
            (None, _) => Err(refuse("it has no request")),
        }
    }

    /// The line of this request, with its end.
    pub fn to_line(&self) -> String {
        let (request, device) = match self {
            Self::Drain { device } => ("drain", Some(device)),
            Self::Restore { device } => ("restore", Some(device)),
            Self::Rails => ("rails", None),
            Self::Dump => ("dump", None),
        };
        let mut line = format!("{{\"request\":\"{request}\"");
        if let Some(device) = device {
            line.push_str(",\"device\":");
            json::push_string(&mut line, device);
        }
        line.push_str("}\n");
        line
    }
}

impl AdminResponse {
    /// The response that has as much of `dump` as fits.
    pub(crate) fn dump(mut dump: Dump) -> Self {
        let mut omitted_operations = 0;
        for group in &mut dump.transports {
            group.records = Vec::new();
            group.operations.sort_by_key(|operation| (!operation.stalled, std::cmp::Reverse(operation.age)));
            omitted_operations += group.operations.len().saturating_sub(MAX_OPERATIONS) as u64;
            group.operations.truncate(MAX_OPERATIONS);
        }
        let omitted_peers = dump.peers.len().saturating_sub(MAX_PEERS) as u64;
        if omitted_peers > 0 {
            dump.peers.sort_by_key(|peer| std::cmp::Reverse(peer.heard));
            dump.peers.truncate(MAX_PEERS);
        }
        Self::Dump { omitted_operations, omitted_peers, dump: Box::new(dump) }
    }

    /// The line of this response, with its end. It is what serde makes of the response as JSON, and so every reader of
    /// JSON with serde can read it.
    pub fn to_line(&self) -> String {
        to_json(self) + "\n"
    }
}

impl From<Error> for AdminResponse {
    fn from(error: Error) -> Self {
        Self::Error { kind: error.kind(), error: error.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_lines_of_json() {
        let drain = AdminRequest::Drain { device: "a \"b\"\n".into() };
        let restore = AdminRequest::Restore { device: "lo1".into() };
        for request in [drain, restore, AdminRequest::Rails, AdminRequest::Dump] {
            let line = request.to_line();
            assert_eq!(line.lines().count(), 1, "{line}");
            assert_eq!(AdminRequest::parse(line.as_bytes()).unwrap(), request);
        }
        assert_eq!(AdminRequest::parse(b" {\"request\":\"rails\"} \r\n").unwrap(), AdminRequest::Rails);
        for wrong in [
            &b""[..],
            b"drain lo1",
            b"{}",
            b"{\"request\":\"drain\"}",
            b"{\"request\":\"rails\",\"device\":\"lo1\"}",
            b"{\"request\":\"dump\",\"device\":\"lo1\"}",
            b"{\"request\":\"reboot\",\"device\":\"lo1\"}",
            b"{\"request\":\"drain\",\"device\":\"lo1\",\"at\":\"noon\"}",
            b"{\"request\":\"drain\",\"device\":\"lo1\",\"device\":\"lo2\"}",
            b"{\"request\":\"drain\",\"device\":7}",
            b"\xff\xfe",
        ] {
            assert_eq!(AdminRequest::parse(wrong).unwrap_err().kind(), ErrorKind::Protocol, "{wrong:?}");
        }
    }
}
