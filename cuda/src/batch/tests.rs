use proptest::prelude::*;

use super::*;

/// The batch of `pieces`, its entries as the kernel reads them, and its copies.
fn batch_of(pieces: &[(CopyRange, Reach)]) -> (CopyBatch, Vec<CopyRange>, Vec<CopyRange>) {
    batch_by(pieces, usize::MAX)
}

/// The same, if at most `most` pieces are added at a time.
fn batch_by(pieces: &[(CopyRange, Reach)], most: usize) -> (CopyBatch, Vec<CopyRange>, Vec<CopyRange>) {
    let (mut table, mut batch) = (PieceTable::empty(), CopyBatch::default());
    let alike = pieces.chunk_by(|(_, one), (_, other)| one == other);
    for alike in alike.flat_map(|alike| alike.chunks(most)) {
        batch.add(&mut table, alike.iter().map(|(ends, _)| *ends), alike[0].1);
    }
    batch.end_piece(&mut table);
    let len = |at| if batch.each > 0 { batch.each } else { table.len[at] };
    let entries = (0..batch.entries).map(|at| (table.to[at], table.from[at], len(at).into())).collect();
    let copies = batch.copies.iter().map(|piece| (piece.to, piece.from, piece.len)).collect();
    (batch, entries, copies)
}

fn page(number: u64, len: u64) -> CopyRange {
    (number << 30 | 1 << 50, number << 30 | 1 << 51, len)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    /// Compares with a simple model: it joins all adjacent pieces first, and divides them into entries and copies then.
    #[test]
    fn every_byte_is_copied_once(
        script in prop::collection::vec((any::<bool>(), 0_usize..6, 0_u8..8), 1..80),
        most in 1_usize..9,
    ) {
        let mut pieces: Vec<(CopyRange, Reach)> = Vec::new();
        let mut joined: Vec<(CopyRange, Reach)> = Vec::new();
        for (number, (follows, size, way)) in script.into_iter().enumerate() {
            let len = [4096, 4096, 100, LARGE - 1, LARGE, 0][size];
            let reach = if way == 0 { Reach::Driver } else { Reach::Kernel };
            match joined.last_mut() {
                Some((last, its)) if follows => {
                    let (to, from) = (last.0 + last.2, last.1 + last.2);
                    pieces.push(((to, from, len), reach));
                    if *its == reach {
                        last.2 += len;
                    } else {
                        joined.push(((to, from, len), reach));
                    }
                }
                _ => {
                    pieces.push((page(number as u64, len), reach));
                    joined.push((page(number as u64, len), reach));
                }
            }
        }
        let (batch, entries, copies) = batch_by(&pieces, most);
        let is_entry = |(ends, reach): &(CopyRange, Reach)| *reach == Reach::Kernel && ends.2 < LARGE;
        let (wanted, others): (Vec<_>, Vec<_>) = joined.into_iter().partition(is_entry);
        let ends = |pieces: Vec<(CopyRange, Reach)>| pieces.into_iter().map(|(ends, _)| ends).collect::<Vec<_>>();
        prop_assert_eq!(u64::from(batch.longest), wanted.iter().map(|(ends, _)| ends.2).max().unwrap_or(0));
        prop_assert_eq!((entries, copies), (ends(wanted), ends(others)));
        prop_assert_eq!(batch.bytes, pieces.iter().map(|(ends, _)| ends.2).sum::<u64>());
    }
}

#[test]
fn pages_of_one_size_have_no_lengths_until_one_differs() {
    let mut pages: Vec<_> = (0..40).map(|number| (page(number, 4096), Reach::Kernel)).collect();
    let (batch, entries, _) = batch_of(&pages);
    assert_eq!((batch.each, batch.longest, batch.bytes), (4096, 4096, 40 * 4096));
    assert_eq!(entries, (0..40).map(|number| page(number, 4096)).collect::<Vec<_>>());
    // More pages of the first size follow it.
    pages.splice(20..20, [(page(50, 100), Reach::Kernel)]);
    let (batch, entries, _) = batch_of(&pages);
    assert_eq!((batch.each, batch.longest, batch.bytes), (0, 4096, 40 * 4096 + 100));
    assert_eq!(entries, pages.iter().map(|(ends, _)| *ends).collect::<Vec<_>>());
}

#[test]
fn adjacent_pages_are_joined() {
    let (to, from, len) = page(7, 4096);
    let next = (to + len, from + len, len);
    let beside = (to + 2 * len, from + 9 * len, len);
    let pages = [page(1, len), page(2, len), (to, from, len), next, beside].map(|ends| (ends, Reach::Kernel));
    let (batch, entries, _) = batch_of(&pages);
    assert_eq!(entries, [page(1, len), page(2, len), (to, from, 2 * len), beside]);
    assert_eq!((batch.each, batch.longest, batch.bytes), (0, 8192, 5 * len));
}

#[test]
fn pieces_for_the_copy_engine_are_no_entries() {
    let pieces = [
        (page(1, 4096), Reach::Kernel),
        (page(2, 4096), Reach::Driver),
        (page(3, 4096), Reach::Driver),
        (page(4, LARGE), Reach::Kernel),
        (page(5, 4096), Reach::Kernel),
        (page(6, 4096), Reach::Kernel),
    ];
    let (batch, entries, copies) = batch_of(&pieces);
    assert_eq!(entries, [page(1, 4096), page(5, 4096), page(6, 4096)]);
    assert_eq!(copies, [page(2, 4096), page(3, 4096), page(4, LARGE)]);
    assert_eq!(batch.each, 4096);
}

#[test]
fn a_piece_that_would_be_too_long_is_not_joined() {
    let (to, from, len) = page(2, 4096);
    let pieces = [page(1, len), (to, from, len), (to + len, from + len, MAX_PIECE), page(9, len)];
    let (batch, entries, copies) = batch_of(&pieces.map(|ends| (ends, Reach::Kernel)));
    assert_eq!((batch.each, entries), (4096, vec![page(1, len), (to, from, len), page(9, len)]));
    assert_eq!(copies, [(to + len, from + len, MAX_PIECE)]);
}

#[test]
fn a_full_batch_has_no_room() {
    let pages: Vec<_> = (0..ENTRIES as u64 - 1).map(|number| (page(number, 64), Reach::Kernel)).collect();
    let (mut batch, entries, _) = batch_of(&pages);
    assert_eq!((entries.len(), batch.room()), (ENTRIES - 1, 0));
    batch.clear();
    assert_eq!((batch.room(), batch.is_empty()), (ENTRIES - 1, true));
    let (batch, ..) = batch_of(&[(page(1, MAX_BYTES), Reach::Kernel)]);
    assert_eq!(batch.room(), 0);
}

#[test]
fn one_large_piece_grows() {
    let (mut table, mut batch) = (PieceTable::empty(), CopyBatch::default());
    let (to, from, _) = page(1, 0);
    batch.add(&mut table, (0..4).map(|at| (to + at * LARGE, from + at * LARGE, LARGE)), Reach::Kernel);
    assert!(batch.is_growing() && batch.copies.is_empty());
    batch.end_piece(&mut table);
    assert_eq!((batch.copies[0].len, batch.is_growing()), (4 * LARGE, false));
}
