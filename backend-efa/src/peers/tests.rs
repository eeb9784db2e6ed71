//! Of what keeps a peer waiting.

use super::*;

/// As EFA's provider writes it: a GID, a number, a key.
fn address(number: u16, key: u32) -> Vec<u8> {
    [&[7; 16][..], &number.to_ne_bytes(), &[0; 2], &key.to_ne_bytes(), &[0; 8]].concat()
}

#[test]
fn a_number_given_anew_is_told() {
    let leaving = |number, key| Slot::Leaving(Some(address(number, key)));
    let slots = vec![Slot::Free, leaving(1, 10), leaving(2, 10)];
    let table = Table { slots, ..Table::default() };
    assert!(table.has_former_owner(&address(1, 11)));
    assert!(!table.has_former_owner(&address(1, 10)), "it comes back itself");
    assert!(!table.has_former_owner(&address(3, 10)));
}

#[test]
fn an_address_is_one_process() {
    let at = |number, process| {
        let landing = Landing { base: 0, key: 0 };
        RemoteAddress { address: address(number, 10), process, peer_tag: PeerTag::first(0), landing }
    };
    let known = |there| Slot::Up(Known { there, endpoint: 0, address: Some(0), ahead: None, moves: 0 });
    let mut table = Table { slots: vec![known(at(1, 7)), Slot::Offered(0)], ..Table::default() };
    let slot = PeerSlot(1);
    assert!(table.is_anothers(slot, &at(1, 8)));
    assert!(!table.is_anothers(slot, &at(1, 7)), "both sides have connected");
    assert!(!table.is_anothers(slot, &at(2, 8)));
    assert!(!table.is_anothers(PeerSlot(0), &at(1, 8)), "it is its own");
    table.slots[0] = Slot::Leaving(Some(address(1, 10)));
    assert!(!table.is_anothers(slot, &at(1, 8)), "the retiring one is gone");
}
