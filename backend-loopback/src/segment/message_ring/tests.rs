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
        let message = receiver.pop_message().unwrap();
        assert_eq!((message.len, message.imm), (4, Some(round)));
        let mut into = [0; 4];
        // SAFETY: four writable bytes.
        unsafe { receiver.take_message(layout, &message, into.as_mut_ptr(), 4) };
        assert_eq!(into, text);
    }
    assert!(receiver.next_message().is_none() && !receiver.is_broken());
}

#[test]
fn a_full_ring_takes_no_more() {
    let segment = Segment::create().unwrap();
    let (layout, mut receiver) = (segment.content(), RingReceiver::default());
    let long = [7; MAX_INLINE + 1];
    for _ in 0..PAYLOADS {
        // SAFETY: `long` has that many bytes.
        assert!(unsafe { send_message(layout, long.as_ptr(), long.len(), None, || ()) });
    }
    // SAFETY: as above.
    assert!(!unsafe { send_message(layout, long.as_ptr(), long.len(), None, || ()) });
    for n in PAYLOADS..RING_ENTRIES {
        assert!(send_imm(layout, n as u32, || ()));
    }
    assert!(!has_room(layout) && !send_imm(layout, 0, || ()));
    assert_eq!(receiver.next_imm(layout), Some(PAYLOADS as u32));
    assert!(has_room(layout));
}

#[test]
fn inline_messages_keep_their_bytes_and_order_and_have_a_limit() {
    let segment = Segment::create().unwrap();
    let (layout, mut receiver) = (segment.content(), RingReceiver::default());
    let message = |n: u64| n.to_le_bytes().repeat(INLINE_WORDS);
    let send = |n: u64| {
        let (bytes, len) = (message(n), n as usize % (MAX_INLINE + 1));
        // SAFETY: `bytes` has `MAX_INLINE` bytes.
        unsafe { send_message(layout, bytes.as_ptr(), len, n.is_multiple_of(3).then_some(n as u32), || ()) }
    };
    let take = |receiver: &mut RingReceiver, n: u64| {
        let expected = message(n);
        let len = n as usize % (MAX_INLINE + 1);
        let waiting = receiver.pop_message().unwrap();
        assert_eq!((waiting.len, waiting.imm), (len, n.is_multiple_of(3).then_some(n as u32)));
        let mut into = [0; MAX_INLINE];
        // SAFETY: `into` has `MAX_INLINE` bytes.
        unsafe { receiver.take_message(layout, &waiting, into.as_mut_ptr(), MAX_INLINE) };
        assert_eq!(into[..len], expected[..len]);
    };
    let (mut sent, mut taken) = (0, 0);
    for _ in 0..3 {
        // The ring is emptied as it fills: the messages wait at the receiver.
        while send(sent) {
            sent += 1;
            assert_eq!(receiver.next_imm(layout), None);
        }
        assert_eq!(sent - taken, MAX_WAITING_INLINE);
        assert!(request_room(layout, WorkKind::Send));
        (taken..taken + 100).for_each(|n| take(&mut receiver, n));
        taken += 100;
        assert!(receiver.has_made_room(layout) && !request_room(layout, WorkKind::Send));
    }
    (taken..sent).for_each(|n| take(&mut receiver, n));
    assert!(receiver.next_message().is_none() && !receiver.is_broken());
}

#[test]
fn a_peer_that_sends_more_inline_messages_than_may_wait_breaks_its_ring() {
    let segment = Segment::create().unwrap();
    let (layout, mut receiver) = (segment.content(), RingReceiver::default());
    for _ in 0..2 * MAX_WAITING_INLINE {
        assert!(push(layout, &[IS_MESSAGE | IS_INLINE, 1]));
        assert_eq!((receiver.next_imm(layout), receiver.is_broken()), (None, false));
    }
    assert!(push(layout, &[IS_MESSAGE | IS_INLINE, 1]));
    assert_eq!((receiver.next_imm(layout), receiver.is_broken()), (None, true));
}

#[test]
fn a_sleeper_is_woken_once() {
    let segment = Segment::create().unwrap();
    let (layout, receiver) = (segment.content(), RingReceiver::default());
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
    for entry in [
        [0, 0],
        [IS_MESSAGE, 32 << 32],
        [IS_MESSAGE, 65537],
        [IS_MESSAGE | IS_INLINE, 41],
        [u64::MAX, u64::MAX],
    ] {
        let segment = Segment::create().unwrap();
        let (layout, mut receiver) = (segment.content(), RingReceiver::default());
        assert!(push(layout, &entry));
        assert_eq!(receiver.next_imm(layout), None);
        assert!(receiver.is_broken() && receiver.next_message().is_none());
    }
    let segment = Segment::create().unwrap();
    let mut receiver = RingReceiver::default();
    assert!(push(segment.content(), &[IS_MESSAGE, 5]));
    assert!(push(segment.content(), &[IS_MESSAGE, 5]));
    assert_eq!(receiver.next_imm(segment.content()), None);
    assert!(receiver.is_broken());
}

/// The cells behind the first page have no memory for the receiver.
#[cfg(all(target_os = "linux", not(miri)))]
#[test]
fn a_ring_whose_cells_get_no_memory_is_read_no_more() {
    let segment = Segment::create().unwrap();
    let (layout, mut receiver) = (segment.content(), RingReceiver::default());
    for imm in 0..200 {
        assert!(send_imm(layout, imm, || ()));
    }
    let cells = std::ptr::from_ref(layout).cast::<u8>().wrapping_add(ConnectionLayout::HEAD);
    let end = std::ptr::from_ref(&layout.leases).cast::<u8>();
    let len = end as usize - cells as usize;
    // SAFETY: pages of the segment, which this test alone has.
    unsafe { rustix::mm::mprotect(cells.cast_mut().cast(), len, rustix::mm::MprotectFlags::empty()) }
        .unwrap();
    for imm in 0..FIRST_CELLS as u32 {
        assert_eq!(receiver.next_imm(layout), Some(imm));
    }
    assert!(receiver.is_broken());
    assert_eq!(receiver.next_imm(layout), None);
    assert!(receiver.arm(layout));
}

/// An inline message that was taken is good, even if the ring broke before.
#[cfg(all(target_os = "linux", not(miri)))]
#[test]
fn a_broken_ring_does_not_spoil_the_messages_before() {
    let segment = Segment::create().unwrap();
    let (layout, mut receiver) = (segment.content(), RingReceiver::default());
    // SAFETY: four readable bytes.
    assert!(unsafe { send_message(layout, [7_u8; 4].as_ptr(), 4, None, || ()) });
    assert!(push(layout, &[0, 0]));
    assert_eq!((receiver.next_imm(layout), receiver.is_broken()), (None, true));
    let (message, mut into) = (receiver.pop_message().unwrap(), [0_u8; 4]);
    // SAFETY: four writable bytes.
    assert!(unsafe { receiver.take_message(layout, &message, into.as_mut_ptr(), 4) });
    assert_eq!(into, [7; 4]);
}
