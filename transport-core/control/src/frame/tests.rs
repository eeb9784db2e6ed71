//! Frames survive encoding and decoding, and no bytes cause a panic.

use proptest::prelude::*;

use super::*;

fn text(limit: usize) -> impl Strategy<Value = String> {
    prop_oneof!["[a-z0-9 ]{0,40}", Just("é".repeat(limit / 2))]
}

fn frames() -> impl Strategy<Value = Frame> {
    let rails = prop::collection::vec(prop::collection::vec(any::<u8>(), 0..50), 0..6);
    let offer = (text(MAX_NAME), text(MAX_NAME), rails).prop_map(|(label, backend, rails)| TransportOffer {
        rates: vec![100; rails.len()],
        label,
        backend,
        rails,
    });
    let link = (text(MAX_NAME), prop::option::of(text(MAX_REASON))).prop_map(|(label, refused)| LinkReport {
        label,
        refused,
        more: Vec::new(),
    });
    let cause = prop_oneof![
        Just(Cause::Protocol),
        Just(Cause::Unreachable),
        Just(Cause::Failed),
        Just(Cause::Permission)
    ];
    prop_oneof![
        any::<Code>().prop_map(|mac| Frame::Proof { mac }),
        (text(MAX_NAME), any::<u64>(), any::<u32>(), prop::collection::vec(offer, 0..5)).prop_map(
            |(host, incarnation, peer_timeout_ms, transports)| Frame::Offers {
                identity: Identity { incarnation, host },
                peer_timeout_ms,
                transports
            }
        ),
        prop::collection::vec(link, 0..5).prop_map(|links| Frame::Report { links }),
        Just(Frame::Ready),
        (cause, text(MAX_REASON)).prop_map(|(cause, reason)| Frame::Refuse { cause, reason }),
        any::<u64>().prop_map(|seq| Frame::Heartbeat { seq }),
        (any::<u64>(), text(MAX_NAME)).prop_map(|(id, name)| Frame::Lookup { id, name }),
        (any::<u64>(), prop::option::of(prop::collection::vec(any::<u8>(), 0..300)))
            .prop_map(|(id, descriptor)| Frame::Found { id, descriptor }),
        (any::<u64>(), any::<u64>()).prop_map(|(incarnation, region)| Frame::Revoked { incarnation, region }),
        Just(Frame::Goodbye),
        (text(MAX_NAME), any::<[u64; 3]>()).prop_map(|(transport, [bytes, imms, messages])| Frame::Grant {
            transport,
            grant: WireGrant { bytes, imms, messages }
        }),
        text(MAX_NAME).prop_map(|name| Frame::Barrier { name }),
        (text(MAX_NAME), any::<u16>(), prop::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(transport, pair, offer)| Frame::Moved { transport, pair, offer }),
        (text(MAX_NAME), any::<u16>(), prop::collection::vec(any::<u8>(), 0..300))
            .prop_map(|(transport, pair, offer)| Frame::Followed { transport, pair, answer: offer }),
        (any::<u64>(), text(MAX_NAME), any::<u16>(), fence_kind())
            .prop_map(|(id, transport, pair, kind)| Frame::Fence { id, transport, pair, kind }),
        (any::<u64>(), prop::option::of(any::<u64>()), text(MAX_REASON)).prop_map(|(id, imms, reason)| {
            Frame::Fenced { id, report: imms.map(|imms| FenceReport { imms, messages: imms / 2 }), reason }
        }),
        (text(MAX_NAME), any::<u16>(), any::<u64>())
            .prop_map(|(transport, pair, count)| Frame::MessagesPosted { transport, pair, count }),
    ]
}

fn fence_kind() -> impl Strategy<Value = FenceKind> {
    prop::sample::select(vec![FenceKind::DeviceLost, FenceKind::PathLost, FenceKind::Lift])
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn survives_the_wire(frame in frames()) {
        prop_assert_eq!(Frame::decode(&frame.encode().unwrap()).unwrap(), frame);
    }

    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        if let Ok(frame) = Frame::decode(&bytes) {
            // A frame that is accepted is within the limits, so it can be encoded as well.
            prop_assert!(frame.encode().is_ok());
        }
    }

    #[test]
    fn damage_never_panics(frame in frames(), hits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4), cut: prop::sample::Index) {
        let mut bytes = frame.encode().unwrap();
        for (at, to) in hits {
            let at = at.index(bytes.len());
            bytes[at] = to;
        }
        let _ = Frame::decode(&bytes);
        bytes.truncate(cut.index(bytes.len()));
        let _ = Frame::decode(&bytes);
    }

    #[test]
    fn trailing_bytes_are_refused(frame in frames(), extra in prop::collection::vec(any::<u8>(), 1..9)) {
        let mut bytes = frame.encode().unwrap();
        bytes.extend(extra);
        prop_assert_eq!(Frame::decode(&bytes).unwrap_err().kind(), ErrorKind::Protocol);
    }
}

#[test]
fn limits_hold_for_both_directions() {
    let offer = |rails: Vec<Vec<u8>>| TransportOffer {
        label: "a".into(),
        backend: "b".into(),
        rates: Vec::new(),
        rails,
    };
    let offers = |host: usize, transports| Frame::Offers {
        identity: Identity { incarnation: 1, host: "x".repeat(host) },
        peer_timeout_ms: 1,
        transports,
    };
    let link = |refused: usize| LinkReport {
        label: "a".into(),
        refused: Some("x".repeat(refused)),
        more: Vec::new(),
    };
    let too_much = [
        offers(MAX_NAME + 1, vec![]),
        offers(1, vec![offer(vec![]); MAX_OFFERS + 1]),
        offers(1, vec![offer(vec![vec![]; MAX_RAILS + 1])]),
        offers(1, vec![offer(vec![vec![0; MAX_RAIL + 1]])]),
        Frame::Report { links: vec![link(0); MAX_OFFERS + 1] },
        Frame::Report { links: vec![link(MAX_REASON + 1)] },
        Frame::Refuse { cause: Cause::Failed, reason: "x".repeat(MAX_REASON + 1) },
        Frame::Lookup { id: 0, name: "x".repeat(MAX_NAME + 1) },
        Frame::Grant { transport: "x".repeat(MAX_NAME + 1), grant: WireGrant::default() },
        Frame::Barrier { name: "x".repeat(MAX_NAME + 1) },
        Frame::Moved { transport: "x".repeat(MAX_NAME + 1), pair: 0, offer: vec![] },
        Frame::Followed { transport: "x".into(), pair: 0, answer: vec![0; MAX_RAIL + 1] },
        Frame::Found { id: 0, descriptor: Some(vec![0; MAX_DESCRIPTOR + 1]) },
    ];
    for frame in too_much {
        let error = frame.encode().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooLarge);
        assert!(error.context().contains("the limit is"), "{error}");
        let bytes = postcard::to_stdvec(&frame).unwrap();
        assert_eq!(Frame::decode(&bytes).unwrap_err().kind(), ErrorKind::Protocol, "{}", frame.name());
    }
    // The decoder rejects a huge count because the bytes of its elements are missing.
    let mut huge = offers(0, vec![]).encode().unwrap();
    huge.pop();
    huge.extend([0xff, 0xff, 0xff, 0xff, 0x0f]);
    assert_eq!(Frame::decode(&huge).unwrap_err().kind(), ErrorKind::Protocol);
}

#[test]
fn our_long_reasons_are_truncated_and_the_peers_are_made_printable() {
    let long = Error::new(ErrorKind::Protocol, "test", "é".repeat(MAX_REASON));
    let Frame::Refuse { reason, .. } = Frame::refusal(&long) else { panic!("no refusal") };
    assert_eq!(reason.len(), MAX_REASON);
    let report = Frame::report(&[LinkReport {
        label: "a".into(),
        refused: Some("x€".repeat(MAX_REASON)),
        more: Vec::new(),
    }]);
    assert!(report.encode().is_ok());
    let unprintable = Frame::Refuse { cause: Cause::Failed, reason: "\x1b[2J\nbye".into() };
    let Ok(Frame::Refuse { reason, .. }) = Frame::decode(&unprintable.encode().unwrap()) else {
        panic!("no refusal")
    };
    assert_eq!(reason, " [2J bye");
    let unprintable = Frame::Offers {
        identity: Identity { incarnation: 1, host: "\x1b[2J\nhost".into() },
        peer_timeout_ms: 1,
        transports: vec![],
    };
    let Ok(Frame::Offers { identity, .. }) = Frame::decode(&unprintable.encode().unwrap()) else {
        panic!("no offers")
    };
    assert_eq!(identity.host, " [2J host");
    let unprintable = LinkReport { label: "a".into(), refused: Some("\rno\u{9b}".into()), more: Vec::new() };
    let Ok(Frame::Report { links }) = Frame::decode(&Frame::report(&[unprintable]).encode().unwrap()) else {
        panic!("no report")
    };
    assert_eq!(links[0].refused.as_deref(), Some(" no "));
}
