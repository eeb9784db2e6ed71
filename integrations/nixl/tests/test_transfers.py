"""Writes and reads within one process: lists, strides, reposts, releases."""

from __future__ import annotations

import contextlib
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from nixl._api import nixlBind
from nixl_pairs import (
    PAGE,
    end_of,
    finish,
    make_agent,
    next_name,
    notifications,
    pair,
    pattern,
    register,
    rows,
    until,
)

REGIONS = 80


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_scattered_over_many_regions(operation: str) -> None:
    a, b = make_agent(next_name("initiator")), make_agent(next_name("target"))
    here = [pattern(8 * PAGE, i) for i in range(REGIONS)]
    there = [pattern(8 * PAGE, 100 + i) for i in range(REGIONS)]
    register(a, *here), register(b, *there)
    a.add_remote_agent(b.get_agent_metadata())
    shuffled = np.random.default_rng(1).permutation(REGIONS * 8)
    local_rows = np.concatenate([rows(array, range(8)) for array in here])
    remote_rows = np.concatenate([rows(array, range(8)) for array in there])
    local = a.prep_xfer_dlist("NIXL_INIT_AGENT", local_rows, "DRAM")
    remote = a.prep_xfer_dlist(b.name, remote_rows, "DRAM")
    chosen = shuffled[: REGIONS * 4]
    handle = a.make_prepped_xfer(operation, local, chosen.tolist(), remote, chosen[::-1].tolist(), b"scattered")
    before_here, before_there = np.concatenate(here), np.concatenate(there)
    finish(a, handle)
    assert notifications(b, 1) == {a.name: [b"scattered"]}
    want_here, want_there = before_here.reshape(-1, PAGE).copy(), before_there.reshape(-1, PAGE).copy()
    if operation == "WRITE":
        want_there[chosen[::-1]] = want_here[chosen]
    else:
        want_here[chosen] = want_there[chosen[::-1]]
    assert (np.concatenate(here) == want_here.ravel()).all()
    assert (np.concatenate(there) == want_there.ravel()).all()
    a.release_xfer_handle(handle)
    a.remove_remote_agent(b.name)


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_lengths_of_all_kinds(operation: str) -> None:
    """Pieces of any length and alignment, by lists that were not prepared before."""
    with pair(1 << 20) as it:
        lengths = [1, 3, 17, 4095, 4096, 4097, 65536, 100_001]
        starts = np.cumsum([5, *lengths])[:-1].tolist()
        sides = [
            it.a.get_xfer_descs([(array.ctypes.data + at, n, 0) for at, n in zip(starts, lengths, strict=True)], "DRAM")
            for array in (it.here, it.there)
        ]
        before_here, before_there = it.here.copy(), it.there.copy()
        finish(it.a, it.a.initialize_xfer(operation, *sides, it.b.name))
        end = 5 + sum(lengths)
        if operation == "WRITE":
            before_there[5:end] = before_here[5:end]
        else:
            before_here[5:end] = before_there[5:end]
        assert (it.here == before_here).all() and (it.there == before_there).all()


@pytest.mark.parametrize("kind", ["rows of blocks", "single blocks"])
def test_strided(kind: str) -> None:
    """Blocks at equal distances, as rows of address, length, device, stride and count, or one by one."""
    if kind == "rows of blocks" and version("nixl").startswith("1.4."):
        pytest.skip("NIXL takes strided lists since version 1.5")
    with pair() as it:
        block, count = 512, 40
        starts, strides = (it.here.ctypes.data + 64, it.there.ctypes.data + 128), (2048, 2560)
        if kind == "rows of blocks":
            lists = [
                np.array([[at, block, 0, stride, count]], np.uint64) for at, stride in zip(starts, strides, strict=True)
            ]
        else:
            lists = [
                np.array([[at + i * stride, block, 0] for i in range(count)], np.uint64)
                for at, stride in zip(starts, strides, strict=True)
            ]
        local = it.a.prep_xfer_dlist("NIXL_INIT_AGENT", lists[0], "DRAM")
        remote = it.a.prep_xfer_dlist(it.b.name, lists[1], "DRAM")
        want = it.there.copy()
        finish(it.a, it.a.make_prepped_xfer("WRITE", local, list(range(count)), remote, list(range(count))))
        for i in range(count):
            at, to = 64 + i * strides[0], 128 + i * strides[1]
            want[to : to + block] = it.here[at : at + block]
        assert (it.there == want).all()


def test_many_descriptors() -> None:
    """More descriptors than any queue has places."""
    count, size = 20_000, 64
    with pair(count * size) as it:
        order = np.random.default_rng(2).permutation(count)
        finish(it.a, it.transfer("WRITE", np.arange(count), order, b"all", size))
        assert (it.there.reshape(-1, size)[order] == it.here.reshape(-1, size)).all()
        assert notifications(it.b, 1) == {it.a.name: [b"all"]}


def test_a_handle_is_posted_again() -> None:
    with pair() as it:
        handle = it.transfer("WRITE", range(8), range(8), b"again")
        for turn in range(20):
            it.here[: 8 * PAGE] = turn + 1
            finish(it.a, handle)
            assert (it.there[: 8 * PAGE] == turn + 1).all()
        assert notifications(it.b, 20) == {it.a.name: [b"again"] * 20}
        assert it.a.transfer(handle, b"other") in ("PROC", "DONE")
        until(lambda: it.a.check_xfer_state(handle) == "DONE", "the transfer ends")
        assert notifications(it.b, 1) == {it.a.name: [b"other"]}
        it.a.release_xfer_handle(handle)


def test_several_handles_under_way() -> None:
    with pair(64 << 20) as it:
        pages = 64
        handles = [it.transfer("WRITE", [i], [pages - 1 - i], b"%d" % i, 1 << 20) for i in range(pages)]
        for handle in handles:
            assert it.a.transfer(handle) in ("PROC", "DONE")
        until(lambda: all(it.a.check_xfer_state(handle) == "DONE" for handle in handles), "all transfers end")
        assert (it.there.reshape(pages, -1)[::-1] == it.here.reshape(pages, -1)).all()
        got = notifications(it.b, pages)[it.a.name]
        assert sorted(got, key=int) == [b"%d" % i for i in range(pages)]


def test_a_transfer_that_was_not_posted() -> None:
    with pair() as it:
        handle = it.transfer("WRITE", [0], [0])
        with pytest.raises(nixlBind.nixlNotPostedError):
            it.a.check_xfer_state(handle)
        it.a.release_xfer_handle(handle)


def test_lists_that_do_not_fit() -> None:
    with pair() as it:
        one = it.a.get_xfer_descs([(it.here.ctypes.data, PAGE, 0)], "DRAM")
        longer = it.a.get_xfer_descs([(it.there.ctypes.data, 2 * PAGE, 0)], "DRAM")
        with pytest.raises(nixlBind.nixlInvalidParamError):
            it.a.initialize_xfer("WRITE", one, longer, it.b.name)
        two = it.a.get_xfer_descs([(it.there.ctypes.data, PAGE, 0), (it.there.ctypes.data + PAGE, PAGE, 0)], "DRAM")
        with pytest.raises(nixlBind.nixlInvalidParamError):
            it.a.initialize_xfer("WRITE", one, two, it.b.name)


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_release_under_way(operation: str) -> None:
    """A release cancels, or waits, or is refused; then the handle stays. The agents go on."""
    with pair(64 << 20) as it:
        for _ in range(5):
            handle = it.whole(operation)
            it.a.transfer(handle)

            def is_released(handle: Any = handle) -> bool:
                try:
                    it.a.release_xfer_handle(handle)
                except nixlBind.nixlRepostActiveError:
                    return False
                return True

            until(is_released, "the release")
        handle = it.whole(operation, b"done")
        finish(it.a, handle)
        assert (it.here == it.there).all()
        assert notifications(it.b, 1) == {it.a.name: [b"done"]}
        it.a.release_xfer_handle(handle)


@pytest.mark.multirail_only
@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_released_memory_is_not_touched(operation: str) -> None:
    """Once a transfer is released, neither side's memory changes any more."""
    with pair(64 << 20) as it:
        for turn in range(10):
            handle = it.whole(operation)
            it.a.transfer(handle)
            with contextlib.suppress(nixlBind.nixlRepostActiveError):
                it.a.release_xfer_handle(handle)
            if not handle._released:
                it.a.release_xfer_handle(handle)
            mark = turn + 1
            target = it.there if operation == "WRITE" else it.here
            source = it.here if operation == "WRITE" else it.there
            target[:] = mark
            source[:] = 200 + turn
            # The next transfer takes the same way, so that late bytes of the last one would have landed.
            small = it.transfer("WRITE" if operation == "WRITE" else "READ", [0], [0])
            finish(it.a, small)
            assert (target[PAGE:] == mark).all()
            it.a.release_xfer_handle(small)


@pytest.mark.multirail_only
def test_deregistration_under_way() -> None:
    """The initiator takes memory back that a transfer reads into: the transfer fails, and the memory stays clean."""
    with pair(64 << 20) as it:
        handle = it.whole("READ")
        it.a.transfer(handle)
        it.a.deregister_memory(it.here_registered)
        it.here[:] = 99
        end = end_of(it.a, handle)
        assert end == "DONE" or isinstance(end, (nixlBind.nixlNotFoundError, nixlBind.nixlCancelledError))
        assert (it.here == 99).all()
        it.a.release_xfer_handle(handle)


@pytest.mark.multirail_only
def test_target_deregisters_under_way() -> None:
    """The target takes memory back that a peer writes: afterwards no late byte lands."""
    with pair(64 << 20) as it:
        handle = it.whole("WRITE")
        it.a.transfer(handle)
        it.b.deregister_memory(it.there_registered)
        it.there[:] = 99
        end = end_of(it.a, handle)
        assert end == "DONE" or isinstance(end, (nixlBind.nixlNotFoundError, nixlBind.nixlNotAllowedError))
        assert (it.there == 99).all()
        it.a.release_xfer_handle(handle)


def test_within_one_agent() -> None:
    with pair() as it:
        a = it.a
        local = a.prep_xfer_dlist("NIXL_INIT_AGENT", rows(it.here, [0, 1]), "DRAM")
        remote = a.prep_xfer_dlist(a.name, rows(it.here, [20, 21]), "DRAM")
        finish(a, a.make_prepped_xfer("WRITE", local, [0, 1], remote, [1, 0], b"self"))
        assert (it.here[20 * PAGE : 21 * PAGE] == it.here[PAGE : 2 * PAGE]).all()
        assert (it.here[21 * PAGE : 22 * PAGE] == it.here[:PAGE]).all()
        a.send_notif(a.name, b"note")
        found = notifications(a, 2)
        assert sorted(found[a.name]) == [b"note", b"self"]
        it.here[20 * PAGE : 22 * PAGE] = 5
        finish(a, a.make_prepped_xfer("READ", local, [0], remote, [1]))
        assert (it.here[:PAGE] == 5).all()


def test_telemetry() -> None:
    with pair(16 << 20, capture_telemetry=True) as it:
        handle = it.whole("WRITE")
        finish(it.a, handle)
        told = it.a.get_xfer_telemetry(handle)
        assert told.totalBytes == 16 << 20 and told.descCount == 1
        assert told.startTime > 0 and 0 <= told.postDuration <= told.xferDuration and told.xferDuration > 0


def test_telemetry_must_be_asked_for() -> None:
    with pair() as it:
        handle = it.transfer("WRITE", [0], [0])
        finish(it.a, handle)
        with pytest.raises(nixlBind.nixlNoTelemetryError):
            it.a.get_xfer_telemetry(handle)


@pytest.mark.multirail_only
def test_estimate() -> None:
    """The cost of a transfer is estimated from earlier ones."""
    with pair(16 << 20) as it:
        handle = it.whole("WRITE")
        with pytest.raises(nixlBind.nixlNotSupportedError):
            it.a.estimate_xfer_cost(handle)
        finish(it.a, handle)
        duration, margin, _ = it.a.estimate_xfer_cost(handle)
        assert 0 < duration < 10_000_000 and 0 <= margin <= duration


def test_memory_of_files_is_not_supported() -> None:
    agent = make_agent(next_name("lone"))
    with pytest.raises(Exception, match="NIXL_ERR"):
        agent.register_memory([(0, PAGE, 3, "")], "FILE")
    memory = pattern(PAGE, 1)
    with pytest.raises(nixlBind.nixlNotSupportedError):
        agent.query_memory([(memory.ctypes.data, PAGE, 0, "")], next(iter(agent.backends)), "DRAM")
