//! The requests and responses of an admin socket, each one line of JSON.

use serde::{Deserialize, Serialize};

use super::json;
use crate::{Error, ErrorKind, RailCounters, Result};

/// The most bytes of a request, without the end of its line.
pub const MAX_LINE: usize = 4096;

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
                "this line is no request: {why}; send {{\"request\":\"rails\"}}, or \"drain\" or \"restore\" with a \
                 \"device\""
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
            (Some("drain" | "restore"), None) => Err(refuse("it has no device")),
            (Some("rails"), Some(_)) => Err(refuse("it has a device")),
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
    /// The line of this response, with its end. It is what serde makes of the response as JSON, and so every reader of
    /// JSON with serde can read it.
    pub fn to_line(&self) -> String {
        let mut line = match self {
            Self::Done => "{\"response\":\"done\"".to_owned(),
            Self::Rails { rails } => {
                let mut line = "{\"response\":\"rails\",\"rails\":[".to_owned();
                for (at, rail) in rails.iter().enumerate() {
                    line.push_str(if at == 0 { "{" } else { ",{" });
                    rail.push_members(&mut line);
                    line.push('}');
                }
                line.push(']');
                line
            }
            Self::Error { kind, error } => {
                // The name of a kind is a word.
                let mut line = format!("{{\"response\":\"error\",\"kind\":\"{kind:?}\",\"error\":");
                json::push_string(&mut line, error);
                line
            }
        };
        line.push_str("}\n");
        line
    }
}

impl RailStatus {
    fn push_members(&self, line: &mut String) {
        let state = match self.state {
            RailState::InService => "in_service",
            RailState::OutOfService => "out_of_service",
            RailState::Lost => "lost",
        };
        let counters = &self.counters;
        let texts = [
            ("state", state),
            ("transport", &counters.transport),
            ("backend", &counters.backend),
            ("device", &counters.device),
        ];
        for (name, text) in texts {
            line.push_str(&format!("\"{name}\":"));
            json::push_string(line, text);
            line.push(',');
        }
        let numbers = [
            ("rail", u64::from(counters.rail)),
            ("posts", counters.posts),
            ("doorbells", counters.doorbells),
            ("bytes", counters.bytes),
            ("completions", counters.completions),
            ("errors", counters.errors),
            ("queue_full", counters.queue_full),
            ("retries", counters.retries),
            ("grant_waits", counters.grant_waits),
            ("taken_over", counters.taken_over),
            ("replayed", counters.replayed),
            ("replayed_bytes", counters.replayed_bytes),
            ("paths_broken", counters.paths_broken),
            ("paths_mended", counters.paths_mended),
            ("direct", counters.direct),
            ("direct_bytes", counters.direct_bytes),
        ];
        let numbers: Vec<_> = numbers.iter().map(|(name, number)| format!("\"{name}\":{number}")).collect();
        line.push_str(&numbers.join(","));
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
        for request in [drain, AdminRequest::Restore { device: "lo1".into() }, AdminRequest::Rails] {
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
