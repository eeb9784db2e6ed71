//! The wakers of futures that wait for the same kind of event.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::task::Waker;

/// The wakers of futures, each with a key `K` that says what the future waits for. The owner keeps the set behind a
/// lock.
///
/// A future keeps an id of type `Option<u64>`, `None` at first. It calls [`register`](Self::register) whenever it is
/// pending, and [`unregister`](Self::unregister) when it is done or dropped, always with the same key. So it leaves
/// nothing in the set.
///
/// Waking or dropping a waker may run any code, even code that drops other futures of the same set. So the methods
/// never wake and never drop a waker: they return it. The caller unlocks the set first.
pub struct WakerSet<K> {
    /// In the order of keys, then of ids.
    wakers: BTreeMap<(K, u64), Waker>,
    next: u64,
}

impl<K> Default for WakerSet<K> {
    fn default() -> Self {
        Self { wakers: BTreeMap::new(), next: 0 }
    }
}

impl<K: Copy + Ord> WakerSet<K> {
    /// Sets the waker of a future. Returns the previous waker if it is another one; drop it after unlocking.
    #[must_use = "to be dropped after unlocking"]
    pub fn register(&mut self, id: &mut Option<u64>, key: K, waker: &Waker) -> Option<Waker> {
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

    /// Removes the waker of a future, if it is still in the set, and returns it; drop it after unlocking.
    #[must_use = "to be dropped after unlocking"]
    pub fn unregister(&mut self, id: &mut Option<u64>, key: K) -> Option<Waker> {
        self.wakers.remove(&(key, id.take()?))
    }

    /// Whether no future waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.wakers.is_empty()
    }

    /// Removes the wakers whose key is one of `keys`. Does not allocate if the set is empty.
    pub fn take_range(&mut self, keys: RangeInclusive<K>) -> TakenWakers {
        if self.wakers.is_empty() {
            return TakenWakers(Vec::new());
        }
        let range = (*keys.start(), 0)..=(*keys.end(), u64::MAX);
        let taken: Vec<_> = self.wakers.range(range).map(|(entry, _)| *entry).collect();
        TakenWakers(taken.iter().filter_map(|entry| self.wakers.remove(entry)).collect())
    }

    /// The least key in the set.
    pub fn first_key(&self) -> Option<K> {
        self.wakers.first_key_value().map(|((key, _), _)| *key)
    }

    /// Removes all wakers.
    #[inline]
    pub fn take_all(&mut self) -> TakenWakers {
        if self.wakers.is_empty() {
            return TakenWakers(Vec::new());
        }
        TakenWakers(std::mem::take(&mut self.wakers).into_values().collect())
    }
}

/// Wakers that were removed from a [`WakerSet`]. Wake them after unlocking the set.
#[must_use = "to be woken after unlocking"]
pub struct TakenWakers(Vec<Waker>);

impl TakenWakers {
    /// Wakes all wakers, in the order of their keys and then of their registration. Returns their number. If a waker
    /// panics, the others are woken all the same, as nothing else would wake them; then the panic continues.
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
mod tests {
    use std::sync::Arc;

    use limit::Woken;

    use super::*;

    fn waker() -> (Arc<Woken>, Waker) {
        let woken = Arc::<Woken>::default();
        (Arc::clone(&woken), Waker::from(woken))
    }

    #[test]
    fn takes_the_wakers_in_the_range_and_no_others() {
        let mut set = WakerSet::default();
        let woken: Vec<_> = [(1, 5), (2, 1), (2, 2), (2, 2), (2, 3), (3, 0)]
            .into_iter()
            .map(|key| {
                let (woken, waker) = waker();
                assert!(set.register(&mut None, key, &waker).is_none());
                woken
            })
            .collect();
        let look = |taken: TakenWakers| {
            taken.wake();
            woken.iter().map(|woken| woken.take()).collect::<Vec<_>>()
        };
        assert_eq!(look(set.take_range((2, 0)..=(2, 2))), [0, 1, 1, 1, 0, 0]);
        assert_eq!(look(set.take_range((2, 0)..=(2, 2))), [0; 6]);
        assert_eq!(look(set.take_all()), [1, 0, 0, 0, 1, 1]);
        assert_eq!(look(set.take_range((0, 0)..=(9, 9))), [0; 6]);
    }

    #[test]
    fn one_id_has_one_waker_and_leaves_none() {
        let mut set = WakerSet::default();
        let ((first, one), (second, two)) = (waker(), waker());
        let (mut id, mut other) = (None, None);
        assert!(set.register(&mut id, (), &one).is_none());
        assert!(set.register(&mut id, (), &one).is_none());
        assert_eq!((set.wakers.len(), first.kept()), (1, 2));
        assert!(set.register(&mut id, (), &two).unwrap().will_wake(&one));
        assert!(set.register(&mut other, (), &two).is_none());
        assert_ne!(id, other);
        assert!(set.unregister(&mut id, ()).unwrap().will_wake(&two));
        assert!(set.unregister(&mut id, ()).is_none());
        set.take_range(()..=()).wake();
        assert_eq!((first.take(), second.take()), (0, 1));
        // A future that was woken and is pending again registers under the same id.
        let before = other;
        assert!(set.register(&mut other, (), &one).is_none());
        assert_eq!(other, before);
        assert!(set.unregister(&mut other, ()).is_some());
        assert!(set.wakers.is_empty());
    }
}
