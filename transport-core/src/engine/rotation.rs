//! Whose turn it is on a rail: round robin over peers, and over each peer's operations.

use std::collections::VecDeque;

/// Operations that still have pieces to post on one rail.
#[derive(Debug, Default)]
pub(crate) struct Rotation {
    /// Links with something queued, the next one first.
    turns: VecDeque<u32>,
    /// Operations per link, the next one first.
    queues: Vec<VecDeque<u32>>,
    /// Operations in all of them.
    len: usize,
    /// Links that have no turn until they answer.
    held: Vec<u32>,
}

impl Rotation {
    /// Queues an operation behind its link's others.
    pub fn push(&mut self, link: u32, op: u32) {
        let queue = link as usize;
        if self.queues.len() <= queue {
            self.queues.resize_with(queue + 1, VecDeque::new);
        }
        if self.queues[queue].is_empty() && !self.holds(link) {
            self.turns.push_back(link);
        }
        self.queues[queue].push_back(op);
        self.len += 1;
    }

    /// Whether a link has no turn.
    #[inline]
    pub fn holds(&self, link: u32) -> bool {
        !self.held.is_empty() && self.held.contains(&link)
    }

    /// Gives a link no turn.
    pub fn hold(&mut self, link: u32) {
        if !self.holds(link) {
            self.held.push(link);
            take(&mut self.turns, link);
        }
    }

    /// Gives a link turns again.
    pub fn release(&mut self, link: u32) {
        let Some(place) = self.held.iter().position(|held| *held == link) else { return };
        self.held.swap_remove(place);
        if self.queues.get(link as usize).is_some_and(|queue| !queue.is_empty()) {
            self.turns.push_back(link);
        }
    }

    /// Whether nobody waits, and none would have to.
    #[inline]
    pub fn is_clear(&self) -> bool {
        self.len == 0 && self.held.is_empty()
    }

    /// Operations queued.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The operation whose turn it is.
    #[inline]
    pub fn front(&self) -> Option<u32> {
        let link = *self.turns.front()?;
        self.queues[link as usize].front().copied()
    }

    /// Ends the turn: link and operation go to the back of their lines.
    #[inline]
    pub fn rotate(&mut self) {
        let Some(link) = self.turns.pop_front() else { return };
        let queue = &mut self.queues[link as usize];
        queue.rotate_left(usize::from(queue.len() > 1));
        self.turns.push_back(link);
    }

    /// Makes it this operation's turn, and its link's.
    pub fn prefer(&mut self, link: u32, op: u32) {
        let Some(queue) = self.queues.get_mut(link as usize) else { return };
        if take(queue, op) {
            queue.push_front(op);
        }
        if take(&mut self.turns, link) {
            self.turns.push_front(link);
        }
    }

    /// Lets all others go first.
    pub fn defer(&mut self, link: u32, op: u32) {
        let Some(queue) = self.queues.get_mut(link as usize) else { return };
        if take(queue, op) {
            queue.push_back(op);
        }
        if take(&mut self.turns, link) {
            self.turns.push_back(link);
        }
    }

    /// Takes the operation whose turn it is out.
    pub fn pop(&mut self) {
        let Some(link) = self.turns.pop_front() else { return };
        let queue = &mut self.queues[link as usize];
        self.len -= usize::from(queue.pop_front().is_some());
        if !queue.is_empty() {
            self.turns.push_back(link);
        }
    }
}

/// Takes `item` out; it was rotated to the back lately, so the search starts there.
fn take(line: &mut VecDeque<u32>, item: u32) -> bool {
    let place = line.iter().rposition(|queued| *queued == item);
    place.and_then(|place| line.remove(place)).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_share_whatever_their_number_of_operations() {
        let mut rotation = Rotation::default();
        (0..10).for_each(|op| rotation.push(0, op));
        rotation.push(1, 100);
        let mut turns = Vec::new();
        for _ in 0..6 {
            turns.extend(rotation.front());
            rotation.rotate();
        }
        assert_eq!(turns, [0, 100, 1, 100, 2, 100]);
    }

    #[test]
    fn who_is_held_up_lets_all_others_go_first() {
        let mut rotation = Rotation::default();
        [(0, 1), (0, 2), (1, 3), (2, 4)].into_iter().for_each(|(link, op)| rotation.push(link, op));
        let mut turns = Vec::new();
        rotation.defer(0, 1);
        for _ in 0..4 {
            turns.extend(rotation.front());
            rotation.rotate();
        }
        assert_eq!(turns, [3, 4, 2, 3]);
        rotation.defer(9, 1);
        rotation.defer(1, 99);
        assert_eq!(rotation.front(), Some(4));
        rotation.prefer(0, 2);
        assert_eq!(rotation.front(), Some(2));
    }

    #[test]
    fn who_is_held_has_no_turn() {
        let mut rotation = Rotation::default();
        [(0, 1), (1, 2)].into_iter().for_each(|(link, op)| rotation.push(link, op));
        rotation.hold(0);
        rotation.hold(0);
        rotation.hold(7);
        rotation.push(0, 3);
        rotation.push(7, 4);
        rotation.defer(0, 1);
        rotation.prefer(7, 4);
        assert_eq!((rotation.front(), rotation.len()), (Some(2), 4));
        rotation.pop();
        assert_eq!(rotation.front(), None);
        rotation.release(7);
        rotation.release(0);
        rotation.release(0);
        let turns: Vec<_> = std::iter::from_fn(|| rotation.front().inspect(|_| rotation.pop())).collect();
        assert_eq!((turns, rotation.len()), (vec![4, 3, 1], 0));
    }

    #[test]
    fn an_operation_taken_out_leaves_the_rest_in_turn() {
        let mut rotation = Rotation::default();
        rotation.push(3, 1);
        rotation.push(5, 2);
        rotation.pop();
        assert_eq!(rotation.front(), Some(2));
        rotation.pop();
        assert_eq!(rotation.front(), None);
        rotation.push(3, 7);
        assert_eq!(rotation.front(), Some(7));
    }
}
