//! Where the pages of a load lie, and the order in which they are moved: the same on both sides for one load.

use std::ops::Range;

use multirail::{Access, Fabric, Region};

use super::content::SplitMix;
use super::load::BenchLoad;
use super::memory::BenchMemory;
use crate::failure::CommandResult;

/// The regions of each side, and the order of the pages.
///
/// The pages are numbered through all regions, on both sides alike. A page moves between regions of the same number. The
/// pages of a run are neighbours in both regions and follow each other in the transfer; no other two pages are
/// neighbours in both.
pub struct PageLayout {
    /// The pages of each region.
    pub regions: Vec<Range<u32>>,
    /// The source pages in the order of the transfer.
    pub sources: Vec<u32>,
    /// The target pages in the same order.
    pub targets: Vec<u32>,
    /// The size of a page.
    size: usize,
}

impl PageLayout {
    /// The layout of a load that is within its bounds.
    pub fn new(load: &BenchLoad) -> Self {
        let mut layout =
            Self { regions: Vec::new(), sources: Vec::new(), targets: Vec::new(), size: load.size as usize };
        let mut random = SplitMix::new(load.seed, u64::MAX);
        // Each region has an equal share of the units. The runs lie at equal distances between the single pages.
        let units = BenchLoad::units(load.pages, load.runs);
        let part = |count: u32, at: u32, of: u32| (u64::from(count) * u64::from(at) / u64::from(of)) as u32;
        let runs_before = |unit| part(load.runs, unit, units);
        let unit_pages = |unit| if runs_before(unit + 1) > runs_before(unit) { BenchLoad::RUN } else { 1 };
        for region in 0..load.regions {
            let units = part(units, region, load.regions)..part(units, region + 1, load.regions);
            layout.add_region(&units.map(unit_pages).collect::<Vec<_>>(), &mut random);
        }
        layout
    }

    /// Adds a region of units with these numbers of pages.
    fn add_region(&mut self, units: &[u32], random: &mut SplitMix) {
        let (first, count) = (self.sources.len() as u32, units.len() as u32);
        let sources = random.order(count);
        let mut targets = random.order(count);
        // Neighbours are rare: three attempts are enough on average, however many units there are.
        while have_common_neighbours(&sources, &targets) {
            targets = random.order(count);
        }
        self.sources.extend(pages(units, &sources, first));
        self.targets.extend(pages(units, &targets, first));
        self.regions.push(first..self.sources.len() as u32);
    }

    /// Allocates the regions of one side.
    pub fn alloc(&self, memory: BenchMemory, fabric: &Fabric, access: Access) -> CommandResult<Vec<Region>> {
        let region = |pages: &Range<u32>| memory.alloc(fabric, pages.len() * self.size, access);
        self.regions.iter().map(region).collect()
    }

    /// The source page of each target page.
    pub fn source_of_target(&self) -> Vec<u32> {
        let mut source_of = vec![0; self.targets.len()];
        self.sources.iter().zip(&self.targets).for_each(|(from, to)| source_of[*to as usize] = *from);
        source_of
    }

    /// The source and the target bytes of each page, in the order of the transfer: the region's number, and the offsets
    /// in the two regions.
    pub fn offsets(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        self.regions.iter().enumerate().flat_map(move |(number, region)| {
            let range = region.start as usize..region.end as usize;
            let offset = move |page: &u32| (page - region.start) as usize * self.size;
            let pages = self.sources[range.clone()].iter().zip(&self.targets[range]);
            pages.map(move |(source, target)| (number, offset(source), offset(target)))
        })
    }
}

/// The pages of all units, if the units lie in the order `order` from page `first` on.
fn pages(units: &[u32], order: &[u32], first: u32) -> Vec<u32> {
    let (mut starts, mut next) = (vec![0; units.len()], first);
    for unit in order.iter().map(|unit| *unit as usize) {
        starts[unit] = next;
        next += units[unit];
    }
    starts.into_iter().zip(units).flat_map(|(start, count)| start..start + count).collect()
}

/// Returns true if a number follows another directly in both orders.
fn have_common_neighbours(one: &[u32], other: &[u32]) -> bool {
    let mut next = vec![u32::MAX; one.len()];
    one.windows(2).for_each(|pair| next[pair[0] as usize] = pair[1]);
    other.windows(2).any(|pair| next[pair[0] as usize] == pair[1])
}

#[cfg(test)]
mod tests {
    use super::super::load::OpKind;
    use super::*;

    fn layout(pages: u32, regions: u32, runs: u32) -> PageLayout {
        let load = BenchLoad { pages, regions, runs, ..BenchLoad::sample(OpKind::WriteList) };
        load.check().unwrap();
        PageLayout::new(&load)
    }

    /// Each page moves once, within its region. Only the pages of runs have a neighbour on both sides.
    #[test]
    fn pages_move_once_and_only_runs_have_neighbours() {
        for (pages, regions, runs) in
            [(1, 1, 0), (2, 1, 0), (1000, 1, 0), (80, 80, 0), (1024, 80, 64), (1024, 80, 128), (9, 2, 1)]
        {
            let layout = layout(pages, regions, runs);
            assert_eq!(layout.regions.len(), regions as usize);
            assert_eq!(layout.regions.last().map(|last| last.end), Some(pages));
            for region in &layout.regions {
                let range = region.start as usize..region.end as usize;
                for order in [&layout.sources, &layout.targets] {
                    let mut moved = order[range.clone()].to_vec();
                    moved.sort_unstable();
                    assert!(moved.into_iter().eq(region.clone()), "{region:?}");
                }
            }
            let source_of = layout.source_of_target();
            let inner = |page: &u32| layout.regions.iter().all(|region| region.start != *page);
            let pairs = source_of.windows(2).zip(1..).filter(|(pair, target)| {
                inner(target) && inner(&pair[1]) && pair[1] == pair[0].wrapping_add(1)
            });
            assert_eq!(pairs.count() as u32, runs * (BenchLoad::RUN - 1), "{pages} {regions} {runs}");
            let offsets: Vec<_> = layout.offsets().collect();
            let next = |(region, from, to)| (region, from + layout.size, to + layout.size);
            let joined = offsets.windows(2).filter(|pair| next(pair[0]) == pair[1]);
            assert_eq!(joined.count() as u32, runs * (BenchLoad::RUN - 1), "{pages} {regions} {runs}");
        }
    }

    #[test]
    fn offsets_are_those_of_the_pages() {
        let layout = layout(100, 7, 3);
        let start = |region: usize| layout.regions[region].start as usize;
        let page = |region, offset: usize| (start(region) + offset / layout.size) as u32;
        let (sources, targets): (Vec<_>, Vec<_>) =
            layout.offsets().map(|(region, from, to)| (page(region, from), page(region, to))).unzip();
        assert_eq!((sources, targets), (layout.sources.clone(), layout.targets.clone()));
    }
}
