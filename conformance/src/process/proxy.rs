//! A TCP proxy that can cut a connection or stop forwarding.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::check::TestResult;

/// Forwards a TCP connection until [`Proxy::cut`] or [`Proxy::stop_forwarding`].
pub(crate) struct Proxy {
    address: String,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    silent: Arc<AtomicBool>,
}

impl Proxy {
    /// Starts a proxy that forwards its first connection to `target`.
    #[track_caller]
    pub(crate) fn to(target: &str) -> TestResult<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?.to_string();
        let streams = Arc::<Mutex<Vec<TcpStream>>>::default();
        let silent = Arc::new(AtomicBool::new(false));
        let (target, all_streams, is_silent) = (target.to_owned(), Arc::clone(&streams), Arc::clone(&silent));
        std::thread::spawn(move || -> std::io::Result<()> {
            let (near, _) = listener.accept()?;
            let far = TcpStream::connect(target)?;
            if let Ok(mut streams) = all_streams.lock() {
                streams.extend([near.try_clone()?, far.try_clone()?]);
            }
            for (from, to) in [(near.try_clone()?, far.try_clone()?), (far, near)] {
                let is_silent = Arc::clone(&is_silent);
                std::thread::spawn(move || forward(from, to, &is_silent));
            }
            Ok(())
        });
        Ok(Self { address, streams, silent })
    }

    /// The address of the proxy.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Closes the connections on both sides.
    pub(crate) fn cut(&self) {
        for stream in self.streams.lock().iter().flat_map(|streams| streams.iter()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Stops forwarding, and leaves both connections open.
    pub(crate) fn stop_forwarding(&self) {
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
