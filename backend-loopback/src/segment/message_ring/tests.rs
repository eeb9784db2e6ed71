use super::*;
use crate::segment::Segment;

#[test]
fn imms_overtake_messages_and_both_keep_their_order() {
    let segment = Segment::create().unwrap();
    let (layout, mut receiver) = (segment.content(), RingReceiver::default());
    for round in 0..3000_u32 {
        let text = round.to_le_bytes();
        // SAFETY: `text` is four readable bytes.
        assert!(unsafe { send_message(layout, text.as_ptr(), 4, Some(round), || ()) });
        assert!(send_imm(layout, !round, || ()));
        assert_eq!(receiver.next_imm(layout), Some(!round));
        assert_eq!(receiver.next_imm(layout), None);
        let message = receiver.next_message().unwrap();
        assert_eq!((message.len, message.imm), (4, Some(round)));
        let mut into = [0; 4];
        // SAFETY: four writable bytes.
        unsafe { receiver.take_message(layout, into.as_mut_ptr(), 4) };
        assert_eq!(into, text);
    }
    assert!(receiver.next_message().is_none() && !receiver.is_broken());
}

#[test]
fn a_full_ring_takes_no_more() {
    let segment = Segment::create().unwrap();
    let (layout, mut receiver) = (segment.content(), RingReceiver::default());
    for _ in 0..PAYLOADS {
        // SAFETY: no byte is read.
        assert!(unsafe { send_message(layout, std::ptr::dangling(), 0, None, || ()) });
    }
    // SAFETY: as above.
    assert!(!unsafe { send_message(layout, std::ptr::dangling(), 0, None, || ()) });
    for n in PAYLOADS..RING_ENTRIES {
        assert!(send_imm(layout, n as u32, || ()));
    }
    assert!(!has_room(layout) && !send_imm(layout, 0, || ()));
    assert_eq!(receiver.next_imm(layout), Some(PAYLOADS as u32));
    assert!(has_room(layout));
}

#[test]
fn a_sleeper_is_woken_once() {
    let segment = Segment::create().unwrap();
    let (layout, mut receiver) = (segment.content(), RingReceiver::default());
    let mut wakeups = 0;
    assert!(receiver.arm(layout));
    send_imm(layout, 1, || wakeups += 1);
    send_imm(layout, 2, || wakeups += 1);
    assert_eq!(wakeups, 1);
    assert!(!receiver.arm(layout));
    receiver.disarm(layout);
    send_imm(layout, 3, || wakeups += 1);
    assert_eq!(wakeups, 1);
}

#[test]
fn an_invalid_entry_breaks_only_its_own_ring() {
    for entry in [[0, 0], [IS_MESSAGE, 32 << 32], [IS_MESSAGE, 65537], [u64::MAX, u64::MAX]] {
        let segment = Segment::create().unwrap();
        let (layout, mut receiver) = (segment.content(), RingReceiver::default());
        assert!(push(layout, entry));
        assert_eq!(receiver.next_imm(layout), None);
        assert!(receiver.is_broken() && receiver.next_message().is_none());
    }
    let segment = Segment::create().unwrap();
    let mut receiver = RingReceiver::default();
    assert!(push(segment.content(), [IS_MESSAGE, 5]));
    assert!(push(segment.content(), [IS_MESSAGE, 5]));
    assert_eq!(receiver.next_imm(segment.content()), None);
    assert!(receiver.is_broken());
}
