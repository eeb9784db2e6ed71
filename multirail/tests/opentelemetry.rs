//! Operations as spans of OpenTelemetry's traces: across two fabrics, and exported to a collector over HTTP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use backend_loopback::Loopback;
use multirail::opentelemetry::{OtlpExporter, context_of, current, link, set_parent};
use multirail::{
    Access, ErrorKind, Fabric, FabricBuilder, Notification, Pages, ReadOptions, SendOptions, TraceContext,
    TransportConfig, WriteOptions, wait,
};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

const LEN: usize = 8 << 20;

/// A collector that hands on the spans it gets.
fn collector() -> (SocketAddr, Receiver<Span>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, spans) = channel();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let sender = sender.clone();
            // One connection carries many requests, and another may be open meanwhile.
            std::thread::spawn(move || {
                let mut client = BufReader::new(client.unwrap());
                while let Some(request) = read_request(&mut client) {
                    let request = ExportTraceServiceRequest::decode(&request[..]).unwrap();
                    for resource in request.resource_spans {
                        let service = resource.resource.unwrap().attributes;
                        assert!(
                            service.iter().any(|attribute| attribute.key == "service.name"),
                            "{service:?}"
                        );
                        let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
                        spans.for_each(|span| sender.send(span).unwrap());
                    }
                    client.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
                }
            });
        }
    });
    (address, spans)
}

/// The body of an HTTP request. `None` at the end of the connection.
fn read_request(client: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let (mut len, mut line) = (0, String::new());
    loop {
        line.clear();
        if client.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if let Some(("content-length", value)) = line.to_lowercase().trim().split_once(": ") {
            len = value.parse().unwrap();
        }
        if line == "\r\n" {
            let mut body = vec![0; len];
            client.read_exact(&mut body).unwrap();
            return Some(body);
        }
    }
}

fn fabric() -> Fabric {
    let loopback = TransportConfig::new("loopback", Arc::new(Loopback::new()));
    FabricBuilder::new().transport(loopback).notifications(4 << 20).open().unwrap()
}

#[test]
fn operations_are_spans_of_the_requests_trace() {
    let (address, spans) = collector();
    let exporter = OtlpExporter::start(&format!("http://{address}/v1/traces"), "prefill").unwrap();
    tracing_subscriber::registry().with(exporter.layer()).init();
    link().unwrap();
    assert_eq!(link().unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(current(), None);

    let (prefill, decode) = (fabric(), fabric());
    let (peer, _) = prefill.connect_local(&decode).unwrap();
    let src = prefill.alloc(LEN, Access::LOCAL).unwrap();
    let dst = decode.alloc(LEN, Access::all()).unwrap();
    let remote = peer.import(&dst.descriptor()).unwrap();
    let mut arriving = decode.notifications().unwrap();
    let mut next = || -> Notification { wait(arriving.next(), limit::HANG).unwrap().unwrap() };

    // Each of these is a child of the caller's span.
    let request = TraceContext::new([0xab; 16], [0xcd; 8], TraceContext::SAMPLED).unwrap();
    let write = WriteOptions::new().trace(request);
    let read = ReadOptions::new().trace(request);
    let pages = Pages::new([1, 0]);
    let half = LEN / 2;
    let ops = [
        peer.write_with(&src, 0..LEN, &remote, 0, &write.clone().notify(*b"handed over")),
        peer.write_with(&src, 0..64, &remote, 0, &write),
        peer.read_with(&src, 0..LEN, &remote, 0, &read),
        peer.write_pages_with(&src, &pages, &remote, &pages, half, &write),
        peer.prepare_read_pages(&src, &pages, &remote, &pages, half, &read).unwrap().post(),
        peer.notify_with(b"and more", &SendOptions::new().trace(request)),
    ];
    for op in ops {
        op.unwrap().wait(limit::HANG).unwrap();
    }
    let mut arrived = [next(), next()];
    arrived.sort_by_key(|notification| notification.bytes.len());
    assert_eq!([&arrived[0].bytes[..], &arrived[1].bytes], [&b"and more"[..], b"handed over"]);
    for notification in &arrived {
        // The peer's work is a child of the operation, not of the request.
        let trace = notification.trace.unwrap();
        assert_eq!((trace.trace_id(), trace.flags()), (request.trace_id(), TraceContext::SAMPLED));
        assert_ne!(trace.span_id(), request.span_id());
    }
    let handover = arrived[1].trace.unwrap();
    let work = tracing::info_span!(target: "multirail::test", "decode");
    set_parent(&work, handover);
    assert_eq!(context_of(&work).unwrap().trace_id(), request.trace_id());

    // Without a trace context of the caller's, the current span is the parent.
    let mut written = work.in_scope(|| {
        let options = WriteOptions::new().notify(*b"back");
        peer.write_with(&src, 0..LEN, &remote, 0, &options).unwrap()
    });
    written.wait(limit::HANG).unwrap();
    assert_eq!(next().trace, context_of(&work));
    let of_work = context_of(&work).unwrap().span_id();
    drop(work);
    peer.notify(b"none").unwrap().wait(limit::HANG).unwrap();
    assert_eq!(next().trace, None);
    prefill.close();
    decode.close();

    exporter.flush().unwrap();
    let spans: Vec<Span> = spans.try_iter().collect();
    let of_trace: Vec<&Span> = spans.iter().filter(|span| span.trace_id == request.trace_id()).collect();
    assert_eq!(of_trace.len(), spans.len(), "what is part of no trace is not exported: {spans:#?}");
    let children = |parent: &[u8], name: &str| -> Vec<&Span> {
        let is_child = |span: &&&Span| span.parent_span_id == parent && span.name == name;
        of_trace.iter().filter(is_child).copied().collect()
    };
    let transfers = children(&request.span_id(), "transfer");
    assert_eq!(transfers.len(), 6, "{transfers:#?}");
    for transfer in &transfers {
        assert!(transfer.end_time_unix_nano >= transfer.start_time_unix_nano);
    }
    let of_handover: Vec<_> =
        transfers.iter().filter(|transfer| transfer.span_id == handover.span_id()).collect();
    assert_eq!(of_handover.len(), 1);
    let operations = children(&handover.span_id(), "operation");
    assert!(!operations.is_empty());
    let last_end = operations.iter().map(|operation| operation.end_time_unix_nano).max().unwrap();
    assert!(of_handover[0].end_time_unix_nano >= last_end, "a transfer lasts as long as its operations");
    let decode = children(&handover.span_id(), "decode");
    assert_eq!(decode.len(), 1);
    assert_eq!(decode[0].span_id, of_work);
    assert!(!children(&of_work, "operation").is_empty());

    // A collector that is not there, and what is no collector.
    let nobody = OtlpExporter::start("http://127.0.0.1:1/", "a").unwrap();
    tracing::subscriber::with_default(tracing_subscriber::registry().with(nobody.layer()), || {
        let lost = tracing::info_span!(target: "multirail::test", "lost");
        set_parent(&lost, request);
        lost.in_scope(|| ());
    });
    assert_eq!(nobody.flush().unwrap_err().kind(), ErrorKind::Io);
    for wrong in ["https://127.0.0.1:4318", "127.0.0.1:4318", "http://", "http://a b/"] {
        let error = OtlpExporter::start(wrong, "a").map(|_| ()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidRequest, "{wrong}: {error}");
    }
}
