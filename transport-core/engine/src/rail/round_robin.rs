//! The order in which one rail serves its operations: round robin over peers, and over the operations of each peer.

use std::collections::VecDeque;

/// The operations that still have pieces to post on one rail.
#[derive(Debug, Default)]
pub(crate) struct RoundRobin {
    /// The links with a queued operation that are not paused, the next one first.
    links: VecDeque<u32>,
    /// The operations of each link, by link index, the next one first.
    queues: Vec<VecDeque<u32>>,
    /// Operations in all queues.
    len: usize,
    /// Links that the rail skips until their peers respond.
    paused: Vec<u32>,
}

impl RoundRobin {
    /// Queues an operation behind the other operations of its link.
    pub fn push(&mut self, link: u32, op: u32) {
        let queue = link as usize;
        if self.queues.len() <= queue {
            self.queues.resize_with(queue + 1, VecDeque::new);
        }
        if self.queues[queue].is_empty() && !self.is_paused(link) {
            self.links.push_back(link);
        }
        self.queues[queue].push_back(op);
        self.len += 1;
    }

    /// Whether the rail skips a link, because its peer does not respond: its requests were evicted from the send
    /// window.
    #[inline]
    pub fn is_paused(&self, link: u32) -> bool {
        !self.paused.is_empty() && self.paused.contains(&link)
    }

    /// Skips a link until [`RoundRobin::resume`].
    pub fn pause(&mut self, link: u32) {
        if !self.is_paused(link) {
            self.paused.push(link);
            remove(&mut self.links, link);
        }
    }

    /// Serves a link again that was paused.
    pub fn resume(&mut self, link: u32) {
        let Some(position) = self.paused.iter().position(|paused| *paused == link) else { return };
        self.paused.swap_remove(position);
        if self.queues.get(link as usize).is_some_and(|queue| !queue.is_empty()) {
            self.links.push_back(link);
        }
    }

    /// Returns true if no operation is queued and no link is paused: a new request may be posted at once.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.len == 0 && self.paused.is_empty()
    }

    /// The number of queued operations.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The operation that the rail serves next.
    #[inline]
    pub fn front(&self) -> Option<u32> {
        let link = *self.links.front()?;
        self.queues[link as usize].front().copied()
    }

    /// Moves the front operation behind the other operations of its link, and its link behind the other links.
    #[inline]
    pub fn rotate(&mut self) {
        let Some(link) = self.links.pop_front() else { return };
        let queue = &mut self.queues[link as usize];
        queue.rotate_left(usize::from(queue.len() > 1));
        self.links.push_back(link);
    }

    /// Moves an operation and its link to the front.
    pub fn move_to_front(&mut self, link: u32, op: u32) {
        let Some(queue) = self.queues.get_mut(link as usize) else { return };
        if remove(queue, op) {
            queue.push_front(op);
        }
        if remove(&mut self.links, link) {
            self.links.push_front(link);
        }
    }

    /// Moves an operation and its link to the back.
    pub fn move_to_back(&mut self, link: u32, op: u32) {
        let Some(queue) = self.queues.get_mut(link as usize) else { return };
        if remove(queue, op) {
            queue.push_back(op);
        }
        if remove(&mut self.links, link) {
            self.links.push_back(link);
        }
    }

    /// Removes all operations, and serves all links again.
    #[cold]
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Removes an operation, wherever it is.
    #[cold]
    pub fn remove(&mut self, link: u32, op: u32) {
        let Some(queue) = self.queues.get_mut(link as usize) else { return };
        if remove(queue, op) {
            self.len -= 1;
            if queue.is_empty() {
                remove(&mut self.links, link);
            }
        }
    }

    /// Removes the front operation.
    pub fn pop(&mut self) {
        let Some(link) = self.links.pop_front() else { return };
        let queue = &mut self.queues[link as usize];
        self.len -= usize::from(queue.pop_front().is_some());
        if !queue.is_empty() {
            self.links.push_back(link);
        }
    }
}

/// Removes `value`; returns whether it was there. Searches from the back, as `rotate` has just moved it there.
fn remove(queue: &mut VecDeque<u32>, value: u32) -> bool {
    let position = queue.iter().rposition(|queued| *queued == value);
    position.and_then(|position| queue.remove(position)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_share_equally_whatever_their_number_of_operations() {
        let mut queue = RoundRobin::default();
        (0..10).for_each(|op| queue.push(0, op));
        queue.push(1, 100);
        let mut order = Vec::new();
        for _ in 0..6 {
            order.extend(queue.front());
            queue.rotate();
        }
        assert_eq!(order, [0, 100, 1, 100, 2, 100]);
    }

    #[test]
    fn an_operation_moved_to_the_back_lets_the_others_go_first() {
        let mut queue = RoundRobin::default();
        [(0, 1), (0, 2), (1, 3), (2, 4)].into_iter().for_each(|(link, op)| queue.push(link, op));
        let mut order = Vec::new();
        queue.move_to_back(0, 1);
        for _ in 0..4 {
            order.extend(queue.front());
            queue.rotate();
        }
        assert_eq!(order, [3, 4, 2, 3]);
        queue.move_to_back(9, 1);
        queue.move_to_back(1, 99);
        assert_eq!(queue.front(), Some(4));
        queue.move_to_front(0, 2);
        assert_eq!(queue.front(), Some(2));
    }

    #[test]
    fn a_paused_link_is_skipped() {
        let mut queue = RoundRobin::default();
        [(0, 1), (1, 2)].into_iter().for_each(|(link, op)| queue.push(link, op));
        queue.pause(0);
        queue.pause(0);
        queue.pause(7);
        queue.push(0, 3);
        queue.push(7, 4);
        queue.move_to_back(0, 1);
        queue.move_to_front(7, 4);
        assert_eq!((queue.front(), queue.len()), (Some(2), 4));
        queue.pop();
        assert_eq!(queue.front(), None);
        queue.resume(7);
        queue.resume(0);
        queue.resume(0);
        let order: Vec<_> = std::iter::from_fn(|| queue.front().inspect(|_| queue.pop())).collect();
        assert_eq!((order, queue.len()), (vec![4, 3, 1], 0));
    }

    #[test]
    fn an_operation_is_removed_from_anywhere() {
        let mut queue = RoundRobin::default();
        [(0, 1), (0, 2), (1, 3), (0, 4)].into_iter().for_each(|(link, op)| queue.push(link, op));
        queue.remove(0, 2);
        queue.remove(1, 3);
        queue.remove(1, 9);
        queue.remove(7, 9);
        let order: Vec<_> = std::iter::from_fn(|| queue.front().inspect(|_| queue.pop())).collect();
        assert_eq!((order, queue.len()), (vec![1, 4], 0));
    }

    #[test]
    fn removing_an_operation_keeps_the_order_of_the_others() {
        let mut queue = RoundRobin::default();
        queue.push(3, 1);
        queue.push(5, 2);
        queue.pop();
        assert_eq!(queue.front(), Some(2));
        queue.pop();
        assert_eq!(queue.front(), None);
        queue.push(3, 7);
        assert_eq!(queue.front(), Some(7));
    }
}
