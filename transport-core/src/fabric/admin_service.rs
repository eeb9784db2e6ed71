//! Serves the clients of an admin socket, as a task of the control thread.

use std::os::unix::net::UnixListener as BoundListener;
use std::sync::Weak;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::{Fabric, FabricInner};
use crate::admin::{AdminRequest, AdminResponse, MAX_LINE};
use crate::control::Spawner;
use crate::{Error, ErrorKind, Result};

/// The most clients at once.
const CLIENTS: usize = 8;
/// The silence after which a client is let go.
const SILENCE: Duration = Duration::from_secs(60);
/// How long a client may take to read an answer.
const WRITE_LIMIT: Duration = Duration::from_secs(5);
/// The pause after a failed accept, for example when no file descriptor is left.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// What the tasks of an admin socket know. It does not keep the fabric open.
#[derive(Clone)]
pub(super) struct AdminService {
    fabric: Weak<FabricInner>,
    spawner: Spawner,
}

impl AdminService {
    /// A service of this fabric.
    pub fn new(fabric: Weak<FabricInner>, spawner: Spawner) -> Self {
        Self { fabric, spawner }
    }

    /// Serves clients until the control thread shuts down.
    pub async fn serve(self, listener: BoundListener) {
        let listener = match UnixListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => {
                tracing::error!(%error, "the admin socket cannot be served");
                return;
            }
        };
        let mut clients = JoinSet::new();
        loop {
            tokio::select! {
                // Those that have left make room before another one is accepted.
                biased;
                () = self.spawner.closing() => return,
                Some(_) = clients.join_next() => {}
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) if clients.len() < CLIENTS => {
                        clients.spawn(self.clone().serve_client(stream));
                    }
                    Ok((stream, _)) => refuse(&stream),
                    Err(error) => {
                        tracing::warn!(%error, "the admin socket cannot accept a client; retrying");
                        sleep(RETRY_DELAY).await;
                    }
                },
            }
        }
    }

    /// Answers the requests of a client until it leaves, is silent for too long, or breaks the protocol.
    async fn serve_client(self, stream: UnixStream) {
        let (reading, mut writing) = stream.into_split();
        let mut reader = BufReader::new(reading);
        let mut line = Vec::new();
        loop {
            line.clear();
            let mut limited = (&mut reader).take(MAX_LINE as u64 + 1);
            match timeout(SILENCE, limited.read_until(b'\n', &mut line)).await {
                Ok(Ok(1..)) => {}
                Ok(Ok(0) | Err(_)) | Err(_) => return,
            }
            let is_too_long = line.len() > MAX_LINE && line.last() != Some(&b'\n');
            let answer = match is_too_long {
                true => Err(too_long()),
                false => self.answer(&line).await,
            };
            let answer = answer.unwrap_or_else(AdminResponse::from).to_line();
            let is_read = timeout(WRITE_LIMIT, writing.write_all(answer.as_bytes())).await;
            if is_too_long || !matches!(is_read, Ok(Ok(()))) {
                return;
            }
        }
    }

    /// Answers one line.
    async fn answer(&self, line: &[u8]) -> Result<AdminResponse> {
        match AdminRequest::parse(line)? {
            AdminRequest::Drain { device } => {
                tracing::info!(%device, "taken out of service over the admin socket");
                // The fabric is not held while the drain waits.
                let drain = self.fabric()?.drain_device(&device)?;
                drain.await?;
                Ok(AdminResponse::Done)
            }
            AdminRequest::Restore { device } => {
                tracing::info!(%device, "taken back into service over the admin socket");
                self.fabric()?.restore_device(&device)?;
                Ok(AdminResponse::Done)
            }
            AdminRequest::Rails => Ok(AdminResponse::Rails { rails: self.fabric()?.rail_status() }),
            AdminRequest::Dump => {
                let fabric = self.fabric()?;
                self.spawner.blocking(move || AdminResponse::dump(fabric.dump())).await
            }
        }
    }

    fn fabric(&self) -> Result<Fabric> {
        let closed = || Error::new(ErrorKind::Closed, "admin", "the fabric was closed");
        self.fabric.upgrade().map(Fabric).ok_or_else(closed)
    }
}

/// Tells a client that there are too many. A new connection has room for one line.
fn refuse(stream: &UnixStream) {
    let why = format!("{CLIENTS} clients are connected already; try again");
    let refusal = AdminResponse::from(Error::new(ErrorKind::Busy, "admin", why));
    let _ = stream.try_write(refusal.to_line().as_bytes());
}

fn too_long() -> Error {
    Error::new(ErrorKind::Protocol, "admin", format!("a line has more than {MAX_LINE} bytes"))
}
