//! Closes endpoints, each in a thread of its own, which is waited for up to a limit.
//!
//! `fi_close` of an endpoint waits for all that is posted there, on EFA's provider without any limit: 2.1's repeats a
//! message for which the target has no receive as long as the target lives, also while it closes
//! (`efa_rdm_ep_wait_send`). Who closes a fabric must not hang for that. So past the limit the thread, the *reaper*,
//! goes on alone, and the device is given up: the provider holds the domain's lock meanwhile, and `gate.rs` puts
//! deregistrations off. All that the device may still touch lives as long as the endpoint does: the reaper holds the domain and its
//! registrations, with their memory.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::domain::Shared;
use crate::fabric_endpoint::FabricEndpoint;
use crate::objects::Device;
use crate::region::Registered;

/// How long an endpoint is waited for. Closing takes milliseconds where nothing is stuck.
const LIMIT: Duration = Duration::from_secs(3);
/// And how long while another endpoint of this process is overdue: of 32 cards one is waited for.
const LIMIT_BEHIND: Duration = Duration::from_millis(100);

/// Endpoints of this process that are overdue.
static OVERDUE: AtomicUsize = AtomicUsize::new(0);

/// The registrations of a domain that are alive.
#[derive(Default)]
pub(crate) struct Registrations(Mutex<Vec<Weak<Registered>>>);

impl Registrations {
    pub(crate) fn add(&self, region: &Arc<Registered>) {
        let mut all = self.lock();
        if all.len() == all.capacity() {
            all.retain(|region| region.strong_count() > 0);
        }
        all.push(Arc::downgrade(region));
    }

    fn all(&self) -> Vec<Arc<Registered>> {
        self.lock().iter().filter_map(Weak::upgrade).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Registered>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An endpoint that is being closed, and what the device may touch until it is.
struct Closing {
    endpoint: Box<FabricEndpoint>,
    regions: Vec<Arc<Registered>>,
    shared: Arc<Shared>,
}

impl Closing {
    /// Closes the endpoint, says so, then lets go of the rest, which the gate lets through by then.
    fn run(self, done: Done) {
        let Self { endpoint, regions, shared } = self;
        let addresses = Arc::clone(&endpoint.queues.addresses);
        let guard = addresses.guard();
        drop(endpoint);
        drop(guard);
        drop(done);
        drop((regions, shared));
    }
}

/// How far a reaper has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Closing,
    /// The limit has passed.
    Overdue,
    Closed,
}

struct Progress {
    state: Mutex<State>,
    ended: Condvar,
    device: Arc<Device>,
}

impl Progress {
    /// Of an endpoint that nobody has begun to close.
    fn begin(device: &Arc<Device>) -> Arc<Self> {
        let (state, device) = (Mutex::new(State::Closing), Arc::clone(device));
        Arc::new(Self { state, ended: Condvar::new(), device })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the end up to `limit`; whether it came. If not, the endpoint is overdue from now on.
    fn wait(&self, limit: Duration) -> bool {
        let is_closing = |state: &mut State| *state == State::Closing;
        let waited = self.ended.wait_timeout_while(self.lock(), limit, is_closing);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *state == State::Closed {
            return true;
        }
        *state = State::Overdue;
        OVERDUE.fetch_add(1, Ordering::Relaxed);
        self.device.gate.shut();
        false
    }
}

/// The reaper's; dropped when the endpoint is closed, or where a memory owner panicked.
struct Done(Arc<Progress>);

impl Drop for Done {
    fn drop(&mut self) {
        if std::mem::replace(&mut *self.0.lock(), State::Closed) == State::Overdue {
            OVERDUE.fetch_sub(1, Ordering::Relaxed);
            tracing::info!("libfabric has closed an endpoint that was overdue");
            self.0.device.gate.open();
        }
        self.0.ended.notify_all();
    }
}

/// Closes `endpoint` of a domain; whether that is done. If not, the device is lost: nothing more is opened on it until
/// the reaper has ended.
///
/// `is_lost` says that more may be posted there than is known.
#[must_use]
pub(crate) fn close(shared: &Arc<Shared>, endpoint: Box<FabricEndpoint>, is_lost: bool) -> bool {
    let device = shared.device.info.domain_name();
    if (is_lost || endpoint.posted.requests > 0) && endpoint.queues.close_may_hang() {
        // No thread polls the endpoint any more, so the provider does nothing there either; and the card touches
        // memory by its registration only, which ends with the memory.
        tracing::warn!(device, "libfabric would wait forever for the endpoint to end: it is left as it is");
        shared.left_open.fetch_add(1, Ordering::Relaxed);
        std::mem::forget(endpoint);
        return true;
    }
    let closing = Closing { endpoint, regions: shared.registrations.all(), shared: Arc::clone(shared) };
    let limit = match OVERDUE.load(Ordering::Relaxed) {
        0 => LIMIT,
        _ if shared.device.is_given_up() => Duration::ZERO,
        _ => LIMIT_BEHIND,
    };
    let progress = Progress::begin(&shared.device);
    let done = Done(Arc::clone(&progress));
    let reaper = std::thread::Builder::new().name("mr-reaper".into()).spawn(move || closing.run(done));
    if let Err(why) = &reaper {
        // Then it was closed in this thread, as it was dropped.
        tracing::warn!(device, %why, "no thread to close the endpoint in");
    }
    if progress.wait(limit) {
        drop(reaper.map(JoinHandle::join));
        return true;
    }
    tracing::warn!(
        device,
        ?limit,
        "libfabric does not close the endpoint: a thread goes on with it, and keeps the memory registered there"
    );
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::offers;

    #[test]
    fn who_is_overdue_is_counted_until_the_end() {
        let device = match offers("tcp", Some("127.0.0.1")) {
            Ok(offers) => Device::open(&offers[0]).unwrap(),
            Err(why) => return eprintln!("skipped: {why}"),
        };
        let count = || device.gate.overdue();
        let progress = Progress::begin(&device);
        let done = Done(Arc::clone(&progress));
        assert!(!progress.wait(Duration::ZERO));
        assert_eq!(count(), 1);
        drop(done);
        assert_eq!(count(), 0);
        let progress = Progress::begin(&device);
        drop(Done(Arc::clone(&progress)));
        assert!(progress.wait(Duration::ZERO) && count() == 0);
    }
}
