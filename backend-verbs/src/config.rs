//! The options of the backend.

/// The options of ports and of the connections over them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerbsConfig {
    /// Queue pairs for writes and reads per peer, 1 to 16. Switches spread flows, not packets, over equal paths, and
    /// each queue pair is one flow (Meta, SIGCOMM 2024, used up to 16).
    pub queue_pairs: u8,
    /// Index of the GID of this side. If it is `None`, the backend chooses the GID.
    pub gid_index: Option<u8>,
    /// Traffic class of RoCE packets. Its upper six bits are the DSCP, by which switches sort packets.
    pub traffic_class: u8,
    /// Service level, 0 to 7 (on RoCE the priority of a VLAN).
    pub service_level: u8,
    /// Index of the partition key of InfiniBand.
    pub pkey_index: u16,
    /// The exponent of the time-out of an unacknowledged packet, 1 to 31: the time-out is 4.096 µs times two to this
    /// power. The default, 18, is 1.07 s (IBTA 1.4, 9.9.1.6.1).
    pub timeout: u8,
    /// How often the card sends an unacknowledged packet again, 0 to 7.
    pub retries: u8,
    /// If true, registering does not pin host memory: the card pages it in when a request needs it. The card must offer
    /// that (mlx5). Registering is then quick, and the first requests are slow. p2pmem can only be registered this way.
    pub on_demand_paging: bool,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        Self {
            queue_pairs: 4,
            gid_index: None,
            traffic_class: 0,
            service_level: 0,
            pkey_index: 0,
            timeout: 18,
            retries: 7,
            on_demand_paging: false,
        }
    }
}

impl VerbsConfig {
    /// Sets the number of queue pairs for writes and reads per peer, limited to 1 to 16.
    pub fn queue_pairs(mut self, queue_pairs: u8) -> Self {
        self.queue_pairs = queue_pairs.clamp(1, MOST_QUEUE_PAIRS);
        self
    }

    /// Sets the index of the GID of this side.
    pub fn gid_index(mut self, index: u8) -> Self {
        self.gid_index = Some(index);
        self
    }

    /// Sets the traffic class.
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.traffic_class = class;
        self
    }

    /// Sets whether the card pages host memory in on demand.
    pub fn on_demand_paging(mut self, on: bool) -> Self {
        self.on_demand_paging = on;
        self
    }

    /// Sets the service level, 0 to 7.
    pub fn service_level(mut self, level: u8) -> Self {
        self.service_level = level.min(7);
        self
    }
}

/// The most queue pairs for writes and reads per peer.
pub(crate) const MOST_QUEUE_PAIRS: u8 = 16;
