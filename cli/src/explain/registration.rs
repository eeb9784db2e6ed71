//! How a card is given the memory.

use super::super::doctor::{Ways, ways_of_gpu_memory};
use super::{Choice, Memory};

const REGISTRATION: &str = "registration";
const DMA_BUF: &str = "DMA-BUF";
const PEERMEM: &str = "nvidia_peermem";

/// The ways in order of preference.
pub fn choices(memory: &Memory<'_>, is_here: bool) -> Vec<Choice> {
    let Memory::Gpu(..) = memory else {
        let why = "host memory is pinned by the card's driver";
        return vec![Choice::taken(REGISTRATION, "by address", why)];
    };
    if !is_here {
        let why = "depends on the machine's kernel and GPU driver: ask there";
        return [DMA_BUF, PEERMEM].map(|way| Choice::left(REGISTRATION, way, why)).into();
    }
    let Ways { dma_buf, peermem } = ways_of_gpu_memory();
    let mut choices = Vec::new();
    let is_dma_buf = dma_buf.is_ok();
    choices.push(match dma_buf {
        Ok(words) => Choice::taken(REGISTRATION, DMA_BUF, words),
        Err(why) => Choice::left(REGISTRATION, DMA_BUF, why),
    });
    choices.push(match peermem {
        Ok(_) if is_dma_buf => Choice::left(REGISTRATION, PEERMEM, "DMA-BUF comes first"),
        Ok(words) => Choice::taken(REGISTRATION, PEERMEM, words),
        Err(why) => Choice::left(REGISTRATION, PEERMEM, why),
    });
    let why = "never by itself: what was asked for and is not there is an error";
    choices.push(Choice::left(REGISTRATION, "staging in host memory", why));
    choices
}
