#[cfg(not(multirail_loom))]
mod plain {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::super::*;

    fn cells<const N: usize>() -> Box<[Cell<AtomicU64, 2>; N]> {
        Box::new(std::array::from_fn(|_| Cell {
            sequence: AtomicU64::new(0),
            entry: [AtomicU64::new(0), AtomicU64::new(0)],
        }))
    }

    #[test]
    fn wraps_around_in_order_and_reports_full() {
        let (tail, cells) = (AtomicU64::new(0), cells::<8>());
        let ring = Ring::new(&tail, &cells);
        let mut head = 0;
        for lap in 0..100 {
            for n in 0..8 {
                assert!(ring.has_room());
                assert!(ring.push(&[lap, n], |_| true));
            }
            assert!(!ring.has_room());
            assert!(!ring.push(&[0, 0], |_| true));
            for n in 0..8 {
                assert!(ring.ready(head));
                assert_eq!(ring.pop(&mut head), Some([lap, n]));
            }
            assert_eq!(ring.pop(&mut head), None);
        }
    }

    #[test]
    fn many_producers_lose_nothing() {
        const EACH: u64 = if cfg!(miri) { 50 } else { 50_000 };
        let (tail, cells) = (AtomicU64::new(0), cells::<64>());
        let mut next = [0; 3];
        std::thread::scope(|scope| {
            for producer in 0..3 {
                let ring = Ring::new(&tail, &cells);
                scope.spawn(move || {
                    for n in 0..EACH {
                        while !ring.push(&[producer, n], |_| true) {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let (ring, mut head) = (Ring::new(&tail, &cells), 0);
            while next.iter().any(|n| *n < EACH) {
                match ring.pop(&mut head) {
                    Some([producer, n]) => {
                        assert_eq!(next[producer as usize], n);
                        next[producer as usize] += 1;
                    }
                    None => std::thread::yield_now(),
                }
            }
        });
    }

    #[test]
    fn garbage_neither_panics_nor_loops() {
        let (tail, cells) = (AtomicU64::new(u64::MAX), cells::<8>());
        let ring = Ring::new(&tail, &cells);
        let mut random = fastrand::Rng::with_seed(7);
        let mut head = 0;
        for _ in 0..10_000 {
            tail.store(random.u64(..), Ordering::Relaxed);
            cells[random.usize(..8)].sequence.store(random.u64(..4), Ordering::Relaxed);
            let _ = (ring.push(&[1, 2], |_| true), ring.has_room(), ring.pop(&mut head));
        }
    }
}

#[cfg(multirail_loom)]
mod exhaustive {
    use std::sync::atomic::Ordering;

    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, fence};

    use super::super::*;

    impl AtomicWord for AtomicU64 {
        fn swap(&self, value: u64, order: Ordering) -> u64 {
            AtomicU64::swap(self, value, order)
        }

        fn set_bits(&self, bits: u64, order: Ordering) {
            self.fetch_or(bits, order);
        }

        fn load(&self, order: Ordering) -> u64 {
            AtomicU64::load(self, order)
        }

        fn store(&self, value: u64, order: Ordering) {
            AtomicU64::store(self, value, order);
        }

        fn try_replace(&self, current: u64, new: u64) -> Result<u64, u64> {
            self.compare_exchange(current, new, Ordering::Relaxed, Ordering::Relaxed)
        }
    }

    struct TestRing {
        tail: AtomicU64,
        cells: [Cell<AtomicU64, 2>; 2],
        armed: AtomicU64,
        woken: AtomicU64,
    }

    fn shared() -> Arc<TestRing> {
        let word = || AtomicU64::new(0);
        let cell = || Cell { sequence: word(), entry: [word(), word()] };
        Arc::new(TestRing { tail: word(), cells: [cell(), cell()], armed: word(), woken: word() })
    }

    #[test]
    fn two_producers_one_consumer() {
        loom::model(|| {
            let shared = shared();
            let producers: Vec<_> = [1, 2]
                .into_iter()
                .map(|n| {
                    let shared = shared.clone();
                    loom::thread::spawn(move || {
                        assert!(Ring::new(&shared.tail, &shared.cells).push(&[n, n * 10], |_| true));
                    })
                })
                .collect();
            let ring = Ring::new(&shared.tail, &shared.cells);
            let (mut head, mut sum) = (0, 0);
            let mut take = |head: &mut u64| {
                if let Some([n, tenfold]) = ring.pop(head) {
                    assert_eq!(n * 10, tenfold);
                    sum += n;
                }
            };
            take(&mut head);
            producers.into_iter().for_each(|p| p.join().unwrap());
            take(&mut head);
            take(&mut head);
            assert_eq!(sum, 3);
        });
    }

    #[test]
    fn a_sleeping_consumer_is_woken() {
        loom::model(|| {
            let shared = shared();
            let producer = {
                let shared = shared.clone();
                loom::thread::spawn(move || {
                    assert!(Ring::new(&shared.tail, &shared.cells).push(&[1, 1], |_| true));
                    fence(Ordering::SeqCst);
                    if shared.armed.load(Ordering::Relaxed) == 1 {
                        shared.woken.store(1, Ordering::Relaxed);
                    }
                })
            };
            shared.armed.store(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let seen = Ring::new(&shared.tail, &shared.cells).ready(0);
            producer.join().unwrap();
            assert!(seen || shared.woken.load(Ordering::Relaxed) == 1);
        });
    }
}
