//! The Rust blocks of docs/, each in a function that gives it what it uses. They are compiled here, not run.
#![allow(dead_code, unused_variables, unused_mut, reason = "the blocks are parts of programs")]

use std::sync::Arc;
use std::time::Duration;

use multirail::P2pAllocator;
use multirail::{
    Access, Catalogue, Fabric, FabricBuilder, LocalList, Notifications, OnPeerClosed, Pages, Peer,
    PeerHandle, ReconnectPolicy, Region, RemoteList, RemoteRegion, Result, TraceContext, WriteOptions,
};

#[rustfmt::skip]
async fn failures(fabric: Fabric, kv: Region, from: Pages, to: Pages, options: WriteOptions) -> Result<()> {
let policy = ReconnectPolicy::within(Duration::from_secs(60)); // or attempts(10); delays, jitter
let decode = PeerHandle::connect(&fabric, "10.0.0.7:7411", policy).await?;
let cache = decode.region("cache").await?;                     // by name: so it is found again
let pages = decode.prepare_write_pages(&kv, from, &cache, to, 64 << 10, &options)?;
// After a loss:
let peer = decode.connected().await?;                          // waits until the peer is back, or the limit
pages.current()?.post()?.await?;                               // the same lists, over the new regions
    Ok(())
}

#[rustfmt::skip]
fn metrics(fabric: Fabric) -> Result<()> {
let server = multirail::metrics::MetricsServer::start(&fabric, "127.0.0.1:9469")?; // until it is dropped
    Ok(())
}

#[rustfmt::skip]
async fn traces(peer: Peer, kv: Region, pages: &Pages, cache: RemoteRegion, mut notifications: Notifications) -> Result<()> {
let request: TraceContext = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse()?;
let options = WriteOptions::new().notify(*b"block 7").trace(request);
peer.write_pages_with(&kv, pages, &cache, pages, 64 << 10, &options)?.await?;
// At the peer:
let parent: Option<TraceContext> = notifications.next().await?.trace;
    Ok(())
}

#[rustfmt::skip]
async fn discovery(fabric: Fabric) -> Result<()> {
use std::time::Duration;
use multirail_discovery::{Event, Member, open};

let directory = open("etcd://10.0.0.2:2379/fleet")?;
let listener = fabric.listen("10.0.0.7:0").await?;
let member = Member::new("decode-0", fabric.incarnation())
    .address(listener.local_addr())
    .attribute("role", "decode");
// Listed until it is dropped; renewed each second.
let membership = directory.join(member, Duration::from_secs(3)).await?;

let prefill = directory.lookup("prefill-0").await?;
let peer = fabric.connect(&prefill.addresses[0]).await?;

let mut watch = directory.watch();
loop {
    match watch.next().await {
        Event::Joined(member) => println!("{} is there", member.name),
        Event::Changed { member, .. } => println!("{} was restarted", member.name),
        Event::Left(member) => println!("{} is gone", member.name),
        Event::Outage(error) => println!("nothing new until the directory answers: {error}"),
        Event::Synced => println!("this is everybody"),
        _ => {}
    }
}
}

#[rustfmt::skip]
async fn elastic_group(fabric: Fabric, weights: Region) -> Result<()> {
use multirail::WriteOptions;
use multirail_discovery::{ElasticGroup, ElasticOptions, open};

let directory = open("file:///shared/fleet")?;
let decoders = ElasticOptions::new().only(|member| {
    member.attributes.get("role").is_some_and(|role| role == "decode")
});
let group = ElasticGroup::follow(&fabric, &*directory, decoders)?;
let options = WriteOptions::new().imm(7);
for (member, written) in group.write_all(&weights, 0..weights.len(), "weights", 0, &options).await {
    match written {
        Ok(outcome) => println!("{}: {} bytes", member.name(), outcome.bytes),
        Err(error) => println!("{}: {error}", member.name()),
    }
}
    Ok(())
}

#[rustfmt::skip]
fn lists(peer: Peer, layers: Vec<Region>, their_layers: Vec<RemoteRegion>) -> Result<()> {
let (mut local, mut remote) = (LocalList::new(), RemoteList::new());
for (mine, theirs) in layers.iter().zip(&their_layers) {
    // 1,000 blocks of 64 KiB in each layer.
    local.push_strided(mine, 0, 64 << 10, 1000, 64 << 10)?;
    remote.push_strided(theirs, 0, 64 << 10, 1000, 64 << 10)?;
}
// Blocks 7 and 8 of the first layer go to blocks 3 and 1 of the peer's first layer.
let op = peer.write_list(&local, &[7, 8], &remote, &[3, 1], &WriteOptions::new().imm(1))?;
    Ok(())
}

#[rustfmt::skip]
async fn notifications(builder: FabricBuilder, peer: Peer, local: LocalList, remote: RemoteList) -> Result<()> {
// Both fabrics are opened with memory for notifications.
let fabric = builder.notifications(8 << 20).open()?;
// The target learns of it after all bytes of the transfer are visible.
peer.write_list(&local, .., &remote, .., &WriteOptions::new().notify(*b"request 17"))?.await?;
// At the target:
let notification = fabric.notifications()?.next().await?;
    Ok(())
}

#[rustfmt::skip]
async fn catalogues(fabric: Fabric, peer: Peer, layers: Vec<Region>, address: u64, length: usize) -> Result<()> {
// The owner.
let catalogue = Catalogue::new(layers)?;
catalogue.publish(&fabric, "kv cache")?;
// The peer: a lookup and a read.
let theirs = peer.catalogue("kv cache").await?;
let (region, offset) = theirs.find(address, length)?;
    Ok(())
}

#[rustfmt::skip]
async fn receipts(peer: Peer, src: Region, from: Pages, dst: RemoteRegion, to: Pages) -> Result<()> {
let mut op = peer.write_pages(&src, &from, &dst, &to, 64 << 10)?;
(&mut op).await?;
if let Some(receipt) = op.receipt() {
    println!("posted after {:?}, done after {:?}", receipt.post, receipt.transfer);
    for rail in &receipt.rails {
        println!("{}: {} bytes by {}", rail.device, rail.bytes, rail.path);
    }
}
    Ok(())
}

#[rustfmt::skip]
#[allow(unsafe_code, clippy::undocumented_unsafe_blocks, reason = "a block of the docs, which is not run")]
fn gpu_memory(fabric: Fabric) -> Result<()> {
let gpu = &multirail::cuda::Device::all()?[0];
let memory = Arc::new(multirail::cuda::CudaMemory::new(gpu, 64 << 20)?);
let region = unsafe { fabric.register(memory, Access::REMOTE_WRITE) }?;
    Ok(())
}

type Stream = multirail::cuda::RawStream;

#[rustfmt::skip]
#[allow(unsafe_code, clippy::undocumented_unsafe_blocks, reason = "a block of the docs, which is not run")]
async fn signals([prefill, next]: [Peer; 2], cache: Region, [from, to]: [Pages; 2], theirs: RemoteRegion, step: u32, stream: Stream) -> Result<()> {
    fn decode(_: Stream) {}
let gpu = &multirail::cuda::Device::all()?[0];
let landed = Arc::new(multirail::cuda::CudaSignal::new(gpu)?);
let filled = Arc::new(multirail::cuda::CudaSignal::new(gpu)?);

// Arrivals of imm 1 are counted into `landed`.
let mirror = prefill.imm(1).mirror(landed.clone(), OnPeerClosed::Pass);
// These pages go to `next` once `filled` is at `step`; everything is checked and ready by then.
let pages = next.prepare_write_pages(&cache, &from, &theirs, &to, 64 << 10, &WriteOptions::new().imm(1))?;
let sent = pages.post_when(filled.clone(), step)?;

// In the stream: wait for 512 pages, decode, begin the write.
unsafe { landed.wait_on(stream, (mirror.total() + 512) as u32) }?;
decode(stream);
unsafe { filled.write_on(stream, step) }?;
sent.await?;
    Ok(())
}

#[rustfmt::skip]
fn p2p_memory() -> std::result::Result<(), Box<dyn std::error::Error>> {
let allocator = P2pAllocator::this_host()?.near("0000:4f:00.0".parse()?).reserve(16 << 20);
let memory = Arc::new(allocator.allocate(1 << 20)?);
    Ok(())
}

/// The Rust blocks of a page.
fn blocks(page: &str) -> Vec<String> {
    let mut blocks: Vec<String> = Vec::new();
    let mut is_inside = false;
    for line in page.lines() {
        match line.trim() {
            "```rust" => {
                is_inside = true;
                blocks.push(String::new());
            }
            "```" => is_inside = false,
            _ if is_inside => blocks.last_mut().unwrap().extend([line, "\n"]),
            _ => {}
        }
    }
    blocks
}

/// All pages below a folder.
fn pages(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let below = |path: std::path::PathBuf| match path.is_dir() {
        true => pages(&path),
        false => vec![path],
    };
    entries.flat_map(below).filter(|path| path.extension().is_some_and(|it| it == "md")).collect()
}

#[test]
fn each_rust_block_of_the_docs_is_compiled_here() {
    let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let mut count = 0;
    for path in pages(&docs) {
        let page = std::fs::read_to_string(&path).unwrap();
        assert_eq!(
            page.matches("```rust").count(),
            blocks(&page).len(),
            "{}: begin blocks with ```rust",
            path.display()
        );
        for block in blocks(&page) {
            let is_here = include_str!("docs_blocks.rs").contains(block.trim_end());
            assert!(
                is_here,
                "{}: copy this block to a function of cli/tests/docs_blocks.rs:\n{block}",
                path.display()
            );
            count += 1;
        }
    }
    assert!(count > 0, "no page was read");
}
