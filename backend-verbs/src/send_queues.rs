//! What is posted, by queue pair.

use multirail_spi::{PeerSlot, Status};

use crate::posted::PostedChains;

/// What is posted to a queue pair, and whose it is.
pub(crate) struct SendQueue {
    pub(crate) posted: PostedChains,
    pub(crate) slot: PeerSlot,
    /// Why it failed: what is flushed behind that did, too.
    pub(crate) cause: Option<Status>,
}

/// SendQueues by the numbers of their queue pairs, in order. Each request and each completion looks one up:
/// among a few thousand that takes fewer steps than to hash the number.
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

    /// An empty one of `slot`'s, in place of one of that number.
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
