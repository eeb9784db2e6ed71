//! The send queues of all queue pairs.

use multirail_spi::{PeerSlot, Status};

use crate::posted::PostedChains;

/// The posted requests of a queue pair, and the slot of its peer.
pub(crate) struct SendQueue {
    pub(crate) posted: PostedChains,
    pub(crate) slot: PeerSlot,
    /// The status of the first failed request. The requests behind it are flushed for the same reason.
    pub(crate) cause: Option<Status>,
}

/// The send queues, sorted by the numbers of their queue pairs. Each request and each completion looks one up. Among a
/// few thousand, a binary search takes fewer steps than hashing the number.
#[derive(Default)]
pub(crate) struct SendQueues(Vec<(u32, SendQueue)>);

impl SendQueues {
    #[inline]
    fn place(&self, number: u32) -> Result<usize, usize> {
        self.0.binary_search_by_key(&number, |(of, _)| *of)
    }

    #[inline]
    pub(crate) fn get(&self, number: u32) -> Option<&SendQueue> {
        self.place(number).ok().map(|place| &self.0[place].1)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut SendQueue> {
        self.place(number).ok().map(|place| &mut self.0[place].1)
    }

    /// Adds an empty send queue of `slot`, or replaces the one of that number.
    pub(crate) fn insert(&mut self, number: u32, slot: PeerSlot) {
        let queue = SendQueue { posted: PostedChains::default(), slot, cause: None };
        match self.place(number) {
            Ok(place) => self.0[place].1 = queue,
            Err(place) => self.0.insert(place, (number, queue)),
        }
    }

    pub(crate) fn remove(&mut self, number: u32) {
        if let Ok(place) = self.place(number) {
            self.0.remove(place);
        }
    }

    pub(crate) fn all(&mut self) -> impl Iterator<Item = &mut SendQueue> {
        self.0.iter_mut().map(|(_, queue)| queue)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_found_by_its_number() {
        let mut send_queues = SendQueues::default();
        [7, 3, 9, 3].iter().zip(0..).for_each(|(number, slot)| send_queues.insert(*number, PeerSlot(slot)));
        send_queues.remove(7);
        send_queues.remove(8);
        let slots = [3, 7, 9].map(|number| send_queues.get(number).map(|queue| queue.slot.0));
        assert_eq!((slots, send_queues.all().count()), ([Some(3), None, Some(2)], 2));
        assert!(send_queues.get_mut(9).is_some() && send_queues.get_mut(1).is_none());
    }
}
