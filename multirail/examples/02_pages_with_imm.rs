//! Scattered pages in one operation, and how the target knows that they have arrived.
//!
//! A paged write moves page `from[i]` of one region to page `to[i]` of another. Its
//! 32-bit *immediate data* (imm) reaches the target either once, after the last byte, or
//! with every page. Counters at the target count the arrivals, even if no task waits yet.
//!
//! ```console
//! $ cargo run --example 02_pages_with_imm
//! ```

use std::error::Error;

use multirail::{Access, Pages, Region, WriteOptions};

const PAGE: usize = 16 << 10;

fn main() -> Result<(), Box<dyn Error>> {
    let (source, target) = (multirail::open()?, multirail::open()?);
    let (to_target, from_source) = source.connect_local(&target)?;

    let ours = source.alloc(8 * PAGE, Access::LOCAL)?;
    let theirs = target.alloc(16 * PAGE, Access::REMOTE_WRITE)?;
    for page in 0..8 {
        ours.copy_in(page * PAGE, &[page as u8 + 1; PAGE])?;
    }
    let remote = to_target.import(&theirs.descriptor())?;
    let (from, to) = (Pages::new([5, 0, 3]), Pages::new([11, 2, 7]));

    pollster::block_on(async {
        // One imm for the whole operation: when it arrives, all pages have arrived.
        let announced = WriteOptions::new().imm(42);
        let write = to_target.write_pages_with(&ours, &from, &remote, &to, PAGE, &announced)?;
        from_source.imm(42).expect(1).await?;
        assert_eq!([11, 2, 7].map(|page| page_of(&theirs, page)), [Some(6), Some(1), Some(4)]);
        assert_eq!(page_of(&theirs, 0), Some(0), "no other page was touched");
        assert_eq!(write.await?.bytes, 3 * PAGE as u64);

        // One imm per page, for a target that counts: three operations, nine arrivals.
        let counted = WriteOptions::new().imm(7).per_wr();
        for _ in 0..3 {
            to_target.write_pages_with(&ours, &from, &remote, &to, PAGE, &counted)?.await?;
        }
        let arrivals = from_source.imm(7);
        arrivals.expect(9).await?;
        // Taking them from the counter prepares it for the next round.
        assert!(arrivals.try_take(9));
        assert_eq!(arrivals.count(), 0);

        // Pages need not be adjacent: rows of 1 KiB from a matrix with 4 KiB rows, after a header
        // of 256 bytes, are packed together at the target.
        let rows = Pages::new([1, 2, 3]).stride(4096).offset(256);
        let packed = Pages::new([0, 1, 2]);
        to_target.write_pages(&ours, &rows, &remote, &packed, 1024)?.await
    })?;
    println!("3 pages with one imm, 9 with one each, 3 rows with a stride");
    Ok(())
}

/// The value of a page's bytes, if all are the same.
fn page_of(region: &Region, page: usize) -> Option<u8> {
    let mut bytes = [0; PAGE];
    region.copy_out(page * PAGE, &mut bytes).ok()?;
    bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
}
