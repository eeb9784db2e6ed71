//! A backend that connects and registers, but moves no bytes.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

use crate::spi::*;
use crate::{Access, Error, ErrorKind, Memory, Result};

/// Counts the slots that are reserved and not given back.
#[derive(Default)]
pub(super) struct Null {
    pub reserved: Arc<AtomicU32>,
    /// What a renewal does. Without it, endpoints have no new addresses.
    pub renew: Option<Arc<dyn Fn() + Send + Sync>>,
    /// Counts polls of the endpoint, which sleeps until its worker is woken. Without it, the endpoint does not sleep.
    pub polls: Option<Arc<AtomicU32>>,
    /// Called by each post.
    pub on_post: Option<OnPost>,
}

pub(super) type OnPost = Arc<dyn Fn() + Send + Sync>;

impl Backend for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    fn probe(&self) -> Probe {
        Ok(vec![DeviceInfo {
            name: "null0".into(),
            about: "nothing".into(),
            link_bits_per_s: None,
            address: None,
            group: None,
        }])
    }

    fn open(&self, _: &DeviceInfo, _: &DomainSetup) -> Result<Arc<dyn Domain>> {
        let (slots, reserved) = (AtomicU32::new(0), Arc::clone(&self.reserved));
        let (renew, polls, on_post) = (self.renew.clone(), self.polls.clone(), self.on_post.clone());
        let capabilities = Capabilities::minimal();
        Ok(Arc::new(NullDomain { capabilities, slots, reserved, renew, polls, on_post }))
    }
}

struct NullDomain {
    capabilities: Capabilities,
    slots: AtomicU32,
    reserved: Arc<AtomicU32>,
    renew: Option<Arc<dyn Fn() + Send + Sync>>,
    polls: Option<Arc<AtomicU32>>,
    on_post: Option<OnPost>,
}

impl Domain for NullDomain {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn id(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }

    unsafe fn register(&self, memory: Arc<dyn Memory>, _: Access) -> Result<Arc<dyn MemoryRegion>> {
        Ok(Arc::new(NullRegion(memory.len() as u64)))
    }

    fn import(&self, _: PeerSlot, _: &RemoteKey, _: Duration) -> Result<Arc<dyn RemoteMemory>> {
        Ok(Arc::new(NullImport))
    }

    fn connector(&self) -> &dyn Connector {
        self
    }

    fn endpoint(&self, _: EndpointConfig) -> Result<Box<dyn Endpoint>> {
        let sleeps =
            |polls: &Arc<AtomicU32>| (Arc::clone(polls), UnixStream::pair().expect("a pair of sockets"));
        Ok(Box::new(NullEndpoint { sleeps: self.polls.as_ref().map(sleeps), on_post: self.on_post.clone() }))
    }
}

impl Connector for NullDomain {
    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.reserved.fetch_add(1, Ordering::Relaxed);
        Ok((PeerSlot(self.slots.fetch_add(1, Ordering::Relaxed)), b"null rail".to_vec()))
    }

    fn complete(&self, _: PeerSlot, offer: &[u8]) -> Result<()> {
        match offer {
            b"null rail" | b"raw rail" => Ok(()),
            b"panic" => panic!("as the test wants"),
            _ => Err(Error::new(ErrorKind::Unreachable, "connect", "an offer of another kind")),
        }
    }

    fn renew(&self, _: PeerSlot, offer: &[u8]) -> Result<Vec<u8>> {
        let still = || Error::new(ErrorKind::Protocol, "renew a connection", "endpoints do not move");
        self.renew.as_ref().ok_or_else(still)?();
        Ok(offer.to_vec())
    }

    fn disconnect(&self, _: PeerSlot) {
        self.reserved.fetch_sub(1, Ordering::Relaxed);
    }
}

struct NullRegion(u64);

impl MemoryRegion for NullRegion {
    fn lkey(&self) -> u64 {
        0
    }

    fn key(&self) -> RemoteKey {
        RemoteKey { base: 0, key: 0, len: self.0 }
    }

    fn lkey_outlives_revoke(&self) -> bool {
        true
    }

    fn revoke(&self) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }
}

struct NullImport;

impl RemoteMemory for NullImport {
    fn rkey(&self) -> u64 {
        0
    }

    fn base(&self) -> u64 {
        0
    }

    fn paths(&self, _: bool) -> Paths {
        Paths::RDMA
    }
}

struct NullEndpoint {
    /// The count of polls, and sockets that are never written to.
    sleeps: Option<(Arc<AtomicU32>, (UnixStream, UnixStream))>,
    on_post: Option<OnPost>,
}

impl Endpoint for NullEndpoint {
    unsafe fn post(&mut self, _: &Batch) -> PostResult {
        self.on_post.iter().for_each(|on_post| on_post());
        PostResult { accepted: 0, error: None }
    }

    unsafe fn post_recv(&mut self, _: &[ReceiveRequest]) -> PostResult {
        PostResult { accepted: 0, error: None }
    }

    fn poll(&mut self, _: &mut Completions) {
        self.sleeps.iter().for_each(|(polls, _)| _ = polls.fetch_add(1, Ordering::Relaxed));
    }

    fn arm(&mut self) -> Armed {
        self.sleeps.as_ref().map_or(Armed::Unsupported, |(_, (socket, _))| Armed::Fd(socket.as_raw_fd()))
    }

    fn abort(&mut self, _: PeerSlot) {}

    fn cancel_recv(&mut self, _: u64) -> bool {
        false
    }

    fn describe(&self, _: Status) -> String {
        String::new()
    }
}
