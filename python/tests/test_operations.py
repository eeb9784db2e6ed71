"""Transfers, and what an operation can do besides asyncio."""

from __future__ import annotations

import gc
import json
import warnings

import pytest
from conftest import LIMIT, Pair, pattern

import multirail

BIG = 128 << 20
"""Bytes that take long enough to be cancelled under way."""


@pytest.mark.parametrize("length", [1, 63, 4096, 16 << 10, (16 << 10) + 1, 1 << 20, (3 << 20) + 5])
def test_write_moves_exactly_the_bytes_that_were_named(pair: Pair, length: int) -> None:
    src, dst, remote = pair.regions(length + 300)
    data = pattern(length + 300)
    src.write_bytes(data)
    outcome = pair.ab.write(src, remote, length, 100, 200).wait(LIMIT)
    assert outcome.bytes == length
    assert dst.read_bytes() == bytes(200) + data[100 : 100 + length] + bytes(100)
    assert src.read_bytes() == data


@pytest.mark.parametrize("length", [1, 63, 4096, 16 << 10, (16 << 10) + 1, 1 << 20, (3 << 20) + 5])
def test_read_moves_exactly_the_bytes_that_were_named(pair: Pair, length: int) -> None:
    here, there, remote = pair.regions(length + 300)
    data = pattern(length + 300)
    there.write_bytes(data)
    outcome = pair.ab.read(here, remote, length, 200, 100).wait(LIMIT)
    assert outcome.bytes == length
    assert here.read_bytes() == bytes(200) + data[100 : 100 + length] + bytes(100)


def test_without_a_length_a_transfer_goes_to_the_end_of_the_local_region(pair: Pair) -> None:
    src, dst, remote = pair.regions(1000)
    src.write_bytes(pattern(1000))
    assert pair.ab.write(src, remote).wait(LIMIT).bytes == 1000
    assert dst.read_bytes() == pattern(1000)
    assert pair.ab.write(src, remote, src_offset=990).wait(LIMIT).bytes == 10
    assert dst.read_bytes(0, 10) == pattern(1000)[990:]
    assert pair.ab.read(src, remote, dst_offset=400).wait(LIMIT).bytes == 600
    assert src.read_bytes(400) == dst.read_bytes(0, 600)


@pytest.mark.parametrize(
    "options", [{"cold": True}, {"deadline": 20.0}, {"paths": "memory-copy"}, {"imm": 7}, {"coalesce": "auto"}]
)
def test_options_leave_the_bytes_alone(pair: Pair, options: dict[str, object]) -> None:
    src, dst, remote = pair.regions(100_000)
    src.write_bytes(pattern(100_000))
    pair.ab.write(src, remote, **options).wait(LIMIT)
    assert dst.read_bytes() == pattern(100_000)
    options.pop("imm", None)
    src.write_bytes(bytes(100_000))
    pair.ab.read(src, remote, **options).wait(LIMIT)
    assert src.read_bytes() == pattern(100_000)


def test_what_cannot_be_coalesced_is_refused(pair: Pair) -> None:
    src, _dst, remote = pair.regions(4096)
    for coalesce, advice in [("always", "MULTIRAIL_COALESCE"), ("sometimes", "never, auto or always")]:
        with pytest.raises(multirail.Error, match=advice):
            pair.ab.write(src, remote, coalesce=coalesce)
        with pytest.raises(multirail.Error, match=advice):
            pair.ab.read(src, remote, coalesce=coalesce)


def test_a_path_that_does_not_lead_there_is_refused(pair: Pair) -> None:
    src, _dst, remote = pair.regions(4096)
    with pytest.raises(multirail.Error):
        pair.ab.write(src, remote, paths="gpu-copy").wait(LIMIT)
    pair.ab.set_paths(["gpu-copy"])
    with pytest.raises(multirail.Error):
        pair.ab.write(src, remote).wait(LIMIT)
    pair.ab.set_paths(["memory-copy", "rdma"])
    assert pair.ab.write(src, remote).wait(LIMIT).bytes == 4096


@pytest.mark.parametrize("length", [100, 100_000, 10_000_000])
def test_the_rails_of_a_receipt_add_up(pair: Pair, length: int) -> None:
    src, _dst, remote = pair.regions(length)
    operation = pair.ab.write(src, remote)
    outcome = operation.wait(LIMIT)
    receipt = operation.receipt()
    assert receipt is not None
    assert (receipt.bytes, receipt.work_requests, receipt.merged) == (
        outcome.bytes,
        outcome.work_requests,
        outcome.merged,
    )
    assert sum(rail.bytes for rail in receipt.rails) == length
    assert 0 <= receipt.post <= receipt.transfer < LIMIT
    assert all(rail.device and rail.path and rail.rail >= 0 for rail in receipt.rails)
    assert str(length) in repr(receipt) and str(length) in repr(outcome)
    assert outcome.peer is None and outcome.imm is None


def test_there_is_no_receipt_without_success(pair: Pair) -> None:
    operation = pair.b.recv(pair.b.alloc(64))
    assert operation.receipt() is None
    operation.cancel()
    with pytest.raises(multirail.Cancelled):
        operation.wait(LIMIT)
    assert operation.receipt() is None


def test_counters_count_the_bytes_of_the_rails(pair: Pair) -> None:
    src, _dst, remote = pair.regions(1 << 20)
    before = {(row["transport"], row["rail"]): row for row in pair.a.counters()}
    operation = pair.ab.write(src, remote)
    operation.wait(LIMIT)
    receipt = operation.receipt()
    assert receipt is not None
    by_rails = sum(rail.bytes for rail in receipt.rails if rail.transport is not None)
    grown = sum(row["bytes"] - before[row["transport"], row["rail"]]["bytes"] for row in pair.a.counters())
    assert grown == by_rails
    assert {"posts", "doorbells", "completions", "errors", "retries", "direct"} <= set(pair.a.counters()[0])


def test_wait_returns_the_same_result_again(pair: Pair) -> None:
    src, _dst, remote = pair.regions(1 << 20)
    operation = pair.ab.write(src, remote)
    assert operation.wait(LIMIT).bytes == operation.wait(0).bytes == operation.result().bytes == 1 << 20
    assert operation.done() and not operation.cancelled() and operation.exception() is None
    assert operation.cancel() is False
    assert repr(operation) == "<Operation done, 1048576 bytes>"


def test_a_wait_that_ran_out_of_time_goes_on(pair: Pair) -> None:
    arrived = pair.ba.imm(5).expect(1)
    with pytest.raises(multirail.DeadlineExceeded, match="wait again") as caught:
        arrived.wait(0.01)
    assert isinstance(caught.value, TimeoutError) and caught.value.operation == "wait"
    assert not arrived.done() and repr(arrived) == "<Operation under way>"
    with pytest.raises(multirail.DeadlineExceeded):
        arrived.wait(0)
    pair.ab.write_imm(5).wait(LIMIT)
    assert arrived.wait(LIMIT) is None
    assert arrived.done()


def test_an_operation_that_is_not_over_has_no_result(pair: Pair) -> None:
    import asyncio

    receive = pair.b.recv(pair.b.alloc(64))
    for ask in (receive.result, receive.exception):
        with pytest.raises(asyncio.InvalidStateError, match="not over"):
            ask()
    assert receive.cancel() is True
    with pytest.raises(multirail.Cancelled):
        receive.wait(LIMIT)
    assert receive.cancelled()
    assert isinstance(receive.exception(), multirail.Cancelled)
    assert receive.cancel() is False


def test_after_a_cancel_no_byte_moves(pair: Pair) -> None:
    src, dst, remote = pair.regions(BIG)
    src.write_bytes(b"\xff" * BIG)
    operation = pair.ab.write(src, remote)
    operation.cancel()
    try:
        assert operation.wait(LIMIT).bytes == BIG
    except multirail.Cancelled:
        assert operation.cancelled()
    before = dst.read_bytes()
    pair.ab.drain().wait(LIMIT)
    assert dst.read_bytes() == before


def test_a_dropped_operation_is_cancelled_with_a_warning(pair: Pair) -> None:
    receive = pair.b.recv(pair.b.alloc(64))
    with pytest.warns(ResourceWarning, match="dropped before it was over"):
        del receive
        gc.collect()
    # The receive is gone, so the next one gets the message.
    buffer = pair.b.alloc(64)
    receive = pair.b.recv(buffer)
    message = pair.a.alloc(5)
    message.write_bytes(b"hello")
    pair.ab.send(message).wait(LIMIT)
    assert receive.wait(LIMIT).bytes == 5
    assert buffer.read_bytes(0, 5) == b"hello"


def test_a_detached_operation_runs_to_its_end_without_a_warning(pair: Pair) -> None:
    src, dst, remote = pair.regions(BIG)
    src.write_bytes(b"\xff" * BIG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operation = pair.ab.write(src, remote, imm=3)
        operation.detach()
        operation.detach()
        del operation
        gc.collect()
    pair.ba.imm(3).expect(1).wait(LIMIT)
    assert dst.read_bytes() == b"\xff" * BIG


def test_drain_and_warm_up(pair: Pair) -> None:
    src, dst, remote = pair.regions(BIG)
    src.write_bytes(b"\x11" * BIG)
    pair.ab.warm_up().wait(LIMIT)
    pair.ab.write(src, remote).detach()
    assert pair.ab.drain().wait(LIMIT) is None
    assert dst.read_bytes() == b"\x11" * BIG


def test_a_deadline_that_has_passed(pair: Pair) -> None:
    src, _dst, remote = pair.regions(BIG)
    operation = pair.ab.write(src, remote, deadline=1e-6)
    with pytest.raises(multirail.DeadlineExceeded) as caught:
        operation.wait(LIMIT)
    assert caught.value.kind == "deadline_exceeded" and caught.value.hint


def test_explain_says_what_a_transfer_would_do(pair: Pair) -> None:
    src, _dst, remote = pair.regions(1 << 20)
    assert "loopback" in pair.ab.explain()
    explained = [
        pair.ab.explain_write(src, remote, imm=1),
        pair.ab.explain_write(src, remote, 100, 1, 2, paths="memory-copy"),
        pair.ab.explain_read(src, remote, 100, 1, 2),
        pair.ab.explain_write_pages(src, [0, 1], remote, [2, 3], 4096),
        *pair.ab.prepare_write_pages(src, [0, 1], remote, [2, 3], 4096).explain(),
    ]
    for explanation in explained:
        assert len(str(explanation).splitlines()) > 1
        assert isinstance(json.loads(explanation.to_json()), dict)
    with pytest.raises(multirail.OutOfBounds):
        pair.ab.explain_write(src, remote, (1 << 20) + 1)


def test_peers_have_numbers_and_names(pair: Pair) -> None:
    assert pair.ab.is_alive and pair.ba.is_alive
    assert pair.ab.incarnation == pair.b.incarnation and pair.ba.incarnation == pair.a.incarnation
    assert pair.a.incarnation != pair.b.incarnation
    assert pair.ab.tenant == "" and pair.ab.max_message >= 4096
    assert repr(pair.ab) == f"<Peer {pair.ab.id}>"


def test_a_prepared_transfer_is_posted_many_times(pair: Pair) -> None:
    src, dst, remote = pair.regions(64 << 10)
    prepared = pair.ab.prepare_write_pages(src, range(16), remote, range(15, -1, -1), 4096)
    assert prepared.bytes == 64 << 10
    for round_ in range(20):
        data = pattern(64 << 10, round_)
        src.write_bytes(data)
        assert prepared.post().wait(LIMIT).bytes == 64 << 10
        assert dst.read_bytes() == b"".join(data[page << 12 : (page + 1) << 12] for page in range(15, -1, -1))
    under_way = [prepared.post() for _ in range(50)]
    assert [operation.wait(LIMIT).bytes for operation in under_way] == [64 << 10] * 50


def test_a_prepared_transfer_keeps_its_regions(pair: Pair) -> None:
    src, dst, remote = pair.regions(4096)
    src.write_bytes(pattern(4096))
    prepared = pair.ab.prepare_write_pages(src, [0], remote, [0], 4096)
    del src, remote
    gc.collect()
    prepared.post().wait(LIMIT)
    assert dst.read_bytes() == pattern(4096)


def test_a_prepared_transfer_takes_an_imm_or_a_notification(pair: Pair) -> None:
    src, _dst, remote = pair.regions(4096)
    with_imm = pair.ab.prepare_write_pages(src, [0], remote, [0], 4096, imm=1)
    with_imm.post().wait(LIMIT)
    with_imm.post(imm=2).wait(LIMIT)
    for imm in (1, 2):
        pair.ba.imm(imm).expect(1).wait(LIMIT)
        assert pair.ba.imm(imm).count == 1
    with pytest.raises(ValueError, match="not both"):
        with_imm.post(imm=1, notify=b"x")
    told = pair.ab.prepare_write_pages(src, [0], remote, [0], 4096, notify=b"first")
    arrivals = pair.b.notifications()
    told.post().wait(LIMIT)
    told.post(notify=b"second").wait(LIMIT)
    assert [arrivals.next().wait(LIMIT).data for _ in range(2)] == [b"first", b"second"]


def test_a_prepared_read(pair: Pair) -> None:
    here, there, remote = pair.regions(16 << 10)
    there.write_bytes(pattern(16 << 10))
    prepared = pair.ab.prepare_read_pages(here, [3, 0], remote, [1, 2], 4096, notify=b"read")
    prepared.post().wait(LIMIT)
    data = there.read_bytes()
    assert here.read_bytes() == data[8192:12288] + bytes(8192) + data[4096:8192]
    assert pair.b.notifications().next().wait(LIMIT).data == b"read"
