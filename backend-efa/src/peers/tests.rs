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
