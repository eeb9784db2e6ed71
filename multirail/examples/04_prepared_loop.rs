//! The same transfer many times: checked and planned once, posted many times.
//!
//! A decode step moves the same pages between the same regions for every layer and every
//! token. `prepare_write_pages` checks lists, bounds and rights once. A post checks only what
//! can change (that the peer is alive and the region was not revoked), and allocates no memory.
//!
//! ```console
//! $ cargo run --example 04_prepared_loop
//! ```

use std::collections::VecDeque;
use std::error::Error;
use std::time::Duration;

use multirail::{Access, ErrorKind, Op, Pages, WriteOptions};

const PAGE: usize = 16 << 10;
const PAGES: usize = 64;
const STEPS: u32 = 500;
/// The number of outstanding posts.
const AHEAD: usize = 4;
const LIMIT: Duration = Duration::from_secs(10);

fn main() -> Result<(), Box<dyn Error>> {
    let (prefill, decode) = (multirail::open()?, multirail::open()?);
    let (to_decode, from_prefill) = prefill.connect_local(&decode)?;
    let cache = prefill.alloc(PAGES * PAGE, Access::LOCAL)?;
    let theirs = decode.alloc(PAGES * PAGE, Access::REMOTE_WRITE)?;
    let remote = to_decode.import(&theirs.descriptor())?;
    cache.copy_in(0, &vec![7; PAGES * PAGE])?;

    // Writes every page to another position at the target. Each post has its own imm.
    let from = Pages::new((0..PAGES as u32).collect::<Vec<_>>());
    let to = Pages::new((0..PAGES as u32).rev().collect::<Vec<_>>());
    let options = WriteOptions::new().imm(0);
    let step = to_decode.prepare_write_pages(&cache, &from, &remote, &to, PAGE, &options)?;
    assert_eq!(step.bytes(), (PAGES * PAGE) as u64);

    let mut under_way: VecDeque<Op> = VecDeque::with_capacity(AHEAD);
    for number in 0..STEPS {
        if under_way.len() == AHEAD
            && let Some(mut oldest) = under_way.pop_front()
        {
            oldest.wait(LIMIT)?;
        }
        under_way.push_back(step.post_with_imm(number)?);
    }
    for mut op in under_way {
        op.wait(LIMIT)?;
    }
    // The imm of each step tells the target the step's number.
    for number in 0..STEPS {
        from_prefill.imm(number).expect(1).wait(LIMIT)?;
    }
    let mut page = vec![0; PAGE];
    theirs.copy_out((PAGES - 1) * PAGE, &mut page)?;
    assert!(page.iter().all(|byte| *byte == 7));

    // After a revocation, a prepared write fails too.
    theirs.revoke()?.wait(LIMIT)?;
    let refused = step.post().and_then(|mut op| op.wait(LIMIT));
    let kind = refused.expect_err("the region was revoked").kind();
    assert!(matches!(kind, ErrorKind::Revoked | ErrorKind::RemoteAccess));
    println!("{STEPS} posts of {PAGES} pages, prepared once");
    Ok(())
}
