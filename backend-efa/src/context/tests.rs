use super::*;

fn take(contexts: &mut Contexts, id: u64) -> Option<*mut c_void> {
    let mut reservation = contexts.reserve(id, PeerSlot(9));
    let context = reservation.take();
    reservation.commit();
    context
}

#[test]
fn uncommitted_contexts_are_free_again() {
    let mut contexts = Contexts::new(4);
    let committed = take(&mut contexts, 0).unwrap();
    for _ in 0..3 {
        let mut reservation = contexts.reserve(1, PeerSlot(9));
        let taken: Vec<_> = std::iter::from_fn(|| reservation.take()).collect();
        assert_eq!(taken.len(), 3);
        drop(reservation);
        assert!(taken.iter().all(|context| contexts.end(*context).is_none()));
    }
    let mut reservation = contexts.reserve(1, PeerSlot(8));
    let taken: Vec<_> = (0..3).filter_map(|_| reservation.take()).collect();
    reservation.commit();
    assert_eq!(reservation.take(), None);
    drop(reservation);
    assert_eq!(contexts.end(taken[2]), Some(Posted::Request { id: 3, peer: PeerSlot(8) }));
    assert_eq!(contexts.end(committed), Some(Posted::Request { id: 0, peer: PeerSlot(9) }));
}

#[test]
fn requests_with_consecutive_ids_end_together() {
    let mut contexts = Contexts::new(8);
    let ids = [5, 6, 7, 9, 10];
    let mut posted = ids.map(|id| take(&mut contexts, id).unwrap()).to_vec();
    let mut reservation = contexts.reserve(11, PeerSlot(8));
    posted.extend(reservation.take());
    reservation.commit();
    drop(reservation);
    let receive = ReceiveRequest { id: 12, local: std::ptr::null_mut(), lkey: 0, len: 0 };
    posted.extend(contexts.take_for_receive(&receive));
    let mut ended = Vec::new();
    while let Some((peer, first, count)) = contexts.end_requests(posted.iter().copied()) {
        ended.push((peer.0, first, count));
        posted.drain(..count as usize);
    }
    assert_eq!(ended, [(9, 5, 3), (9, 9, 2), (8, 11, 1)]);
    assert_eq!(contexts.end(posted[0]), Some(Posted::Receive { receive, is_cancelled: false }));
    assert_eq!(contexts.end_requests(posted.into_iter()), None);
}

#[test]
fn a_retired_context_is_not_taken_before_its_time() {
    let (early, late) = (Time::ZERO, Time::ZERO.after(std::time::Duration::from_secs(1)));
    let mut contexts = Contexts::new(2);
    let first = take(&mut contexts, 0).unwrap();
    contexts.end(first).unwrap();
    contexts.retire(first, late);
    let second = take(&mut contexts, 1).unwrap();
    assert_ne!(first, second);
    assert_eq!(take(&mut contexts, 2), None);
    assert_eq!(contexts.end(first), None);
    contexts.free_retired(early);
    assert_eq!(take(&mut contexts, 2), None);
    contexts.free_retired(late);
    assert_eq!(take(&mut contexts, 2), Some(first));
    // A posted context and an address of no context are not retired.
    contexts.retire(second, late);
    contexts.retire(std::ptr::null_mut(), late);
    assert!(contexts.end(second).is_some() && contexts.end(first).is_some());
}

#[test]
fn a_context_ends_once_in_any_order() {
    let mut contexts = Contexts::new(3);
    let posted = [0, 1, 2].map(|id| Posted::Request { id, peer: PeerSlot(9) });
    let taken = [0, 1, 2].map(|id| take(&mut contexts, id).unwrap());
    let receive = |id| ReceiveRequest { id, local: std::ptr::null_mut(), lkey: id + 1, len: id + 2 };
    assert_eq!(contexts.take_for_receive(&receive(7)), None);
    assert_eq!(contexts.end(taken[1]), Some(posted[1]));
    assert_eq!(contexts.end(taken[1]), None);
    let taken = contexts.take_for_receive(&receive(7)).unwrap();
    assert_eq!(contexts.cancel_receive(8), None);
    assert_eq!(contexts.cancel_receive(7), Some(taken));
    assert_eq!(contexts.cancel_receive(7), Some(taken), "a second time");
    assert_eq!(contexts.end_requests([taken].into_iter()), None, "it is a receive");
    assert_eq!(contexts.end(std::ptr::null_mut()), None);
    assert_eq!(contexts.end(std::ptr::without_provenance_mut(usize::MAX)), None);
    assert_eq!(
        contexts.end_all(),
        [posted[0], Posted::Receive { receive: receive(7), is_cancelled: true }, posted[2]]
    );
    let again = [3, 4, 5].map(|id| take(&mut contexts, id));
    assert!(again.iter().all(Option::is_some));
    assert_eq!(contexts.take_for_receive(&receive(8)), None);
}
