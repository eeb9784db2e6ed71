//! A region with its expected content.

use multirail::{Access, Fabric, Region, Result};

/// The size of a page in bytes.
pub const PAGE: usize = 64 << 10;

/// A region that its owner fills and checks as a whole.
pub struct TestPage {
    pub region: Region,
    seed: u64,
}

impl TestPage {
    /// A page with the content of `seed`.
    pub fn new(fabric: &Fabric, access: Access, seed: u64) -> Result<Self> {
        let region = fabric.alloc(PAGE, access)?;
        let mut page = Self { region, seed };
        page.fill(seed)?;
        Ok(page)
    }

    /// Fills the page with the content of `seed`, as its owner.
    pub fn fill(&mut self, seed: u64) -> Result<()> {
        self.seed = seed;
        self.region.copy_in(0, &content(seed))
    }

    /// The number of bytes that differ from the expected content.
    pub fn wrong_bytes(&self) -> usize {
        differing(&self.region, self.seed)
    }
}

/// The number of bytes of `region` that differ from the content of `seed`.
pub fn differing(region: &Region, seed: u64) -> usize {
    let mut actual = vec![0; PAGE];
    region.copy_out(0, &mut actual).expect("a page");
    actual.iter().zip(content(seed)).filter(|(got, want)| *got != want).count()
}

fn content(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}
