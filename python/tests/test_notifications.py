"""What arrives at a peer: imms, notifications, messages."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time

import pytest
from conftest import LIMIT, Pair, connected, pattern

import multirail


def test_an_imm_arrives_after_the_bytes(pair: Pair) -> None:
    src, dst, remote = pair.regions(1 << 20)
    counter = pair.ba.imm(2**32 - 1)
    for round_ in range(20):
        src.write_bytes(pattern(1 << 20, round_))
        operation = pair.ab.write(src, remote, imm=2**32 - 1)
        counter.expect(round_ + 1).wait(LIMIT)
        assert dst.read_bytes() == pattern(1 << 20, round_)
        operation.wait(LIMIT)
    assert counter.count == 20


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_notification_takes_the_trace_along(pair: Pair) -> None:
    src, _, remote = pair.regions(1 << 20)
    arriving = pair.b.notifications()
    for transfer in (
        lambda trace: pair.ab.notify(b"", trace=trace),
        lambda trace: pair.ab.write(src, remote, notify=b"", trace=trace),
        lambda trace: pair.ab.write(src, remote, 64, notify=b"", trace=trace),
        lambda trace: pair.ab.read(src, remote, notify=b"", trace=trace),
        lambda trace: pair.ab.write_pages(src, [1, 0], remote, [0, 1], 4096, notify=b"", trace=trace),
        lambda trace: pair.ab.prepare_write_pages(src, [1, 0], remote, [0, 1], 4096, notify=b"", trace=trace).post(),
    ):
        for trace in (TRACE, None):
            transfer(trace).wait(LIMIT)
            assert arriving.next().wait(LIMIT).trace == trace
    pair.ab.write(src, remote, 64, trace=TRACE).wait(LIMIT)
    for wrong in ("", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", TRACE.upper(), TRACE + "-more"):
        with pytest.raises(multirail.InvalidRequest, match="traceparent"):
            pair.ab.write(src, remote, 64, trace=wrong)
    assert arriving.try_next() is None


EXPORT = f"""
import http.server, os, sys, threading
import multirail

os.environ["HTTP_PROXY"] = os.environ["http_proxy"] = "http://127.0.0.1:9"

bodies = []

class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
endpoint = f"http://127.0.0.1:{{server.server_port}}/v1/traces"
with multirail.SpanExporter(endpoint, "prefill") as exporter:
    try:
        multirail.SpanExporter(endpoint, "again")
        sys.exit("a second exporter")
    except multirail.Busy:
        pass
    with multirail.Fabric("loopback") as fabric:
        peer, _ = fabric.connect_local(fabric)
        src, dst = fabric.alloc(8 << 20), fabric.alloc(8 << 20, "write")
        peer.write(src, peer.import_region(dst.descriptor()), trace="{TRACE}").wait(30)
    exporter.flush()
    path, spans = bodies[0]
    assert path == "/v1/traces", path
    # The Rust test decodes it.
    trace, parent = (bytes.fromhex(part) for part in "{TRACE}".split("-")[1:3])
    assert b"prefill" in spans and b"transfer" in spans and trace in spans and parent in spans
exporter.close()
try:
    exporter.flush()
    sys.exit("flushed after its end")
except multirail.Closed:
    pass
try:
    multirail.SpanExporter("https://127.0.0.1", "a")
    sys.exit("no error")
except multirail.InvalidRequest:
    pass
print("exported")
"""


def test_transfers_are_spans_of_a_collector() -> None:
    # A process has one exporter.
    ran = subprocess.run([sys.executable, "-c", EXPORT], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("exported\n", "", 0)


def test_a_notification_leads_to_its_peer(pair: Pair) -> None:
    pair.ab.notify(b"hello").wait(LIMIT)
    arrived = pair.b.notifications().next().wait(LIMIT)
    assert pair.b.peer(arrived.peer).id == pair.ba.id == arrived.peer
    for fabric, number in ((pair.a, arrived.peer), (pair.b, pair.ab.id), (pair.b, 0), (pair.b, 2**64 - 1)):
        with pytest.raises(multirail.NotFound, match="no peer with number"):
            fabric.peer(number)
    pair.ab.disconnect()
    until = time.monotonic() + LIMIT
    with pytest.raises(multirail.NotFound):
        while time.monotonic() < until:
            pair.b.peer(arrived.peer)


def test_imms_are_counted_and_taken(pair: Pair) -> None:
    counter = pair.ba.imm(0)
    assert counter.count == 0 and counter.try_take() is False
    counter.expect(0).wait(LIMIT)
    for _ in range(5):
        pair.ab.write_imm(0).wait(LIMIT)
    counter.expect(5).wait(LIMIT)
    assert counter.try_take(6) is False and counter.try_take(2) is True
    assert counter.count == pair.ba.imm(0).count == 3
    assert pair.ba.imm(1).count == pair.ab.imm(0).count == 0
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            pair.ba.imm(wrong)
        with pytest.raises(OverflowError):
            pair.ab.write_imm(wrong)


def test_arrivals_are_a_stream(pair: Pair) -> None:
    pair.ab.write_imm(3).wait(LIMIT)

    async def main() -> int:
        writes = [pair.ab.write_imm(3) for _ in range(50)]
        taken = 0
        async for arrived in pair.ba.imm(3).arrivals():
            assert arrived >= 1
            taken += arrived
            if taken == 51:
                break
        await asyncio.gather(*writes)
        return taken

    assert asyncio.run(main()) == 51
    assert pair.ba.imm(3).count == 0


def test_one_operation_at_a_time_uses_a_stream(pair: Pair) -> None:
    for stream in (pair.ba.imm(1).arrivals(), pair.b.notifications()):
        first = stream.next()
        with pytest.raises(RuntimeError, match="another operation"):
            stream.next()
        first.cancel()
        with pytest.raises(multirail.Cancelled):
            first.wait(LIMIT)
        again = stream.next()
        del again
        gc.collect()
        assert not stream.next().done()


def test_a_cancelled_next_takes_nothing(pair: Pair) -> None:
    arrivals = pair.ba.imm(1).arrivals()
    for _ in range(20):
        waiting = arrivals.next()
        pair.ab.write_imm(1).detach()
        if waiting.cancel():
            assert arrivals.next().wait(LIMIT) == 1
        else:
            assert waiting.wait(LIMIT) == 1


@pytest.mark.parametrize("length", [0, 1, 100, 4096, 60_000, 1 << 20])
def test_a_notification_alone(pair: Pair, length: int) -> None:
    sent = pair.ab.notify(pattern(length))
    arrived = pair.b.notifications().next().wait(LIMIT)
    sent.wait(LIMIT)
    assert arrived.data == pattern(length) and arrived.peer == pair.ba.id
    assert f"{length} bytes" in repr(arrived)


def test_a_notification_arrives_after_the_bytes_of_its_transfer(pair: Pair) -> None:
    src, dst, remote = pair.regions(1 << 20)
    arrivals = pair.b.notifications()
    assert arrivals.try_next() is None
    for round_ in range(20):
        src.write_bytes(pattern(1 << 20, round_))
        operation = pair.ab.write(src, remote, notify=bytearray(b"round %d" % round_))
        assert arrivals.next().wait(LIMIT).data == b"round %d" % round_
        assert dst.read_bytes() == pattern(1 << 20, round_)
        operation.wait(LIMIT)
    pair.ab.write_pages(src, [0], remote, [1], 4096, notify=b"pages").wait(LIMIT)
    pair.ab.read_pages(src, [0], remote, [1], 4096, notify=memoryview(b"read pages")).wait(LIMIT)
    pair.ab.read(src, remote, notify=b"read").wait(LIMIT)
    assert [arrivals.next().wait(LIMIT).data for _ in range(3)] == [b"pages", b"read pages", b"read"]


def test_notifications_of_one_peer_keep_their_order(pair: Pair) -> None:
    async def main() -> list[bytes]:
        sent = [pair.ab.notify(b"%d" % number) for number in range(500)]
        arrived = []
        async for notification in pair.b.notifications():
            arrived.append(notification.data)
            if len(arrived) == 500:
                break
        await asyncio.gather(*sent)
        return arrived

    assert asyncio.run(main()) == [b"%d" % number for number in range(500)]


def test_a_fabric_without_memory_for_notifications() -> None:
    with connected() as pair:
        with pytest.raises(multirail.Error) as caught:
            pair.b.notifications()
        assert "notifications" in str(caught.value)
        with pytest.raises(multirail.Error):
            pair.ab.notify(b"nobody takes it").wait(LIMIT)


@pytest.mark.parametrize("length", [0, 1, 4096, 65_536])
def test_a_message_reaches_a_posted_receive(pair: Pair, length: int) -> None:
    buffer, src = pair.b.alloc((1 << 20) + 200), pair.a.alloc((1 << 20) + 10)
    src.write_bytes(pattern(1 << 20), 10)
    receive = pair.b.recv(buffer, (1 << 20) + 50, 100)
    pair.ab.send(src, length, 10, imm=77).wait(LIMIT)
    outcome = receive.wait(LIMIT)
    assert (outcome.bytes, outcome.imm, outcome.peer) == (length, 77, pair.ba.id)
    assert buffer.read_bytes(0, length + 200) == bytes(100) + pattern(length) + bytes(100)


def test_a_message_waits_for_a_receive(pair: Pair) -> None:
    src, buffer = pair.a.alloc(100), pair.b.alloc(100)
    src.write_bytes(pattern(100))
    send = pair.ab.send(src)
    receive = pair.b.recv(buffer)
    send.wait(LIMIT)
    assert receive.wait(LIMIT).bytes == 100 and buffer.read_bytes() == pattern(100)


def test_a_message_that_is_too_long(pair: Pair) -> None:
    buffer = pair.b.alloc(20)
    receive = pair.b.recv(buffer, 10)
    src = pair.a.alloc(pair.ab.max_message + 1)
    src.write_bytes(b"x" * len(src))
    pair.ab.send(src, 11).detach()
    with pytest.raises(multirail.TooLarge):
        receive.wait(LIMIT)
    assert buffer.read_bytes(10) == bytes(10)
    with pytest.raises(multirail.TooLarge):
        pair.ab.send(src).wait(LIMIT)


def test_a_pool_of_receives(pair: Pair) -> None:
    pool = pair.b.recv_pool(4, 4096)
    assert pool.try_next() is None
    src = pair.a.alloc(4096)

    async def main() -> None:
        for round_ in range(50):
            src.write_bytes(pattern(4096, round_))
            imm = round_ if round_ % 2 else None
            _, message = await asyncio.gather(pair.ab.send(src, round_ + 1, imm=imm), pool.next())
            assert bytes(message) == pattern(round_ + 1, round_) and len(message) == round_ + 1
            assert (message.imm, message.peer) == (imm, pair.ba.id)
            del message
        sends = [pair.ab.send(src, 10) for _ in range(20)]
        count = 0
        async for message in pool:
            assert bytes(message) == pattern(10, 49)
            del message
            count += 1
            if count == 20:
                break
        await asyncio.gather(*sends)

    asyncio.run(asyncio.wait_for(main(), LIMIT))


def test_a_message_outlives_its_pool(pair: Pair) -> None:
    pool = pair.b.recv_pool(1, 64)
    src = pair.a.alloc(5)
    src.write_bytes(b"hello")
    pair.ab.send(src).wait(LIMIT)
    message = pool.next().wait(LIMIT)
    del pool
    gc.collect()
    assert bytes(message) == b"hello"
