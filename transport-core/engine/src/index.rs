//! Index types for the transports and the rail groups of a fabric.
//!
//! A fabric numbers its transports in order of preference, and its rail groups over all transports. Each kind of number
//! has a type of its own, and each list is indexed by one of the types only. So the compiler refuses a transport's
//! number where a rail group's number is meant.

use std::marker::PhantomData;
use std::ops::{Index, Range};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of a transport in its fabric, in order of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TransportIndex(usize);

/// The number of a rail group among the groups of all transports of its fabric. A peer's link over that group has the
/// same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupIndex(usize);

/// A number that an [`IndexVec`] is indexed by.
pub trait Number: Copy {
    /// The number of a position in a list.
    fn new(position: usize) -> Self;

    /// The number's position in a list.
    fn position(self) -> usize;
}

impl Number for TransportIndex {
    #[inline]
    fn new(position: usize) -> Self {
        Self(position)
    }

    #[inline]
    fn position(self) -> usize {
        self.0
    }
}

impl Number for GroupIndex {
    #[inline]
    fn new(position: usize) -> Self {
        Self(position)
    }

    #[inline]
    fn position(self) -> usize {
        self.0
    }
}

impl TransportIndex {
    /// The transport that a fabric prefers to all others.
    pub const FIRST: Self = Self(0);
}

impl GroupIndex {
    /// The first group of the first transport.
    pub const FIRST: Self = Self(0);

    /// The group `groups` further on.
    #[inline]
    pub fn plus(self, groups: usize) -> Self {
        Self(self.0 + groups)
    }
}

/// The number of a rail group, which any thread may read and change.
pub struct AtomicGroup(AtomicUsize);

impl AtomicGroup {
    /// A number that starts as `group`.
    pub fn new(group: GroupIndex) -> Self {
        Self(AtomicUsize::new(group.0))
    }

    /// Reads the number, with relaxed ordering.
    #[inline]
    pub fn load(&self) -> GroupIndex {
        GroupIndex(self.0.load(Ordering::Relaxed))
    }

    /// Changes the number, with relaxed ordering.
    #[inline]
    pub fn store(&self, group: GroupIndex) {
        self.0.store(group.0, Ordering::Relaxed);
    }
}

/// A list that is indexed by one kind of number only.
pub struct IndexVec<I, T>(Vec<T>, PhantomData<fn(I)>);

impl<I: Number, T> IndexVec<I, T> {
    /// The entries, from first to last.
    #[inline]
    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.0.iter()
    }
}

impl<I: Number, T> Index<I> for IndexVec<I, T> {
    type Output = T;

    #[inline]
    fn index(&self, number: I) -> &T {
        &self.0[number.position()]
    }
}

impl<I: Number, T> Index<Range<I>> for IndexVec<I, T> {
    type Output = [T];

    #[inline]
    fn index(&self, numbers: Range<I>) -> &[T] {
        &self.0[numbers.start.position()..numbers.end.position()]
    }
}

impl<I, T> From<Vec<T>> for IndexVec<I, T> {
    fn from(list: Vec<T>) -> Self {
        Self(list, PhantomData)
    }
}

impl<I, T> FromIterator<T> for IndexVec<I, T> {
    fn from_iter<Entries: IntoIterator<Item = T>>(entries: Entries) -> Self {
        Vec::from_iter(entries).into()
    }
}

impl<'a, I, T> IntoIterator for &'a IndexVec<I, T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}
