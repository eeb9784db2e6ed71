//! All fuzz targets. Each is a program of its own, built from this file, and its name selects the parser.
#![no_main]

use backend_loopback::fuzz as loopback;
use backend_staging::fuzz as staging;
use multirail_cli::fuzz as command;
use transport_core::fuzz as core;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| match env!("CARGO_BIN_NAME") {
    // The first control frame, which comes from an unauthenticated peer.
    "hello" => core::hello(bytes),
    // Every later control frame.
    "frame" => core::frame(bytes),
    // The framing of a byte stream.
    "stream" => core::stream(bytes),
    // A region's descriptor.
    "descriptor" => core::descriptor(bytes),
    // A loopback peer's offer.
    "offer" => loopback::offer(bytes),
    // Packets of the socket through which a loopback process passes its memory to others.
    "packet" => loopback::packet(bytes),
    // A message ring in shared memory, into which a peer writes any value.
    "message_ring" => loopback::message_ring(bytes),
    // A staging buffer in shared memory, into which a peer writes any value.
    "staging_buffer" => loopback::staging_buffer(bytes),
    // A staging buffer of `backend-staging`, into which a peer writes slot requests and page tables.
    "slots" => staging::slots(bytes),
    // The messages between `send` and `serve`.
    "files" => command::files(bytes),
    // The tables of a tree that `send` offers, and the paths in them.
    "tables" => command::tables(bytes),
    // The journal of a partial file.
    "journal" => command::journal(bytes),
    // The messages between the two sides of a bench.
    "bench" => command::bench(bytes),
    // A recording of the flight recorder: the target reads, prints and converts it.
    "recording" => command::trace(bytes),
    unknown => unreachable!("no fuzz target has the name {unknown}"),
});
