//! A client of an admin socket. Every wait has a limit.

use std::path::Path;
use std::time::Duration;

use multirail::Dump;
use multirail::admin::{AdminRequest, AdminResponse, RailStatus};

use crate::failure::{CommandFailure, CommandResult, printable};

/// The most bytes of an answer: some times the largest dump, of 4096 peers and 64 operations of each rail group.
#[cfg(unix)]
const MAX_ANSWER: u64 = 32 << 20;

/// A dump as it comes over an admin socket.
pub struct Sample {
    pub dump: Dump,
    /// The operations and the peers that the dump leaves out.
    pub omitted_operations: u64,
    pub omitted_peers: u64,
}

/// A connection to an admin socket.
pub struct AdminClient {
    #[cfg(unix)]
    stream: std::os::unix::net::UnixStream,
    timeout: Duration,
}

impl AdminClient {
    /// Connects to the socket at `path`. The process may take `timeout` for each answer.
    #[cfg(unix)]
    pub fn connect(path: &Path, timeout: Duration) -> CommandResult<Self> {
        let stream = std::os::unix::net::UnixStream::connect(path).map_err(|error| {
            let remedy = match error.kind() {
                std::io::ErrorKind::NotFound => "; give the path that the process got by --admin",
                std::io::ErrorKind::ConnectionRefused => "; the process has ended without removing it",
                std::io::ErrorKind::PermissionDenied => "; run this as the user of the process",
                _ => "",
            };
            CommandFailure::new(format!("cannot connect to {}: {error}{remedy}", path.display()))
        })?;
        let limits =
            stream.set_read_timeout(Some(timeout)).and_then(|()| stream.set_write_timeout(Some(timeout)));
        limits.map_err(|error| CommandFailure::new(format!("cannot set the limit of waits: {error}")))?;
        Ok(Self { stream, timeout })
    }

    /// There are no Unix sockets here.
    #[cfg(not(unix))]
    pub fn connect(path: &Path, timeout: Duration) -> CommandResult<Self> {
        let _ = Self { timeout };
        Err(CommandFailure::new(format!("{}: this system has no Unix sockets", path.display())))
    }

    /// The rails of the process.
    pub fn rails(mut self) -> CommandResult<Vec<RailStatus>> {
        match self.ask(&AdminRequest::Rails)? {
            AdminResponse::Rails { rails } => Ok(rails),
            _ => Err(other_answer()),
        }
    }

    /// A dump of the process.
    pub fn dump(&mut self) -> CommandResult<Sample> {
        match self.ask(&AdminRequest::Dump)? {
            AdminResponse::Dump { omitted_operations, omitted_peers, dump } => {
                Ok(Sample { dump: *dump, omitted_operations, omitted_peers })
            }
            _ => Err(other_answer()),
        }
    }

    /// Sends a request and waits for the answer. An error that the process reports is a failure.
    pub fn ask(&mut self, request: &AdminRequest) -> CommandResult<AdminResponse> {
        match serde_json::from_slice(&self.exchange(&request.to_line())?) {
            Ok(AdminResponse::Error { error, .. }) => Err(CommandFailure::new(printable(&error))),
            Ok(answer) => Ok(answer),
            Err(error) => Err(CommandFailure::new(format!(
                "the answer of the process is unknown: {}; use the same version on both sides",
                printable(&error.to_string())
            ))),
        }
    }

    /// Sends a line and waits for a line.
    #[cfg(unix)]
    fn exchange(&mut self, line: &str) -> CommandResult<Vec<u8>> {
        use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
        let mut answer = Vec::new();
        let sent = self.stream.write_all(line.as_bytes());
        let read = sent
            .and_then(|()| BufReader::new((&self.stream).take(MAX_ANSWER)).read_until(b'\n', &mut answer));
        match read {
            Ok(0) => Err(CommandFailure::new("the process has closed the connection without an answer")),
            Ok(_) => Ok(answer),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                let limit = self.timeout.as_secs_f64();
                Err(CommandFailure::new(format!(
                    "the process did not answer within {limit} s; see --timeout"
                )))
            }
            Err(error) => Err(CommandFailure::new(format!("the connection to the process broke: {error}"))),
        }
    }

    #[cfg(not(unix))]
    fn exchange(&mut self, _line: &str) -> CommandResult<Vec<u8>> {
        Err(CommandFailure::new(format!("no answer within {} s", self.timeout.as_secs_f64())))
    }
}

fn other_answer() -> CommandFailure {
    CommandFailure::new("the process gave another answer; use the same version on both sides")
}
