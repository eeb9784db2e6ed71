//! Closes endpoints. Each is closed by a thread of its own, the *reaper*, for which the caller waits up to a limit.
//!
//! `fi_close` of an endpoint waits until all posted requests have ended. EFA's provider waits without limit: while it
//! closes, libfabric 2.1 repeats a message for which the target has no receive, as long as the target lives
//! (`efa_rdm_ep_wait_send`). Closing a fabric must not hang for that. So after the limit the caller continues without
//! the reaper. It gives the device up, because the provider holds the domain's lock until the endpoint is closed. Until
//! then `deregistrations.rs` delays deregistrations. Everything that the device may still touch lives as long as the
//! endpoint, because the reaper holds the domain and its registrations, with their memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::domain::DomainState;
use crate::fabric_endpoint::FabricEndpoint;
use crate::objects::Device;
use crate::region::RegisteredRegion;

/// How long the caller waits for a reaper. Closing takes milliseconds if no request is stuck.
const LIMIT: Duration = Duration::from_secs(3);
/// How long the caller waits while another endpoint of this process is overdue. So a process with 32 cards waits
/// `LIMIT` only once. If the device itself is given up, the caller does not wait.
const LIMIT_IF_OVERDUE: Duration = Duration::from_millis(100);

/// The number of overdue endpoints of this process.
static OVERDUE: AtomicUsize = AtomicUsize::new(0);

/// The live registrations of a domain.
#[derive(Default)]
pub(crate) struct Registrations(Mutex<Vec<Weak<RegisteredRegion>>>);

impl Registrations {
    pub(crate) fn add(&self, region: &Arc<RegisteredRegion>) {
        let mut all = self.lock();
        if all.len() == all.capacity() {
            all.retain(|region| region.strong_count() > 0);
        }
        all.push(Arc::downgrade(region));
    }

    fn all(&self) -> Vec<Arc<RegisteredRegion>> {
        self.lock().iter().filter_map(Weak::upgrade).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<RegisteredRegion>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An endpoint that is to be closed, and everything that the device may touch until then.
struct Closing {
    endpoint: Box<FabricEndpoint>,
    regions: Vec<Arc<RegisteredRegion>>,
    domain: Arc<DomainState>,
}

impl Closing {
    /// Closes the endpoint, announces that, and then drops the rest. By then deregistrations are not delayed any more.
    fn run(self, closed: ClosedGuard) {
        let Self { endpoint, regions, domain } = self;
        let number = endpoint.number;
        let av = Arc::clone(&endpoint.queues.av);
        let guard = av.lock_for_endpoint();
        drop(endpoint);
        drop(guard);
        // Also if the caller has given up waiting: a fence waits for this.
        domain.peers.endpoint_closed(number);
        drop(closed);
        drop((regions, domain));
    }
}

/// The state of an endpoint that a reaper closes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CloseState {
    Closing,
    /// The endpoint is not closed, and the limit has passed.
    Overdue,
    Closed,
}

/// How far a reaper has got, shared with its caller.
struct SharedCloseState {
    state: Mutex<CloseState>,
    on_closed: Condvar,
    device: Arc<Device>,
}

impl SharedCloseState {
    /// The state before the reaper of an endpoint of `device` has begun.
    fn new(device: &Arc<Device>) -> Arc<Self> {
        let (state, device) = (Mutex::new(CloseState::Closing), Arc::clone(device));
        Arc::new(Self { state, on_closed: Condvar::new(), device })
    }

    fn lock(&self) -> MutexGuard<'_, CloseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the endpoint is closed, for at most `limit`. Returns whether it is closed. If not, it is *overdue*
    /// from now on.
    fn wait(&self, limit: Duration) -> bool {
        let is_closing = |state: &mut CloseState| *state == CloseState::Closing;
        let waited = self.on_closed.wait_timeout_while(self.lock(), limit, is_closing);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *state == CloseState::Closed {
            return true;
        }
        *state = CloseState::Overdue;
        OVERDUE.fetch_add(1, Ordering::Relaxed);
        self.device.deregistrations.hold();
        false
    }
}

/// The reaper drops this once it has closed the endpoint, and also if closing panics: the caller must not wait for a
/// reaper that has ended.
struct ClosedGuard(Arc<SharedCloseState>);

impl Drop for ClosedGuard {
    fn drop(&mut self) {
        if std::mem::replace(&mut *self.0.lock(), CloseState::Closed) == CloseState::Overdue {
            OVERDUE.fetch_sub(1, Ordering::Relaxed);
            tracing::info!("libfabric has closed an endpoint that was overdue");
            self.0.device.deregistrations.release();
        }
        self.0.on_closed.notify_all();
    }
}

/// Closes an endpoint of `domain`, or leaves it open for ever if closing would wait for ever
/// ([`Queues::close_may_hang`](crate::fabric_endpoint::Queues::close_may_hang)). Returns true if either is done.
/// Returns false if a reaper still closes the endpoint. Then the device is given up: the backend opens nothing on it
/// until the reaper has ended.
///
/// No byte of a peer lands over an endpoint that is left open. libfabric 1.17 has no thread for an endpoint. It
/// receives packets, copies their bytes and answers them only within calls on the endpoint, its completion queue and
/// its counter (`rxr_ep_progress_internal`), which no other endpoint shares. Nobody makes such a call any more, not
/// even when the fabric is closed. Packets stay in the provider's own buffers, which live as long as the process.
/// Reads that the provider has asked the card for are an exception
/// ([`Peers::card_may_write`](crate::peers::Peers::card_may_write)): fences wait for them. What this side has posted
/// there never ends: the caller reports it as failed.
///
/// `may_have_requests` is true if the provider may have requests that `endpoint.posted` does not count (any more).
#[must_use]
pub(crate) fn close(
    domain: &Arc<DomainState>,
    endpoint: Box<FabricEndpoint>,
    may_have_requests: bool,
) -> bool {
    let (device, number) = (domain.device.info.domain_name(), endpoint.number);
    if (may_have_requests || endpoint.posted.requests > 0) && endpoint.queues.close_may_hang() {
        // The card may still read memory, to send packets that the provider has given to it. It does so by a
        // registration that is closed before the memory is freed.
        tracing::warn!(
            device,
            "libfabric would wait forever to close the endpoint: the endpoint stays open, and nothing uses it"
        );
        domain.left_open.fetch_add(1, Ordering::Relaxed);
        std::mem::forget(endpoint);
        domain.peers.endpoint_left_open(number, domain.setup.clock.now());
        return true;
    }
    let closing = Closing { endpoint, regions: domain.registrations.all(), domain: Arc::clone(domain) };
    let limit = match OVERDUE.load(Ordering::Relaxed) {
        0 => LIMIT,
        _ if domain.device.is_given_up() => Duration::ZERO,
        _ => LIMIT_IF_OVERDUE,
    };
    let shared = SharedCloseState::new(&domain.device);
    let guard = ClosedGuard(Arc::clone(&shared));
    let reaper = std::thread::Builder::new().name("mr-reaper".into()).spawn(move || closing.run(guard));
    if let Err(why) = &reaper {
        // Dropping `closing` has closed the endpoint in this thread.
        domain.peers.endpoint_closed(number);
        tracing::warn!(device, %why, "no thread could be started to close the endpoint");
    }
    if shared.wait(limit) {
        drop(reaper.map(JoinHandle::join));
        return true;
    }
    tracing::warn!(
        device,
        ?limit,
        "libfabric does not close the endpoint: a thread continues to wait, and keeps the registered memory"
    );
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::find_infos;

    #[test]
    fn an_overdue_endpoint_is_counted_until_it_is_closed() {
        let device = match find_infos("tcp", Some("127.0.0.1")) {
            Ok(infos) => Device::open(&infos[0]).unwrap(),
            Err(why) => return eprintln!("skipped: {why}"),
        };
        let count = || device.deregistrations.overdue_endpoints();
        let shared = SharedCloseState::new(&device);
        let guard = ClosedGuard(Arc::clone(&shared));
        assert!(!shared.wait(Duration::ZERO));
        assert_eq!(count(), 1);
        drop(guard);
        assert_eq!(count(), 0);
        let shared = SharedCloseState::new(&device);
        drop(ClosedGuard(Arc::clone(&shared)));
        assert!(shared.wait(Duration::ZERO) && count() == 0);
    }
}
