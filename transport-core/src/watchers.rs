//! Who waits for what: the wakers of futures that come and go.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::task::Waker;

/// The wakers of futures that wait for something with key `K`. Its owner keeps it
/// under a lock.
///
/// A future keeps an `Option<u64>`, its id, `None` at first. It calls
/// [`watch`](Self::watch) whenever it is pending and [`forget`](Self::forget) when it
/// is done or dropped, always with the same key; so nothing of it stays behind.
///
/// A waker may run any code when it is woken or dropped, even drop other futures that
/// wait here. So none is woken or dropped in here: whatever comes out, let go of the
/// lock first.
pub(crate) struct Watchers<K> {
    /// In order of keys, then of ids.
    wakers: BTreeMap<(K, u64), Waker>,
    next: u64,
}

impl<K> Default for Watchers<K> {
    fn default() -> Self {
        Self { wakers: BTreeMap::new(), next: 0 }
    }
}

impl<K: Copy + Ord> Watchers<K> {
    /// Has `waker` woken once `key` is due, instead of what this id left before.
    /// Returns a waker to drop after unlocking.
    #[must_use = "to be dropped after unlocking"]
    pub fn watch(&mut self, id: &mut Option<u64>, key: K, waker: &Waker) -> Option<Waker> {
        let id = *id.get_or_insert_with(|| {
            self.next += 1;
            self.next
        });
        match self.wakers.entry((key, id)) {
            Entry::Occupied(entry) if entry.get().will_wake(waker) => None,
            Entry::Occupied(mut entry) => Some(entry.insert(waker.clone())),
            Entry::Vacant(entry) => {
                entry.insert(waker.clone());
                None
            }
        }
    }

    /// Takes back what this id left, if it is still here. Returns a waker to drop
    /// after unlocking.
    #[must_use = "to be dropped after unlocking"]
    pub fn forget(&mut self, id: &mut Option<u64>, key: K) -> Option<Waker> {
        self.wakers.remove(&(key, id.take()?))
    }

    /// Whether nobody waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.wakers.is_empty()
    }

    /// Takes out whoever waits for one of `keys`. Costs nothing if nobody waits.
    pub fn due(&mut self, keys: RangeInclusive<K>) -> Due {
        if self.wakers.is_empty() {
            return Due(Vec::new());
        }
        let range = (*keys.start(), 0)..=(*keys.end(), u64::MAX);
        let due: Vec<_> = self.wakers.range(range).map(|(at, _)| *at).collect();
        Due(due.iter().filter_map(|at| self.wakers.remove(at)).collect())
    }

    /// The least key that somebody waits for.
    pub fn first(&self) -> Option<K> {
        self.wakers.first_key_value().map(|((key, _), _)| *key)
    }

    /// Takes out everyone.
    pub fn all(&mut self) -> Due {
        Due(std::mem::take(&mut self.wakers).into_values().collect())
    }
}

/// Wakers to wake after unlocking.
#[must_use = "to be woken after unlocking"]
pub(crate) struct Due(Vec<Waker>);

impl Due {
    /// Wakes them, those that came first per key first; says how many. Where one panics the others are woken all the
    /// same, as nobody else would, and then the panic goes on.
    pub fn wake(self) -> usize {
        let count = self.0.len();
        let mut panicked = None;
        for waker in self.0 {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| waker.wake())) {
                panicked = Some(panic);
            }
        }
        if let Some(panic) = panicked {
            resume_unwind(panic);
        }
        count
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Poll, Wake};

    use super::*;
    use crate::{ErrorKind, Peer};

    /// A waker that counts how often it is woken.
    #[derive(Default)]
    pub struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Woken {
        /// How often it was woken since the last look.
        pub fn take(&self) -> usize {
            self.0.swap(0, Ordering::Relaxed)
        }

        /// Wakers of it that are kept somewhere.
        pub fn kept(self: &Arc<Self>) -> usize {
            Arc::strong_count(self) - 1
        }
    }

    /// Polls once, with `waker`.
    pub fn poll<F: Future + Unpin>(future: &mut F, waker: &Arc<Woken>) -> Poll<F::Output> {
        let waker = Waker::from(Arc::clone(waker));
        Pin::new(future).poll(&mut Context::from_waker(&waker))
    }

    /// A waker that drops the future it holds, as a task does that is woken after its
    /// executor is gone.
    pub struct Dropping<F>(Mutex<Option<F>>);

    impl<F: Future + Unpin + Send + 'static> Dropping<F> {
        /// Polls `future` once, then leaves it to its own waker.
        pub fn leave(mut future: F) -> Arc<Self> {
            let holder = Arc::new(Self(Mutex::new(None)));
            let waker = Waker::from(Arc::clone(&holder));
            assert!(Pin::new(&mut future).poll(&mut Context::from_waker(&waker)).is_pending());
            *holder.0.lock().unwrap() = Some(future);
            holder
        }

        /// Whether the future was dropped.
        pub fn is_done(&self) -> bool {
            self.0.lock().unwrap().is_none()
        }
    }

    impl<F: Send + 'static> Wake for Dropping<F> {
        fn wake(self: Arc<Self>) {
            let future = self.0.lock().unwrap().take();
            drop(future);
        }
    }

    fn waker() -> (Arc<Woken>, Waker) {
        let woken = Arc::<Woken>::default();
        (Arc::clone(&woken), Waker::from(woken))
    }

    #[test]
    fn wakes_those_due_and_no_others() {
        let mut watchers = Watchers::default();
        let woken: Vec<_> = [(1, 5), (2, 1), (2, 2), (2, 2), (2, 3), (3, 0)]
            .into_iter()
            .map(|key| {
                let (woken, waker) = waker();
                assert!(watchers.watch(&mut None, key, &waker).is_none());
                woken
            })
            .collect();
        let look = |due: Due| {
            due.wake();
            woken.iter().map(|woken| woken.take()).collect::<Vec<_>>()
        };
        assert_eq!(look(watchers.due((2, 0)..=(2, 2))), [0, 1, 1, 1, 0, 0]);
        assert_eq!(look(watchers.due((2, 0)..=(2, 2))), [0; 6]);
        assert_eq!(look(watchers.all()), [1, 0, 0, 0, 1, 1]);
        assert_eq!(look(watchers.due((0, 0)..=(9, 9))), [0; 6]);
    }

    #[test]
    fn one_id_has_one_waker_and_leaves_none() {
        let mut watchers = Watchers::default();
        let ((first, one), (second, two)) = (waker(), waker());
        let (mut id, mut other) = (None, None);
        assert!(watchers.watch(&mut id, (), &one).is_none());
        assert!(watchers.watch(&mut id, (), &one).is_none());
        assert_eq!((watchers.wakers.len(), first.kept()), (1, 2));
        assert!(watchers.watch(&mut id, (), &two).unwrap().will_wake(&one));
        assert!(watchers.watch(&mut other, (), &two).is_none());
        assert_ne!(id, other);
        assert!(watchers.forget(&mut id, ()).unwrap().will_wake(&two));
        assert!(watchers.forget(&mut id, ()).is_none());
        watchers.due(()..=()).wake();
        assert_eq!((first.take(), second.take()), (0, 1));
        // Woken, yet pending again: it comes back under its id.
        let before = other;
        assert!(watchers.watch(&mut other, (), &one).is_none());
        assert_eq!(other, before);
        assert!(watchers.forget(&mut other, ()).is_some());
        assert!(watchers.wakers.is_empty());
    }

    #[test]
    fn closed_resolves_and_leaves_nothing_behind() {
        let peer = Peer::alone();
        let (woken, dropped) = (Arc::<Woken>::default(), Arc::<Woken>::default());
        let mut closed = peer.closed();
        for _ in 0..100 {
            assert!(poll(&mut closed, &woken).is_pending());
            assert!(poll(&mut peer.closed(), &dropped).is_pending());
        }
        assert_eq!((woken.kept(), dropped.kept()), (1, 0));
        let dropping = Dropping::leave(peer.closed());
        peer.disconnect();
        assert!(dropping.is_done());
        assert_eq!((woken.take(), woken.kept(), dropped.take()), (1, 0, 0));
        assert!(matches!(poll(&mut closed, &woken), Poll::Ready(e) if e.kind() == ErrorKind::Closed));
    }
}
