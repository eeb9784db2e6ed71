use super::*;
use crate::segment::Segment;

#[test]
fn imms_overtake_messages_and_both_keep_their_order() {
    let segment = Segment::create().unwrap();
    let (layout, mut inlet) = (segment.layout(), Inlet::default());
    for round in 0..3000_u32 {
        let text = round.to_le_bytes();
        // SAFETY: `text` is four readable bytes.
        assert!(unsafe { send_message(layout, text.as_ptr(), 4, Some(round), || ()) });
        assert!(send_imm(layout, !round, || ()));
        assert_eq!(inlet.next_imm(layout), Some(!round));
        assert_eq!(inlet.next_imm(layout), None);
        let message = inlet.next_message().unwrap();
        assert_eq!((message.len, message.imm), (4, Some(round)));
        let mut into = [0; 4];
        // SAFETY: four writable bytes.
        unsafe { inlet.take_message(layout, into.as_mut_ptr(), 4) };
        assert_eq!(into, text);
    }
    assert!(inlet.next_message().is_none() && !inlet.is_broken());
}

#[test]
fn a_full_lane_pushes_back() {
    let segment = Segment::create().unwrap();
    let (layout, mut inlet) = (segment.layout(), Inlet::default());
    for _ in 0..PAYLOADS {
        // SAFETY: no byte is read.
        assert!(unsafe { send_message(layout, std::ptr::dangling(), 0, None, || ()) });
    }
    // SAFETY: as above.
    assert!(!unsafe { send_message(layout, std::ptr::dangling(), 0, None, || ()) });
    for n in PAYLOADS..ENTRIES {
        assert!(send_imm(layout, n as u32, || ()));
    }
    assert!(!has_room(layout) && !send_imm(layout, 0, || ()));
    assert_eq!(inlet.next_imm(layout), Some(PAYLOADS as u32));
    assert!(has_room(layout));
}

#[test]
fn the_bell_rings_once_per_sleep() {
    let segment = Segment::create().unwrap();
    let (layout, mut inlet) = (segment.layout(), Inlet::default());
    let mut rings = 0;
    assert!(inlet.arm(layout));
    send_imm(layout, 1, || rings += 1);
    send_imm(layout, 2, || rings += 1);
    assert_eq!(rings, 1);
    assert!(!inlet.arm(layout));
    inlet.disarm(layout);
    send_imm(layout, 3, || rings += 1);
    assert_eq!(rings, 1);
}

#[test]
fn nonsense_breaks_only_its_own_lane() {
    for entry in [[0, 0], [IS_MESSAGE, 32 << 32], [IS_MESSAGE, 65537], [u64::MAX, u64::MAX]] {
        let segment = Segment::create().unwrap();
        let (layout, mut inlet) = (segment.layout(), Inlet::default());
        assert!(ring(layout).push(entry));
        assert_eq!(inlet.next_imm(layout), None);
        assert!(inlet.is_broken() && inlet.next_message().is_none());
    }
    let segment = Segment::create().unwrap();
    let mut inlet = Inlet::default();
    assert!(ring(segment.layout()).push([IS_MESSAGE, 5]));
    assert!(ring(segment.layout()).push([IS_MESSAGE, 5]));
    assert_eq!(inlet.next_imm(segment.layout()), None);
    assert!(inlet.is_broken());
}
