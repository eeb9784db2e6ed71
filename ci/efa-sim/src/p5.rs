//! The cards of a p5.48xlarge: eight PCI roots of four cards each, as its sysfs shows them.

/// The most that a host has.
pub(crate) const CARDS: usize = 32;
const PER_ROOT: usize = 4;
/// The roots' buses. Behind each: a bridge on bus root, one on root + 1, then slots 0 to 3 of
/// root + 2 lead to the cards' buses, which end at root + 14.
const ROOTS: [u8; CARDS / PER_ROOT] = [0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb];
/// From a root to the bus of its first card.
const FIRST: u8 = 11;

/// Where a card is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Card {
    root: u8,
    slot: u8,
    pub(crate) numa_node: u8,
}

impl Card {
    /// Card `index` of the host.
    pub(crate) fn new(index: usize) -> Self {
        let root = index / PER_ROOT % ROOTS.len();
        Self {
            root: ROOTS[root],
            slot: (index % PER_ROOT) as u8,
            numa_node: u8::from(root >= ROOTS.len() / 2),
        }
    }

    fn bus(&self) -> u8 {
        self.root + FIRST + self.slot
    }

    /// As rdma-core names it: by the bus, in decimal.
    pub(crate) fn name(&self) -> String {
        format!("rdmap{}s0", self.bus())
    }

    /// Its PCI address.
    pub(crate) fn address(&self) -> String {
        format!("0000:{:02x}:00.0", self.bus())
    }

    /// The way to it from the root, below sysfs's `devices`.
    pub(crate) fn path(&self) -> String {
        let Self { root, slot, .. } = self;
        let bridges =
            format!("0000:{root:02x}:00.0/0000:{:02x}:00.0/0000:{:02x}:01.{slot}", root + 1, root + 2);
        format!("pci0000:{root:02x}/{bridges}/{}", self.address())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_are_where_a_p5_has_them() {
        let card = |index| Card::new(index);
        assert_eq!((card(0).name(), card(0).address()), ("rdmap79s0".into(), "0000:4f:00.0".into()));
        assert_eq!((card(31).address(), card(31).numa_node), ("0000:c9:00.0".into(), 1));
        assert_eq!((card(15).address(), card(15).numa_node), ("0000:85:00.0".into(), 0));
        assert_eq!(card(1).path(), "pci0000:44/0000:44:00.0/0000:45:00.0/0000:46:01.1/0000:50:00.0");
    }
}
