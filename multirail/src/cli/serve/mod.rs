//! `multirail serve`: receives files into a directory, from several senders at once.

mod beneath;
mod directory;
mod durable;
pub(super) mod journal;
mod judge;
mod partial;
mod quota;
mod reason;
mod report;
mod room;
mod session;
mod staged;
mod staging;
mod store;
mod window;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use multirail::files::{Layout, ToSender};
use multirail::{ErrorKind, Fabric, Peer, PeerId, RecvPool};

use super::failure::{Done, Failure};
use super::units::Size;
use super::wire::{MESSAGE_BYTES, Outbox};
use super::{Common, output, wait};
use directory::{Clash, Directory};
use quota::Quota;
use session::Session;

/// Senders served at once; each has a region of `Layout::OFFERED.total()` bytes.
const MOST_SENDERS: usize = 6;

/// Messages a sender may have under way: every window, and one word more.
const BACKLOG: usize = Layout::OFFERED.windows as usize + 4;

/// Pause after a connection attempt that failed, so that a stream of them stays cheap.
const BREATH: Duration = Duration::from_millis(20);

#[derive(clap::Args)]
pub struct ServeArguments {
    /// The directory that files are stored in; unfinished ones wait in its .multirail
    #[arg(long, value_name = "DIR")]
    into: PathBuf,

    /// Where to listen; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:7411", value_name = "ADDRESS")]
    listen: String,

    /// Serve one sender, then exit
    #[arg(long)]
    once: bool,

    /// What to do with a file whose name is taken
    #[arg(long, value_enum, default_value_t = Clash::Refuse, value_name = "RULE")]
    on_clash: Clash,

    /// Replace files that exist already: the same as --on-clash overwrite
    #[arg(long, conflicts_with = "on_clash")]
    overwrite: bool,

    /// Store at most so many bytes in all, as in 500MiB or 2GiB: of unfinished files too, in
    /// blocks of 4 KiB, a block for each file, link or directory, and the journals of files
    /// in pieces
    #[arg(long, value_name = "SIZE")]
    max_bytes: Option<Size>,
}

/// Which session a peer's messages belong to.
#[derive(Clone, Default)]
struct Routes(Arc<Mutex<HashMap<PeerId, SyncSender<Vec<u8>>>>>);

struct Server {
    fabric: Fabric,
    directory: Directory,
    routes: Routes,
    json: bool,
}

/// Serves until it is stopped, or one sender with `--once`.
pub fn run(common: &Common, arguments: ServeArguments) -> Done {
    let clash = if arguments.overwrite { Clash::Overwrite } else { arguments.on_clash };
    let directory = Directory::open(arguments.into, clash, Quota::new(arguments.max_bytes))?;
    let fabric = common.open()?;
    // Senders speak once a session has welcomed them, never before there are receives.
    let pool = fabric.recv_pool(MOST_SENDERS * BACKLOG, MESSAGE_BYTES)?;
    let listener = wait::listen(&fabric, &arguments.listen)?;
    let address = listener.local_addr();
    match common.json {
        true => output::json(&serde_json::json!({ "listening": address }))?,
        false => output::line(&format!("listening on {address}; run: multirail send PATH --to {address}"))?,
    }
    // Closing ends every session; one that ends keeps whole files, and partial ones with
    // a journal.
    let interrupted = fabric.clone();
    ctrlc::set_handler(move || interrupted.close())
        .map_err(|error| Failure::new(format!("cannot take interrupts: {error}")))?;
    let routes = Routes::default();
    let server = Arc::new(Server { fabric, directory, routes: routes.clone(), json: common.json });
    std::thread::spawn(move || dispatch(pool, &routes));
    if arguments.once {
        let peer = pollster::block_on(listener.accept())?;
        drop(listener);
        return server.serve(&peer);
    }
    let mut sessions: Vec<JoinHandle<()>> = Vec::new();
    loop {
        match pollster::block_on(listener.accept()) {
            Ok(peer) => {
                let server = Arc::clone(&server);
                sessions.retain(|session| !session.is_finished());
                sessions.push(std::thread::spawn(move || {
                    if let Err(failure) = server.serve(&peer) {
                        output::complain(failure.sentence());
                    }
                }));
            }
            Err(error) if error.kind() == ErrorKind::Closed => {
                let unfinished = sessions.into_iter().filter(|session| !session.is_finished());
                unfinished.for_each(|session| drop(session.join()));
                return Err(Failure::new(
                    "interrupted; files that were not whole wait in .multirail for `send --resume`",
                ));
            }
            Err(error) => {
                output::complain(&format!("a sender could not connect: {error}"));
                std::thread::sleep(BREATH);
            }
        }
    }
}

/// Hands every message to its peer's session until the fabric closes.
fn dispatch(pool: RecvPool, routes: &Routes) {
    loop {
        match pollster::block_on(pool.next()) {
            Ok(message) => routes.deliver(message.peer(), message.to_vec()),
            Err(error) if matches!(error.kind(), ErrorKind::Closed | ErrorKind::DeviceLost) => return,
            // A message nobody should have sent; its sender's session times out or ends.
            Err(error) => tracing::warn!(%error, "a message was dropped"),
        }
    }
}

impl Server {
    fn serve(&self, peer: &Peer) -> Done {
        let served = match self.routes.add(peer.id()) {
            Some(inbox) => Session::run(&self.fabric, peer, inbox, &self.directory, self.json),
            None => self.turn_away(peer),
        };
        self.routes.remove(peer.id());
        peer.disconnect();
        served
    }

    fn turn_away(&self, peer: &Peer) -> Done {
        let reason = format!("{MOST_SENDERS} senders are being served already; try again later");
        Outbox::new(&self.fabric, peer)?.say(&ToSender::Refused(reason.clone()))?;
        wait::let_go(peer);
        Err(Failure::new(format!("a sender was refused: {reason}")))
    }
}

impl Routes {
    /// A way for this peer's messages; `None` if there are enough senders.
    fn add(&self, peer: PeerId) -> Option<Receiver<Vec<u8>>> {
        let mut routes = self.lock();
        if routes.len() >= MOST_SENDERS {
            return None;
        }
        let (sender, receiver) = mpsc::sync_channel(BACKLOG);
        routes.insert(peer, sender);
        Some(receiver)
    }

    fn remove(&self, peer: PeerId) {
        self.lock().remove(&peer);
    }

    /// A peer with more messages under way than agreed loses its route; its
    /// session ends by that. One without a session is not listened to.
    fn deliver(&self, peer: PeerId, message: Vec<u8>) {
        let mut routes = self.lock();
        if let Some(route) = routes.get(&peer)
            && route.try_send(message).is_err()
        {
            routes.remove(&peer);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<PeerId, SyncSender<Vec<u8>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
