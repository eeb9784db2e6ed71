//! Compares received bytes with sent bytes.
#![allow(unsafe_code)]

use std::sync::Arc;

use multirail::cuda::CudaMemory;
use multirail::{Region, Result};

use super::content;
use super::layout::PageLayout;
use super::load::BenchLoad;

/// Compares every byte of the target regions. Returns the number of the first wrong byte, counted through all regions.
///
/// The GPU compares its own memory, so that it sees the bytes as kernels after a transfer see them.
pub fn first_mismatch(regions: &[Region], load: &BenchLoad) -> Result<Option<u64>> {
    let layout = PageLayout::new(load);
    match load.dst.is_gpu() {
        true => on_gpu(regions, load, &layout),
        false => content::first_mismatch(regions, load, layout.source_of_target()),
    }
}

fn on_gpu(regions: &[Region], load: &BenchLoad, layout: &PageLayout) -> Result<Option<u64>> {
    let streams: Vec<u64> =
        layout.source_of_target().into_iter().map(|page| content::stream(load, page)).collect();
    for (region, pages) in regions.iter().zip(&layout.regions) {
        let (address, owner) = (region.as_ptr() as u64, Arc::new(region.clone()));
        // SAFETY: the region keeps its memory.
        let memory = unsafe { CudaMemory::of_pointer(address, region.len(), owner) }?;
        let streams = &streams[pages.start as usize..pages.end as usize];
        if let Some(offset) = memory.first_mismatch(load.size, streams)? {
            return Ok(Some(u64::from(pages.start) * load.size + offset));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use multirail::{Access, ErrorKind, Fabric, FabricBuilder, TransportConfig};

    use super::super::load::OpKind;
    use super::super::memory::BenchMemory;
    use super::*;

    /// Correct bytes have no mismatch. With several wrong bytes, the first is reported.
    fn compares_at(dst: BenchMemory) {
        let loopback = TransportConfig::new("loopback", Arc::new(backend_loopback::Loopback::new()));
        let fabric = FabricBuilder::new().transport(loopback).open().unwrap();
        // The last load has more bytes than a GPU's threads compare in one pass.
        let loads =
            [(1, 1), (1, 700), (13, 9), (4096, 33), ((64 << 10) + 5, 40), (1 << 20, 3), ((4 << 20) + 5, 5)];
        for ((size, pages), regions) in loads.into_iter().flat_map(|load| [(load, 1), (load, 5)]) {
            let kind = OpKind::WriteList;
            let (regions, runs) = (regions.min(pages), pages / (2 * BenchLoad::RUN));
            let load = BenchLoad { size, pages, regions, runs, src: dst, dst, ..BenchLoad::sample(kind) };
            load.check().unwrap();
            let (layout, bytes) = (PageLayout::new(&load), right(&fabric, &load));
            let regions = layout.alloc(dst, &fabric, Access::LOCAL).unwrap();
            let start = |region: usize| layout.regions[region].start as usize * load.size as usize;
            for (number, region) in regions.iter().enumerate() {
                region.copy_in(0, &bytes[start(number)..][..region.len()]).unwrap();
            }
            assert_eq!(first_mismatch(&regions, &load).unwrap(), None, "{load:?}");
            let last = load.total() - 1;
            for wrong in [last, last / 2, last / 3, 0] {
                let number = (0..regions.len()).rfind(|number| start(*number) <= wrong).unwrap();
                regions[number].copy_in(wrong - start(number), &[!bytes[wrong]]).unwrap();
                assert_eq!(first_mismatch(&regions, &load).unwrap(), Some(wrong as u64), "{load:?}");
            }
        }
    }

    /// The expected bytes: the source pages in the target's order.
    fn right(fabric: &Fabric, load: &BenchLoad) -> Vec<u8> {
        let source = fabric.alloc(load.total(), Access::LOCAL).unwrap();
        content::fill(std::slice::from_ref(&source), load).unwrap();
        let size = load.size as usize;
        let mut bytes = vec![0; load.total()];
        for (to, from) in PageLayout::new(load).source_of_target().into_iter().enumerate() {
            source.copy_out(from as usize * size, &mut bytes[to * size..][..size]).unwrap();
        }
        bytes
    }

    #[test]
    fn mismatches_are_found_on_the_host() {
        compares_at(BenchMemory::Host);
    }

    #[test]
    fn mismatches_are_found_by_the_gpu() {
        match multirail::cuda::Device::open(0) {
            Ok(_) => compares_at(BenchMemory::Gpu(0)),
            Err(why) => {
                assert!(matches!(why.kind(), ErrorKind::Unsupported | ErrorKind::NotFound), "{why}");
                println!("skipped: {why}");
            }
        }
    }
}
