//! The event hash: a number by which two runs with the same seed can be compared.

/// Two runs with the same seed have the same hash.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct EventHash(u64);

/// The events that the event hash covers. Do not change the numbers: this would change the hash of every run.
#[derive(Clone, Copy)]
pub(super) enum HashedEvent {
    PeerFailed = 1,
    Activated = 2,
    Posted = 3,
    Acknowledged = 4,
    ImmArrived = 5,
    MessageArrived = 6,
    ReceiveFailed = 7,
    PeerGone = 8,
    DeviceLost = 9,
    Ended = 10,
    Stopped = 11,
    Expired = 12,
    GrantReceived = 13,
    Evicted = 14,
    Triggered = 15,
    Fenced = 16,
    PathBroken = 17,
    PathMended = 18,
    Continued = 19,
}

impl EventHash {
    /// Adds an event. `value` distinguishes events of the same kind: an index, an id or a number.
    #[inline]
    pub fn add(&mut self, event: HashedEvent, value: u64) {
        // One round of splitmix64's finaliser over the hash so far.
        let mut z = self.0 ^ value.wrapping_add((event as u64) << 56).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        self.0 = z ^ (z >> 27);
    }

    /// The hash of the events so far.
    #[inline]
    pub fn value(self) -> u64 {
        self.0
    }
}
