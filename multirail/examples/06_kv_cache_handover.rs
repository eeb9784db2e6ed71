//! Disaggregated inference: one process computes a prompt's KV cache (*prefill*), and another
//! process continues from it (*decode*). The pages are written layer by layer, as they are
//! computed.
//!
//! The decode process owns the cache. For each request it picks free pages and sends their
//! numbers to the prefill process. The prefill process writes into these pages directly, with one
//! operation per layer and the request's number as immediate data. After one imm per layer the
//! request can be decoded. Then its pages are free for another request.
//!
//! ```console
//! $ cargo run --example 06_kv_cache_handover
//! ```
//! The program starts itself a second time, as the prefill process.

use std::error::Error;
use std::process::Command;

use multirail::{Access, Pages, Region, Result, WriteOptions};

const LAYERS: usize = 4;
const PAGE: usize = 16 << 10;
/// The number of pages per layer in the decode process.
const SLOTS: usize = 12;
/// The number of pages per layer of a request. Three requests do not fit at once.
const PROMPT: usize = 5;
const REQUESTS: u32 = 8;

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    match (arguments.next().as_deref(), arguments.next()) {
        (Some("prefill"), Some(address)) => Ok(pollster::block_on(prefill(&address))?),
        _ => pollster::block_on(decode()),
    }
}

async fn decode() -> std::result::Result<(), Box<dyn Error>> {
    let fabric = multirail::open()?;
    let cache = fabric.alloc(LAYERS * SLOTS * PAGE, Access::REMOTE_WRITE)?;
    fabric.publish("kv-cache", &cache)?;
    let listener = fabric.listen("127.0.0.1:0").await?;
    let mut process =
        Command::new(std::env::current_exe()?).args(["prefill", &listener.local_addr()]).spawn()?;
    let prefill = listener.accept().await?;

    // Free pages in random order, as after some hours of serving.
    let mut free: Vec<u32> = (0..SLOTS as u32).collect();
    fastrand::shuffle(&mut free);
    let message = fabric.alloc(4 * PROMPT, Access::LOCAL)?;
    let mut asked = Vec::new();
    for request in 0..REQUESTS {
        if free.len() < PROMPT {
            // The cache is full: the oldest request is decoded first, and its pages are reused.
            free.extend(finish(&cache, &prefill, asked.remove(0)).await?);
        }
        let pages = free.split_off(free.len() - PROMPT);
        for (at, page) in pages.iter().enumerate() {
            message.copy_in(4 * at, &page.to_le_bytes())?;
        }
        prefill.send(&message, 0..4 * PROMPT)?.await?;
        asked.push((request, pages));
    }
    for request in asked {
        free.extend(finish(&cache, &prefill, request).await?);
    }
    assert_eq!(free.len(), SLOTS);
    prefill.disconnect();
    assert!(process.wait()?.success(), "the prefill process failed");
    println!("{REQUESTS} requests of {LAYERS} layers handed over, every byte verified");
    Ok(())
}

/// Waits until all layers of a request have arrived, verifies them, and returns its pages.
async fn finish(cache: &Region, prefill: &multirail::Peer, request: (u32, Vec<u32>)) -> Result<Vec<u32>> {
    let (request, pages) = request;
    prefill.imm(request).expect(LAYERS as u64).await?;
    let mut page = vec![0; PAGE];
    for layer in 0..LAYERS {
        for (at, slot) in pages.iter().enumerate() {
            cache.copy_out((layer * SLOTS + *slot as usize) * PAGE, &mut page)?;
            assert_eq!(page, computed(request, layer, at), "request {request}, layer {layer}, page {at}");
        }
    }
    Ok(pages)
}

async fn prefill(address: &str) -> Result<()> {
    let fabric = multirail::open()?;
    let orders = fabric.recv_pool(4, 4 * PROMPT)?;
    let decode = fabric.connect(address).await?;
    let cache = decode.region("kv-cache").await?;
    let computing = fabric.alloc(LAYERS * PROMPT * PAGE, Access::LOCAL)?;
    let ours: Vec<u32> = (0..PROMPT as u32).collect();
    for request in 0..REQUESTS {
        let pages = orders.next().await?.to_vec();
        let pages = pages.chunks_exact(4).map(|le| u32::from_le_bytes([le[0], le[1], le[2], le[3]]));
        let pages: Vec<u32> = pages.collect();
        let mut layers = Vec::new();
        for layer in 0..LAYERS {
            for at in 0..PROMPT {
                computing.copy_in((layer * PROMPT + at) * PAGE, &computed(request, layer, at))?;
            }
            // The transfer of this layer overlaps with the computation of the next one.
            let from = Pages::new(ours.clone()).offset(layer * PROMPT * PAGE);
            let to = Pages::new(pages.clone()).offset(layer * SLOTS * PAGE);
            let options = WriteOptions::new().imm(request);
            layers.push(decode.write_pages_with(&computing, &from, &cache, &to, PAGE, &options)?);
        }
        for layer in layers {
            layer.await?;
        }
    }
    decode.closed().await;
    Ok(())
}

/// Stands for the computed keys and values of one page.
fn computed(request: u32, layer: usize, page: usize) -> Vec<u8> {
    (0..PAGE).map(|byte| (byte ^ (byte >> 8) ^ layer << 3 ^ page << 5) as u8 ^ request as u8).collect()
}
