//! A TCP connection that can be cut, or go silent.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::check::Verdict;

/// Forwards connections until it is told not to.
pub(crate) struct Proxy {
    address: String,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    silent: Arc<AtomicBool>,
}

impl Proxy {
    /// Forwards the first connection to `target`.
    #[track_caller]
    pub(crate) fn to(target: &str) -> Verdict<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        let streams = Arc::<Mutex<Vec<TcpStream>>>::default();
        let silent = Arc::new(AtomicBool::new(false));
        let (target, kept, quiet) = (target.to_owned(), Arc::clone(&streams), Arc::clone(&silent));
        std::thread::spawn(move || -> std::io::Result<()> {
            let (near, _) = listener.accept()?;
            let far = TcpStream::connect(target)?;
            if let Ok(mut kept) = kept.lock() {
                kept.extend([near.try_clone()?, far.try_clone()?]);
            }
            for (from, to) in [(near.try_clone()?, far.try_clone()?), (far, near)] {
                let quiet = Arc::clone(&quiet);
                std::thread::spawn(move || forward(from, to, &quiet));
            }
            Ok(())
        });
        Ok(Self { address, streams, silent })
    }

    /// Where to connect.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Closes both connections.
    pub(crate) fn cut(&self) {
        for stream in self.streams.lock().iter().flat_map(|streams| streams.iter()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Forwards nothing any more, and closes nothing.
    pub(crate) fn fall_silent(&self) {
        self.silent.store(true, Ordering::Relaxed);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, silent: &AtomicBool) {
    let mut buffer = [0; 4096];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        if !silent.load(Ordering::Relaxed) && to.write_all(&buffer[..len]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}
