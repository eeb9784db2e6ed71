//! Compares received bytes with sent bytes.
#![allow(unsafe_code)]

use std::sync::Arc;

use multirail::cuda::CudaMemory;
use multirail::{Region, Result};

use super::content;
use super::load::BenchLoad;

/// Compares every byte of a target region. Returns the offset of the first wrong byte.
///
/// The GPU compares its own memory, so that it sees the bytes as kernels after a transfer see them.
pub fn first_mismatch(region: &Region, load: &BenchLoad) -> Result<Option<u64>> {
    match load.dst.is_gpu() {
        true => on_gpu(region, load),
        false => content::first_mismatch(region, load),
    }
}

fn on_gpu(region: &Region, load: &BenchLoad) -> Result<Option<u64>> {
    let (address, owner) = (region.as_ptr() as u64, Arc::new(region.clone()));
    // SAFETY: the region keeps its memory.
    let memory = unsafe { CudaMemory::of_pointer(address, region.len(), owner) }?;
    let streams: Vec<u64> =
        content::source_of_target(load).into_iter().map(|page| content::stream(load, page)).collect();
    memory.first_mismatch(load.size, &streams)
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
        for (size, pages) in loads {
            let load =
                BenchLoad { kind: OpKind::Write, size, pages, inflight: 1, seed: 7, imm: 0, src: dst, dst };
            let bytes = right(&fabric, &load);
            let region = dst.alloc(&fabric, load.total(), Access::LOCAL).unwrap();
            region.copy_in(0, &bytes).unwrap();
            assert_eq!(first_mismatch(&region, &load).unwrap(), None, "{load:?}");
            let last = load.total() - 1;
            for wrong in [last, last / 2, last / 3, 0] {
                region.copy_in(wrong, &[!bytes[wrong]]).unwrap();
                assert_eq!(first_mismatch(&region, &load).unwrap(), Some(wrong as u64), "{load:?}");
            }
        }
    }

    /// The expected bytes: the source pages in the target's order.
    fn right(fabric: &Fabric, load: &BenchLoad) -> Vec<u8> {
        let source = fabric.alloc(load.total(), Access::LOCAL).unwrap();
        content::fill(&source, load).unwrap();
        let size = load.size as usize;
        let mut bytes = vec![0; load.total()];
        for (from, to) in content::sources(load).into_iter().zip(content::targets(load)) {
            let to = to as usize * size;
            source.copy_out(from as usize * size, &mut bytes[to..to + size]).unwrap();
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
