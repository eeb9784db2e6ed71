//! Pages in an order that no cache expects.

use multirail::Pages;

/// All of `count` pages, shuffled.
pub fn shuffled(count: u32, random: &mut fastrand::Rng) -> Pages {
    let mut pages: Vec<u32> = (0..count).collect();
    random.shuffle(&mut pages);
    Pages::new(pages)
}
