//! The second process of a bench: this program again, as a server.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::failure::{CommandFailure, CommandResult};
use crate::{Common, program};

/// How long the server may take to print its address.
const START: Duration = Duration::from_secs(20);
/// How long the server may take to exit after the session.
const EXIT: Duration = Duration::from_secs(10);

/// How long to wait for the server's exit status after its connection broke.
const REASON_LIMIT: Duration = Duration::from_millis(300);

/// A server process. Dropping it kills and reaps it.
pub struct ServerProcess {
    child: Child,
    address: String,
}

#[derive(serde::Deserialize)]
struct Listening {
    listening: String,
}

impl ServerProcess {
    /// Starts the process and reads its address.
    pub fn start(common: &Common) -> CommandResult<Self> {
        let words = program::words()?;
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.args(["bench", "server", "--listen", "127.0.0.1:0", "--wait", "20s", "--json"]);
        command.args(["--backend", &common.choice()?.to_string()]).args(common.security.arguments());
        command.args(common.provider.arguments());
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        // In its own process group, so that ^C reaches this process only, which then ends the server.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let child = command
            .spawn()
            .map_err(|e| CommandFailure::new(format!("cannot start the server process: {e}")))?;
        let mut server = Self { child, address: String::new() };
        match server.read_address() {
            Ok(address) => server.address = address,
            Err(failure) => return Err(server.explain(failure)),
        }
        Ok(server)
    }

    /// The address of the server.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Reads the address from the first line. Another thread reads later lines, so that the server can write them.
    fn read_address(&mut self) -> CommandResult<String> {
        let Some(stdout) = self.child.stdout.take() else {
            return Err(CommandFailure::new("the server process has no output"));
        };
        let (first, line) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = first.send(line);
            }
        });
        let line = line
            .recv_timeout(START)
            .map_err(|_| CommandFailure::new("the server process printed no address"))?;
        let parsed: Result<Listening, _> = serde_json::from_str(&line);
        parsed
            .map(|l| l.listening)
            .map_err(|_| CommandFailure::new("the server process printed another line than its address"))
    }

    /// Adds the server's exit status to `failure`, if the server has ended.
    pub fn explain(&mut self, failure: CommandFailure) -> CommandFailure {
        match (self.wait(REASON_LIMIT), failure) {
            (Some(status), CommandFailure::Message(message)) => CommandFailure::new(format!(
                "the bench server (process {}) ended with {status}: {message}",
                self.child.id()
            )),
            (_, failure) => failure,
        }
    }

    /// Waits for the exit of the server after the session.
    pub fn finish(mut self) -> CommandResult {
        match self.wait(EXIT) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(CommandFailure::new(format!("the bench server ended with {status}"))),
            None => Err(CommandFailure::new("the bench server did not exit after the session")),
        }
    }

    fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let until = Instant::now() + limit;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                Ok(None) | Err(_) => return None,
            }
        }
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Killing fails only if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
