use super::*;

fn take(contexts: &mut Contexts, id: u64) -> Option<*mut c_void> {
    let mut taking = contexts.taking(id, PeerSlot(9));
    let context = taking.next();
    taking.keep();
    context
}

#[test]
fn what_is_not_kept_is_free_again() {
    let mut contexts = Contexts::new(4);
    let kept = take(&mut contexts, 0).unwrap();
    for _ in 0..3 {
        let mut taking = contexts.taking(1, PeerSlot(9));
        let taken: Vec<_> = std::iter::from_fn(|| taking.next()).collect();
        assert_eq!(taken.len(), 3);
        drop(taking);
        assert!(taken.iter().all(|context| contexts.end(*context).is_none()));
    }
    let mut taking = contexts.taking(1, PeerSlot(8));
    let taken: Vec<_> = (0..3).filter_map(|_| taking.next()).collect();
    taking.keep();
    assert_eq!(taking.next(), None);
    drop(taking);
    assert_eq!(contexts.end(taken[2]), Some(Posted::Request { id: 3, peer: PeerSlot(8) }));
    assert_eq!(contexts.end(kept), Some(Posted::Request { id: 0, peer: PeerSlot(9) }));
}

#[test]
fn requests_end_together_as_far_as_they_follow_one_another() {
    let mut contexts = Contexts::new(8);
    let ids = [5, 6, 7, 9, 10];
    let mut posted = ids.map(|id| take(&mut contexts, id).unwrap()).to_vec();
    let mut taking = contexts.taking(11, PeerSlot(8));
    posted.extend(taking.next());
    taking.keep();
    drop(taking);
    let receive = ReceiveRequest { id: 12, local: std::ptr::null_mut(), lkey: 0, len: 0 };
    posted.extend(contexts.take_receive(&receive));
    let mut ended = Vec::new();
    while let Some((peer, first, count)) = contexts.end_requests(posted.iter().copied()) {
        ended.push((peer.0, first, count));
        posted.drain(..count as usize);
    }
    assert_eq!(ended, [(9, 5, 3), (9, 9, 2), (8, 11, 1)]);
    assert_eq!(contexts.end(posted[0]), Some(Posted::Receive { receive, is_recalled: false }));
    assert_eq!(contexts.end_requests(posted.into_iter()), None);
}

#[test]
fn retires_for_a_while() {
    let (early, late) = (Time::ZERO, Time::ZERO.after(std::time::Duration::from_secs(1)));
    let mut contexts = Contexts::new(2);
    let first = take(&mut contexts, 0).unwrap();
    contexts.end(first).unwrap();
    contexts.retire(first, late);
    let second = take(&mut contexts, 1).unwrap();
    assert_ne!(first, second);
    assert_eq!(take(&mut contexts, 2), None);
    assert_eq!(contexts.end(first), None);
    contexts.readmit(early);
    assert_eq!(take(&mut contexts, 2), None);
    contexts.readmit(late);
    assert_eq!(take(&mut contexts, 2), Some(first));
    // Of what is posted, and of nothing, nothing is retired.
    contexts.retire(second, late);
    contexts.retire(std::ptr::null_mut(), late);
    assert!(contexts.end(second).is_some() && contexts.end(first).is_some());
}

#[test]
fn ends_once_in_any_order() {
    let mut contexts = Contexts::new(3);
    let posted = [0, 1, 2].map(|id| Posted::Request { id, peer: PeerSlot(9) });
    let taken = [0, 1, 2].map(|id| take(&mut contexts, id).unwrap());
    let receive = |id| ReceiveRequest { id, local: std::ptr::null_mut(), lkey: id + 1, len: id + 2 };
    assert_eq!(contexts.take_receive(&receive(7)), None);
    assert_eq!(contexts.end(taken[1]), Some(posted[1]));
    assert_eq!(contexts.end(taken[1]), None);
    let taken = contexts.take_receive(&receive(7)).unwrap();
    assert_eq!(contexts.recall(8), None);
    assert_eq!(contexts.recall(7), Some(taken));
    assert_eq!(contexts.recall(7), Some(taken), "again");
    assert_eq!(contexts.end_requests([taken].into_iter()), None, "no request");
    assert_eq!(contexts.end(std::ptr::null_mut()), None);
    assert_eq!(contexts.end(std::ptr::without_provenance_mut(usize::MAX)), None);
    assert_eq!(
        contexts.end_all(),
        [posted[0], Posted::Receive { receive: receive(7), is_recalled: true }, posted[2]]
    );
    let again = [3, 4, 5].map(|id| take(&mut contexts, id));
    assert!(again.iter().all(Option::is_some));
    assert_eq!(contexts.take_receive(&receive(8)), None);
}
