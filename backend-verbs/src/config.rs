//! What a user may choose.

/// Which ports, and how connections over them are made.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerbsConfig {
    /// Queue pairs for writes and reads per peer, 1 to 16. Each is a flow of its own to the switches,
    /// which spread flows, not packets, over equal paths (Meta, SIGCOMM 2024, used up to 16).
    pub queue_pairs: u8,
    /// Index of the GID that stands for this side; chosen by rules where `None`.
    pub gid_index: Option<u8>,
    /// Traffic class of RoCE packets: DSCP in the upper six bits, as switches sort by it.
    pub traffic_class: u8,
    /// Service level, 0 to 7 (on RoCE the priority of a VLAN).
    pub service_level: u8,
    /// Index of the partition key of InfiniBand.
    pub pkey_index: u16,
    /// Time-out of an unacknowledged packet: 4.096 µs times two to this power, 1 to 31. The default,
    /// 18, is 1.07 s (IBTA 1.4, 9.9.1.6.1).
    pub timeout: u8,
    /// So often it is sent again, 0 to 7.
    pub retries: u8,
    /// Host memory is not pinned when it is registered, but paged in as requests come to it; where the
    /// card offers that (mlx5). Registering is quick then, and first requests are slow. p2pmem registers
    /// in no other way.
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
    /// So many queue pairs for writes and reads per peer; as many as are allowed if there are more.
    pub fn queue_pairs(mut self, queue_pairs: u8) -> Self {
        self.queue_pairs = queue_pairs.clamp(1, MOST_QUEUE_PAIRS);
        self
    }

    /// This GID, by its index.
    pub fn gid_index(mut self, index: u8) -> Self {
        self.gid_index = Some(index);
        self
    }

    /// Another traffic class.
    pub fn traffic_class(mut self, class: u8) -> Self {
        self.traffic_class = class;
        self
    }

    /// Memory is not pinned, where the card can do without.
    pub fn on_demand_paging(mut self, on: bool) -> Self {
        self.on_demand_paging = on;
        self
    }

    /// Another service level, of 0 to 7.
    pub fn service_level(mut self, level: u8) -> Self {
        self.service_level = level.min(7);
        self
    }
}

/// Per peer.
pub(crate) const MOST_QUEUE_PAIRS: u8 = 16;
