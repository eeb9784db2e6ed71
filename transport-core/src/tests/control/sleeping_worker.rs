//! Small operations that are submitted while the worker sleeps.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;

use super::*;
use crate::{Access, Region, RemoteRegion};

/// A fabric with a worker, whose endpoint calls `on_post` and accepts nothing, and a peer to write to.
struct Writer {
    peer: Peer,
    fabric: Fabric,
    src: Region,
    dst: RemoteRegion,
    _target: (Fabric, Region, Listener, Peer),
}

/// Bytes of the regions. Large operations go to the worker.
const LEN: usize = 1 << 20;

impl Writer {
    fn open(on_post: impl Fn() + Send + Sync + 'static) -> Self {
        let null = null::Null {
            polls: Some(Arc::default()),
            on_post: Some(Arc::new(on_post)),
            ..Default::default()
        };
        let fabric =
            FabricBuilder::new().transport(TransportConfig::new("null", Arc::new(null))).open().unwrap();
        let (server, listener, address) = listening();
        let region = server.alloc(LEN, Access::all()).unwrap();
        server.publish("region", &region).unwrap();
        let peer = wait(fabric.connect(&address)).unwrap();
        let here = wait(listener.accept()).unwrap();
        let dst = wait(peer.region("region")).unwrap();
        let src = fabric.alloc(LEN, Access::LOCAL).unwrap();
        Self { fabric, peer, src, dst, _target: (server, region, listener, here) }
    }

    /// Writes `len` bytes each time the worker sleeps, until `is_done`. The worker may be about to wake each time.
    fn write_until(&self, len: usize, is_done: impl Fn() -> bool) {
        let mut limit = Limit::of(HANG);
        while !is_done() {
            assert!(!limit.is_over(), "no write went the way it should");
            let link = self.peer.0.links.iter().next().unwrap();
            if link.engine.parked.load(Ordering::Acquire) {
                let op = self.peer.write(&self.src, 0..len, &self.dst, 0).unwrap();
                let _ = wait(op.cancel());
            }
            std::thread::yield_now();
        }
    }
}

#[test]
fn small_operations_are_posted_by_the_calling_thread_and_large_ones_by_the_worker() {
    let posted_by: Arc<Mutex<Vec<ThreadId>>> = Arc::default();
    let threads = Arc::clone(&posted_by);
    let writer = Writer::open(move || threads.lock().unwrap().push(std::thread::current().id()));
    let this = std::thread::current().id();
    writer.write_until(8, || posted_by.lock().unwrap().contains(&this));
    posted_by.lock().unwrap().clear();
    writer.write_until(LEN, || !posted_by.lock().unwrap().is_empty());
    assert!(!posted_by.lock().unwrap().contains(&this));
}

#[test]
fn a_panic_of_the_calling_thread_ends_what_waits() {
    let panics = Arc::new(AtomicBool::new(false));
    let this = std::thread::current().id();
    let is_this = Arc::clone(&panics);
    let writer = Writer::open(move || {
        if std::thread::current().id() == this && is_this.load(Ordering::Relaxed) {
            std::panic::resume_unwind(Box::new("as the test wants"));
        }
    });
    let receive = writer.fabric.recv(&writer.src, 0..8).unwrap();
    panics.store(true, Ordering::Relaxed);
    let panicked = catch_unwind(AssertUnwindSafe(|| writer.write_until(8, || false))).unwrap_err();
    assert_eq!(panicked.downcast_ref(), Some(&"as the test wants"));
    assert_eq!(wait(receive).unwrap_err().kind(), ErrorKind::Closed);
}

/// The user's code that runs there, such as the `Drop` of a memory, may do so.
#[test]
fn the_calling_thread_may_close_the_fabric_meanwhile() {
    let fabric: Arc<Mutex<Option<Fabric>>> = Arc::default();
    let to_close = Arc::clone(&fabric);
    let this = std::thread::current().id();
    let writer = Writer::open(move || {
        if std::thread::current().id() == this
            && let Some(fabric) = to_close.lock().unwrap().take()
        {
            fabric.close();
        }
    });
    let receive = writer.fabric.recv(&writer.src, 0..8).unwrap();
    *fabric.lock().unwrap() = Some(writer.fabric.clone());
    writer.write_until(8, || fabric.lock().unwrap().is_none());
    assert_eq!(wait(receive).unwrap_err().kind(), ErrorKind::Closed);
}
