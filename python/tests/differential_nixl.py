"""What callers of NIXL rely on. It runs unchanged with NIXL and with multirail:

- `NIXL_API=nixl._api pytest differential_nixl.py`
- `NIXL_API=multirail.compat.nixl pytest differential_nixl.py`
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

API = os.environ.get("NIXL_API", "multirail.compat.nixl")
api = importlib.import_module(API)
bind = api.nixlBind

#: Seconds until anything that must happen counts as missing.
PATIENCE = 20.0
PAGE = 4096
_numbers = itertools.count()


# ---- helpers ----


def until(found: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        result = found()
        if result:
            return result
    raise AssertionError(f"{what}: not within {PATIENCE} s")


def finish(agent: Any, handle: Any) -> None:
    state = agent.transfer(handle)
    assert state in ("PROC", "DONE")
    wait(agent, handle)


def wait(agent: Any, handle: Any) -> None:
    until(lambda: agent.check_xfer_state(handle) != "PROC", "the transfer ends")
    assert agent.check_xfer_state(handle) == "DONE"


def notifs(agent: Any, count: int) -> dict[str, list[bytes]]:
    """All notifications, once there are `count`."""
    found: dict[str, list[bytes]] = {}

    def collect() -> bool:
        for name, messages in agent.get_new_notifs().items():
            found.setdefault(name, []).extend(messages)
        return sum(map(len, found.values())) >= count

    until(collect, f"{count} notifications")
    return found


def buffer(length: int, fill: int | None = None) -> Any:
    array = np.zeros(length, np.uint8)
    if fill is not None:
        array[:] = (np.arange(length) * 7 + fill) % 251
    return array


def register(agent: Any, *arrays: Any) -> Any:
    return agent.register_memory([(array.ctypes.data, array.nbytes, 0, "") for array in arrays], "DRAM")


def descs(agent: Any, *pieces: tuple[int, int]) -> Any:
    return agent.get_xfer_descs([(address, length, 0) for address, length in pieces], "DRAM")


def pages(array: Any, numbers: Any, page: int = PAGE) -> Any:
    """N x 3."""
    rows = np.zeros((len(numbers), 3), np.uint64)
    rows[:, 0] = array.ctypes.data + np.asarray(numbers, np.uint64) * np.uint64(page)
    rows[:, 1] = page
    return rows


class Pair:
    """Two agents of this process. The initiator knows the target, and not the other way round."""

    def __init__(self, size: int = 64 * PAGE, **config: Any) -> None:
        number = next(_numbers)
        self.a = api.nixl_agent(f"initiator {number}", api.nixl_agent_config(**config))
        self.b = api.nixl_agent(f"target {number}", api.nixl_agent_config(**config))
        self.here, self.there = buffer(size, 1), buffer(size, 2)
        self.here_regs, self.there_regs = register(self.a, self.here), register(self.b, self.there)
        self.target = self.a.add_remote_agent(self.b.get_agent_metadata())

    def sides(self, here: Any, there: Any) -> tuple[Any, Any]:
        local = self.a.prep_xfer_dlist("NIXL_INIT_AGENT", pages(self.here, here), "DRAM")
        remote = self.a.prep_xfer_dlist(self.b.name, pages(self.there, there), "DRAM")
        return local, remote


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.a.remove_remote_agent(made.b.name)


# ---- the agent ----


def test_config_and_backends() -> None:
    agent = api.nixl_agent(f"lone {next(_numbers)}", api.nixl_agent_config(backends=["UCX"], num_threads=2))
    assert "UCX" in agent.get_plugin_list()
    assert list(agent.backends) == ["UCX"]
    assert agent.get_plugin_mem_types("UCX") == ["DRAM_SEG", "VRAM_SEG"]
    assert "DRAM_SEG" in agent.get_backend_mem_types("UCX")
    assert isinstance(agent.get_plugin_params("UCX"), dict) and isinstance(agent.get_backend_params("UCX"), dict)
    assert agent.get_plugin_mem_types("NONE SUCH") == [] and agent.get_plugin_params("NONE SUCH") == {}
    assert agent.get_backend_mem_types("NONE SUCH") == [] and agent.get_backend_params("NONE SUCH") == {}
    with pytest.raises(bind.nixlInvalidParamError):
        agent.create_backend("UCX")
    with pytest.raises(bind.nixlNotFoundError):
        agent.create_backend("NONE SUCH", {"key": "value"})


def test_backend_made_later() -> None:
    agent = api.nixl_agent(f"later {next(_numbers)}", api.nixl_agent_config(backends=[]))
    memory = buffer(64)
    assert agent.backends == {}
    with pytest.raises(bind.nixlNotFoundError):
        register(agent, memory)
    with pytest.raises(bind.nixlInvalidParamError):
        agent.get_agent_metadata()
    agent.create_backend("UCX")
    register(agent, memory)
    assert agent.get_agent_metadata()


def test_missing_backend_is_left_out() -> None:
    agent = api.nixl_agent(f"missing {next(_numbers)}", api.nixl_agent_config(backends=["NONE SUCH", "UCX"]))
    assert list(agent.backends) == ["UCX"]


def test_names_and_modes() -> None:
    with pytest.raises(ValueError):
        api.nixl_agent("")
    with pytest.raises(TypeError):
        api.nixl_agent(5)
    with pytest.raises(TypeError):
        api.nixl_agent_config(sync_mode=1)
    strict = api.nixl_agent_config(sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    assert api.nixl_agent("strict", strict).name == "strict"
    assert api.nixl_agent("plain").name == "plain"


# ---- descriptors ----


def test_descriptor_lists(pair: Pair) -> None:
    a = pair.a
    regs = a.get_reg_descs([(4096, 10, 0, "info"), (8192, 20, 1, b"more")], "DRAM")
    assert regs.descCount() == 2 and not regs.isEmpty() and regs.getType() == bind.DRAM_SEG
    assert regs[0] == (4096, 10, 0, b"info") and regs[1] == (8192, 20, 1, b"more")
    trimmed = regs.trim()
    assert trimmed[1] == (8192, 20, 1)
    assert trimmed == a.get_xfer_descs(np.array([[4096, 10, 0], [8192, 20, 1]], np.uint64), "DRAM")
    assert trimmed != a.get_xfer_descs([(4096, 10, 0)], "DRAM")
    assert trimmed.index((8192, 20, 1)) == 1
    with pytest.raises(bind.nixlNotFoundError):
        trimmed.index((1, 2, 3))
    trimmed.remDesc(0)
    trimmed.append((1, 2, 3))
    trimmed.addDesc((4, 5, 6))
    trimmed[0] = (7, 8, 9)
    assert [trimmed[i] for i in range(trimmed.descCount())] == [(7, 8, 9), (1, 2, 3), (4, 5, 6)]
    with pytest.raises(IndexError):
        trimmed.remDesc(3)
    with pytest.raises(TypeError):
        trimmed[-1]
    with pytest.raises(TypeError):
        hash(trimmed)
    trimmed.clear()
    assert trimmed.isEmpty()
    assert bind.nixlXferDList(bind.DRAM_SEG, 5).descCount() == 5
    assert bind.nixlXferDList(bind.DRAM_SEG) != bind.nixlXferDList(bind.VRAM_SEG)
    assert a.get_reg_descs(regs) is regs and a.get_xfer_descs(trimmed) is trimmed


def test_serialized_descriptors(pair: Pair) -> None:
    for made in (
        pair.a.get_xfer_descs(pages(pair.here, [3, 1, 2]), "VRAM"),
        pair.a.get_reg_descs([(1, 2, 3, "x"), (4, 5, 6, b"")], "DRAM"),
    ):
        data = pair.a.get_serialized_descs(made)
        assert isinstance(data, bytes)
        again = pair.b.deserialize_descs(data)
        assert type(again) is type(made) and again == made and again.getType() == made.getType()
        assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises((bind.nixlMismatchError, pickle.UnpicklingError)):
        pair.a.deserialize_descs(b"garbage")


def test_what_is_no_descriptor(pair: Pair) -> None:
    a = pair.a
    assert a.get_reg_descs([(4096, 10, 0, "")]) is None
    assert a.get_reg_descs([(4096, 10, 0)], "DRAM") is None
    assert a.get_xfer_descs([(4096, 10, 0, "")], "DRAM") is None
    assert a.get_xfer_descs([[4096, 10, 0]], "DRAM") is None
    assert a.get_xfer_descs(np.array([1, 2, 3], np.uint64), "DRAM") is None
    assert a.get_xfer_descs("text", "DRAM") is None
    assert a.get_xfer_descs(pair.here_regs) is None
    assert a.get_reg_descs(pair.here_regs.trim()) is None
    with pytest.raises(IndexError):
        a.get_xfer_descs([], "DRAM")
    with pytest.raises(KeyError):
        a.get_xfer_descs([(1, 2, 3)], "NONE SUCH")
    for kind in (np.int32, np.float64):
        with pytest.raises(ValueError):
            a.get_xfer_descs(np.zeros((1, 3), kind), "DRAM")
    with pytest.raises(ValueError):
        a.get_xfer_descs(np.asfortranarray(np.ones((2, 3), np.uint64)), "DRAM")
    with pytest.raises(ValueError):
        a.get_xfer_descs([(1, 2, 3), (1, 2)], "DRAM")
    for wrong in (-1, 1.5, "x"):
        with pytest.raises(RuntimeError):
            a.get_xfer_descs([(wrong, 2, 3)], "DRAM")


# ---- memory ----


def test_registration(pair: Pair) -> None:
    a, memory = pair.a, buffer(PAGE)
    as_list = register(a, memory)
    as_array = a.register_memory(np.array([[memory.ctypes.data, 100, 0]], np.uint64), "DRAM")
    of_descs = a.register_memory(a.get_reg_descs([(memory.ctypes.data + 8, 50, 0, "")], "DRAM"), backends=["UCX"])
    empty = a.register_memory([(memory.ctypes.data, 0, 0, "")], "DRAM")
    for registered in (as_list, as_array, of_descs, empty):
        assert registered
        assert a.deregister_memory(registered) is None
    with pytest.raises(bind.nixlNotFoundError):
        a.deregister_memory(as_list)
    with pytest.raises(TypeError):
        a.register_memory([(memory.ctypes.data, 16, 0, "")])
    with pytest.raises(KeyError):
        a.register_memory([(memory.ctypes.data, 16, 0, "")], "DRAM", backends=["NONE SUCH"])


def test_registered_twice(pair: Pair) -> None:
    a, memory = pair.a, buffer(PAGE)
    first, second = register(a, memory), register(a, memory)
    a.deregister_memory(first)
    assert a.prep_xfer_dlist("", descs(a, (memory.ctypes.data, 16)))
    a.deregister_memory(second)
    with pytest.raises(bind.nixlNotFoundError):
        a.prep_xfer_dlist("", descs(a, (memory.ctypes.data, 16)))


def test_deregistered_memory_is_not_found(pair: Pair) -> None:
    where = pair.here.ctypes.data
    pair.a.deregister_memory(pair.here_regs)
    with pytest.raises(bind.nixlNotFoundError):
        pair.a.initialize_xfer(
            "WRITE", descs(pair.a, (where, 16)), descs(pair.a, (pair.there.ctypes.data, 16)), pair.b.name
        )
    again = register(pair.a, pair.here)
    handle = pair.a.initialize_xfer(
        "WRITE", descs(pair.a, (where, 16)), descs(pair.a, (pair.there.ctypes.data, 16)), pair.b.name
    )
    finish(pair.a, handle)
    assert (pair.there[:16] == pair.here[:16]).all()
    pair.a.release_xfer_handle(handle)
    pair.a.deregister_memory(again)


# ---- metadata ----


def test_metadata(pair: Pair) -> None:
    a, b = pair.a, pair.b
    assert pair.target == b.name.encode()
    assert a.add_remote_agent(b.get_agent_metadata()) == b.name.encode()
    assert a.check_remote_metadata(b.name) is True and a.check_remote_metadata(b.name.encode()) is True
    assert a.check_remote_metadata("nobody") is False
    assert a.check_remote_metadata(a.name) is True
    there, end = pair.there.ctypes.data, pair.there.ctypes.data + pair.there.nbytes
    assert a.check_remote_metadata(b.name, descs(a, (there, 16), (end - 1, 1))) is True
    assert a.check_remote_metadata(b.name, descs(a, (end - 1, 2))) is False
    with pytest.raises(TypeError):
        a.check_remote_metadata(b.name, pair.there_regs)
    with pytest.raises(bind.nixlInvalidParamError):
        a.add_remote_agent(a.get_agent_metadata())
    for garbage in (b"", b"garbage", "text"):
        with pytest.raises(bind.nixlMismatchError):
            a.add_remote_agent(garbage)
    # The target never loads the initiator's.
    assert b.check_remote_metadata(a.name) is False
    with pytest.raises(bind.nixlNotFoundError):
        b.send_notif(a.name, b"who are you?")


def test_partial_metadata() -> None:
    a, b = api.nixl_agent(f"knows parts {next(_numbers)}"), api.nixl_agent(f"tells parts {next(_numbers)}")
    first, second, mine = buffer(PAGE, 1), buffer(PAGE, 2), buffer(2 * PAGE)
    first_regs, second_regs = register(b, first), register(b, second)
    register(a, mine)
    wanted = [descs(a, (memory.ctypes.data, PAGE)) for memory in (first, second)]
    known = lambda: [a.check_remote_metadata(b.name, of) for of in (None, *wanted)]  # noqa: E731
    with pytest.raises(bind.nixlNotFoundError):
        a.add_remote_agent(b.get_partial_agent_metadata(first_regs))
    assert known() == [False, False, False]
    name = a.add_remote_agent(b.get_partial_agent_metadata(first_regs, True))
    assert name == b.name.encode() and known() == [True, True, False]
    with pytest.raises(bind.nixlNotFoundError):
        a.prep_xfer_dlist(b.name, wanted[1])
    a.add_remote_agent(b.get_partial_agent_metadata(second_regs, inc_conn_info=False, backends=["UCX"]))
    assert known() == [True, True, True]
    both = descs(a, (second.ctypes.data, PAGE), (first.ctypes.data, PAGE))
    handle = a.initialize_xfer("READ", a.get_xfer_descs(pages(mine, [0, 1]), "DRAM"), both, b.name)
    finish(a, handle)
    assert (mine[:PAGE] == second).all() and (mine[PAGE:] == first).all()
    a.release_xfer_handle(handle)
    with pytest.raises(bind.nixlNotFoundError):
        b.get_partial_agent_metadata(b.get_reg_descs([(4096, 5, 0, "")], "DRAM"), True)
    with pytest.raises(TypeError):
        b.get_partial_agent_metadata(wanted[0], True)
    with pytest.raises(KeyError):
        b.get_partial_agent_metadata(first_regs, True, ["NONE SUCH"])
    a.remove_remote_agent(b.name)


def test_connection_information_alone() -> None:
    a, b = api.nixl_agent(f"calls {next(_numbers)}"), api.nixl_agent(f"is called {next(_numbers)}")
    nothing = bind.nixlRegDList(bind.DRAM_SEG)
    assert a.add_remote_agent(b.get_partial_agent_metadata(nothing, True)) == b.name.encode()
    assert a.check_remote_metadata(b.name) is True
    a.send_notif(b.name, b"hello")
    assert notifs(b, 1) == {a.name: [b"hello"]}
    a.remove_remote_agent(b.name)


def test_metadata_of_memory_registered_later(pair: Pair) -> None:
    later = buffer(PAGE, 9)
    register(pair.b, later)
    wanted = descs(pair.a, (later.ctypes.data, PAGE))
    assert pair.a.check_remote_metadata(pair.b.name, wanted) is False
    pair.a.add_remote_agent(pair.b.get_agent_metadata())
    assert pair.a.check_remote_metadata(pair.b.name, wanted) is True
    handle = pair.a.initialize_xfer("READ", descs(pair.a, (pair.here.ctypes.data, PAGE)), wanted, pair.b.name)
    finish(pair.a, handle)
    assert (pair.here[:PAGE] == later).all()
    pair.a.release_xfer_handle(handle)


def test_removed_peer(pair: Pair) -> None:
    a, b = pair.a, pair.b
    local, remote = pair.sides([0], [0])
    handle = a.make_prepped_xfer("WRITE", local, [0], remote, [0])
    finish(a, handle)
    assert a.remove_remote_agent(b.name) is None
    assert a.check_remote_metadata(b.name) is False
    with pytest.raises(bind.nixlNotFoundError):
        a.transfer(handle)
    with pytest.raises(bind.nixlNotFoundError):
        a.send_notif(b.name, b"x")
    with pytest.raises(bind.nixlNotFoundError):
        a.prep_xfer_dlist(b.name, pages(pair.there, [0]), "DRAM")
    a.release_xfer_handle(handle)
    assert a.remove_remote_agent(b.name) is None and a.remove_remote_agent("nobody") is None
    # It may come back.
    a.add_remote_agent(b.get_agent_metadata())
    local, remote = pair.sides([1], [1])
    handle = a.make_prepped_xfer("WRITE", local, [0], remote, [0], b"again")
    finish(a, handle)
    assert notifs(b, 1) == {a.name: [b"again"]}
    assert (pair.there[PAGE : 2 * PAGE] == pair.here[PAGE : 2 * PAGE]).all()
    a.release_xfer_handle(handle)


# ---- transfers ----


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
@pytest.mark.parametrize("kind", [list, tuple, np.int32, np.int64, np.uint64])
def test_scattered_over_many_regions(operation: str, kind: Any) -> None:
    """80 regions a side, and pages of all of them in shuffled order, as of a KV cache."""
    a, b = api.nixl_agent(f"scatters {next(_numbers)}"), api.nixl_agent(f"gathers {next(_numbers)}")
    regions, each = 80, 8
    ours = [buffer(each * PAGE, number) for number in range(regions)]
    theirs = [buffer(each * PAGE, 100 + number) for number in range(regions)]
    register(a, *ours)
    register(b, *theirs)
    a.add_remote_agent(b.get_agent_metadata())
    random = np.random.default_rng(3)
    count = regions * each
    here = np.concatenate([pages(array, range(each)) for array in ours])[random.permutation(count)]
    there = np.concatenate([pages(array, range(each)) for array in theirs])
    local = a.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM")
    remote = a.prep_xfer_dlist(b.name, there, "DRAM")
    chosen, targets = random.permutation(count)[:500], random.permutation(count)[:500]
    as_kind = lambda numbers: kind(numbers.tolist()) if kind in (list, tuple) else numbers.astype(kind)  # noqa: E731
    copy = lambda row: ctypes.string_at(int(row[0]), int(row[1]))  # noqa: E731
    sources, sinks = (here[chosen], there[targets]) if operation == "WRITE" else (there[targets], here[chosen])
    expected = [copy(row) for row in sources]
    touched = {int(row[0]) for row in sinks}
    others = [(row, copy(row)) for row in (there if operation == "WRITE" else here) if int(row[0]) not in touched]
    handle = a.make_prepped_xfer(operation, local, as_kind(chosen), remote, as_kind(targets), b"all")
    finish(a, handle)
    assert notifs(b, 1) == {a.name: [b"all"]}
    assert [copy(row) for row in sinks] == expected
    assert len(others) == count - 500 and all(copy(row) == before for row, before in others)
    a.release_xfer_handle(handle)
    a.release_dlist_handle(local)
    a.release_dlist_handle(remote)
    a.remove_remote_agent(b.name)


def test_strided(pair: Pair) -> None:
    """N x 5: 8 blocks of half a page from page 4 on, and 4 blocks of half a page from page 20 on, every second page."""
    half, there = PAGE // 2, pair.there.ctypes.data
    rows = np.array([[there + 4 * PAGE, half, 0, PAGE, 8], [there + 20 * PAGE, half, 0, 2 * PAGE, 4]], np.uint64)
    local = pair.a.prep_xfer_dlist("", pages(pair.here, range(12), half), "DRAM")
    before = pair.there.copy()
    for kind in (np.uint64, np.int64):
        remote = pair.a.prep_xfer_dlist(pair.b.name, rows.astype(kind), "DRAM")
        handle = pair.a.make_prepped_xfer("WRITE", local, range(12), remote, range(12))
        pair.there[:] = before
        finish(pair.a, handle)
        expected = before.copy()
        starts = [(4 + i) * PAGE for i in range(8)] + [(20 + 2 * i) * PAGE for i in range(4)]
        for number, start in enumerate(starts):
            expected[start : start + half] = pair.here[number * half : (number + 1) * half]
        assert (pair.there == expected).all()
        pair.a.release_xfer_handle(handle)
    # The local side too, and dense.
    dense = np.array([[pair.here.ctypes.data, half, 0, half, 12]], np.uint64)
    handle = pair.a.make_prepped_xfer("READ", pair.a.prep_xfer_dlist("", dense, "DRAM"), range(12), remote, range(12))
    pair.here[:] = 0
    finish(pair.a, handle)
    assert all((pair.here[i * half : (i + 1) * half] == expected[s : s + half]).all() for i, s in enumerate(starts))
    pair.a.release_xfer_handle(handle)
    with pytest.raises(ValueError):
        pair.a.prep_xfer_dlist(pair.b.name, rows)
    for wrong in ([there, half, 0, PAGE, 80_000], [there, half, 0, 128, 8], [there, half, 0, half, 0]):
        with pytest.raises(bind.nixlNotFoundError):
            pair.a.prep_xfer_dlist(pair.b.name, np.array([wrong], np.uint64), "DRAM")


def test_pieces_of_different_lengths(pair: Pair) -> None:
    lengths = [1, 7, 4096, 100, 65536]
    starts = np.cumsum([0, *lengths[:-1]])
    here = descs(pair.a, *((pair.here.ctypes.data + int(s), n) for s, n in zip(starts, lengths, strict=True)))
    there = descs(pair.a, *((pair.there.ctypes.data + 2 * int(s), n) for s, n in zip(starts, lengths, strict=True)))
    handle = pair.a.initialize_xfer("WRITE", here, there, pair.target, "text")
    finish(pair.a, handle)
    for start, length in zip(starts.tolist(), lengths, strict=True):
        assert (pair.there[2 * start : 2 * start + length] == pair.here[start : start + length]).all()
    assert notifs(pair.b, 1) == {pair.a.name: [b"text"]}
    assert pair.a.query_xfer_backend(handle) == "UCX"
    pair.a.release_xfer_handle(handle)


def test_reposted_handle(pair: Pair) -> None:
    a, b = pair.a, pair.b
    local, remote = pair.sides([0, 1], [5, 6])
    handle = a.make_prepped_xfer("WRITE", local, [1, 0], remote, [0, 1], b"first")
    with pytest.raises(bind.nixlNotPostedError):
        a.check_xfer_state(handle)
    a.release_dlist_handle(local)
    a.release_dlist_handle(remote)
    for round_number in range(20):
        pair.here[: 2 * PAGE] = round_number
        finish(a, handle)
        assert (pair.there[5 * PAGE : 7 * PAGE] == round_number).all()
    assert notifs(b, 20) == {a.name: [b"first"] * 20}
    # A notification of one post replaces the one before, also for those that follow.
    assert a.transfer(handle, b"second") in ("PROC", "DONE")
    wait(a, handle)
    finish(a, handle)
    assert notifs(b, 2) == {a.name: [b"second", b"second"]}
    assert a.release_xfer_handle(handle) is None and a.release_xfer_handle(handle) is None


def test_repost_of_an_active_transfer() -> None:
    """A post of a transfer that is under way is refused. Whether this one still is, is up to the library."""
    pair = Pair(32 << 20)
    handle = pair.a.initialize_xfer(
        "WRITE",
        descs(pair.a, (pair.here.ctypes.data, 32 << 20)),
        descs(pair.a, (pair.there.ctypes.data, 32 << 20)),
        pair.b.name,
    )
    if pair.a.transfer(handle) == "PROC" and pair.a.check_xfer_state(handle) == "PROC":
        with contextlib.suppress(bind.nixlRepostActiveError):
            assert pair.a.transfer(handle) in ("PROC", "DONE")
    wait(pair.a, handle)
    assert (pair.there == pair.here).all()
    pair.a.release_xfer_handle(handle)
    pair.a.remove_remote_agent(pair.b.name)


def test_released_while_active() -> None:
    """A release cancels, or waits, or is refused; then the handle stays. The agents go on."""
    pair = Pair(32 << 20)
    rows = (pair.here.ctypes.data, 32 << 20), (pair.there.ctypes.data, 32 << 20)
    for _ in range(3):
        handle = pair.a.initialize_xfer("WRITE", descs(pair.a, rows[0]), descs(pair.a, rows[1]), pair.b.name)
        pair.a.transfer(handle)

        def is_released(handle: Any = handle) -> bool:
            try:
                pair.a.release_xfer_handle(handle)
            except Exception:
                return False
            return True

        until(is_released, "the release")
    handle = pair.a.initialize_xfer("READ", descs(pair.a, rows[0]), descs(pair.a, rows[1]), pair.b.name, b"done")
    finish(pair.a, handle)
    assert (pair.here == pair.there).all()
    assert notifs(pair.b, 1) == {pair.a.name: [b"done"]}
    pair.a.release_xfer_handle(handle)
    pair.a.remove_remote_agent(pair.b.name)


def test_dropped_handles(pair: Pair) -> None:
    local, remote = pair.sides(range(8), range(8))
    for _ in range(50):
        handle = pair.a.make_prepped_xfer("WRITE", local, range(8), remote, range(8))
        finish(pair.a, handle)
        del handle
    assert (pair.there[: 8 * PAGE] == pair.here[: 8 * PAGE]).all()


def test_within_one_agent(pair: Pair) -> None:
    a = pair.a
    here = pair.here.ctypes.data
    handle = a.initialize_xfer("WRITE", descs(a, (here, PAGE)), descs(a, (here + 9 * PAGE, PAGE)), a.name, b"self")
    finish(a, handle)
    assert (pair.here[9 * PAGE : 10 * PAGE] == pair.here[:PAGE]).all()
    a.send_notif(a.name, b"note")
    found = notifs(a, 2)
    assert sorted(found[a.name]) == [b"note", b"self"] and list(found) == [a.name]
    local = a.prep_xfer_dlist("NIXL_INIT_AGENT", pages(pair.here, [0, 1]), "DRAM")
    remote = a.prep_xfer_dlist(a.name, pages(pair.here, [20, 21]), "DRAM")
    prepped = a.make_prepped_xfer("READ", local, [0], remote, [1])
    finish(a, prepped)
    assert (pair.here[:PAGE] == pair.here[21 * PAGE : 22 * PAGE]).all()
    a.release_xfer_handle(handle)
    a.release_xfer_handle(prepped)


def test_several_agents() -> None:
    count = 4
    agents = [api.nixl_agent(f"agent {next(_numbers)}") for _ in range(count)]
    memories = [buffer(count * PAGE, number) for number in range(count)]
    for agent, memory in zip(agents, memories, strict=True):
        register(agent, memory)
    metadata = [agent.get_agent_metadata() for agent in agents]
    copies = [memory.copy() for memory in memories]
    handles = []
    for number, agent in enumerate(agents):
        for other in range(count):
            if other == number:
                continue
            agent.add_remote_agent(metadata[other])
            handle = agent.initialize_xfer(
                "WRITE",
                descs(agent, (memories[number].ctypes.data + number * PAGE, PAGE)),
                descs(agent, (memories[other].ctypes.data + number * PAGE, PAGE)),
                agents[other].name,
                f"from {number}".encode(),
            )
            assert agent.transfer(handle) in ("PROC", "DONE")
            handles.append((agent, handle))
    for agent, handle in handles:
        wait(agent, handle)
    for number, agent in enumerate(agents):
        expected = {agents[o].name: [f"from {o}".encode()] for o in range(count) if o != number}
        assert notifs(agent, count - 1) == expected
        for other in range(count):
            page = slice(other * PAGE, (other + 1) * PAGE)
            assert (memories[number][page] == copies[other][page]).all()
    for agent, handle in handles:
        agent.release_xfer_handle(handle)
    for agent in agents:
        for other in agents:
            if other is not agent:
                agent.remove_remote_agent(other.name)


def test_telemetry() -> None:
    pair = Pair(capture_telemetry=True)
    local, remote = pair.sides(range(4), range(10, 14))
    handle = pair.a.make_prepped_xfer("WRITE", local, [0, 2], remote, [2, 0])
    with pytest.raises(bind.nixlNotPostedError):
        pair.a.get_xfer_telemetry(handle)
    finish(pair.a, handle)
    telemetry = pair.a.get_xfer_telemetry(handle)
    assert telemetry.totalBytes == 2 * PAGE and telemetry.descCount == 2
    assert telemetry.startTime > 0 and 0 <= telemetry.postDuration <= telemetry.xferDuration < PATIENCE * 1e6
    pair.a.release_xfer_handle(handle)
    without = Pair()
    local, remote = without.sides([0], [0])
    handle = without.a.make_prepped_xfer("WRITE", local, [0], remote, [0])
    finish(without.a, handle)
    with pytest.raises(bind.nixlNoTelemetryError):
        without.a.get_xfer_telemetry(handle)
    without.a.release_xfer_handle(handle)
    for made in (pair, without):
        made.a.remove_remote_agent(made.b.name)


# ---- notifications ----


def test_notifications(pair: Pair) -> None:
    a, b = pair.a, pair.b
    assert b.get_new_notifs() == {}
    sent = [b"bytes", b"", b"\0\xff" * 10_000]
    for message in sent:
        assert a.send_notif(b.name, message) is None
    a.send_notif(pair.target, "text")
    found = notifs(b, 4)
    assert list(found) == [a.name] and sorted(found[a.name]) == sorted([*sent, b"text"])
    assert b.get_new_notifs() == {} and a.get_new_notifs() == {}
    with pytest.raises(TypeError):
        a.send_notif(b.name, 5)
    with pytest.raises(KeyError):
        a.send_notif(b.name, b"x", backend="NONE SUCH")
    with pytest.raises(bind.nixlNotFoundError):
        a.send_notif("nobody", b"x")
    with pytest.raises(KeyError):
        b.get_new_notifs(["NONE SUCH"])


def test_kept_notifications(pair: Pair) -> None:
    a, b = pair.a, pair.b
    for message in (b"one: done", b"two: done", b"one: done"):
        a.send_notif(b.name, message)
    until(lambda: len(b.update_notifs().get(a.name, [])) == 3, "three notifications")
    assert sorted(b.notifs[a.name]) == [b"one: done", b"one: done", b"two: done"]
    assert b.check_remote_xfer_done("nobody", b"one") is False
    assert b.check_remote_xfer_done(a.name, b"three") is False
    assert b.check_remote_xfer_done(a.name, b": done") is False
    assert b.check_remote_xfer_done(a.name, b"one") is True
    assert b.check_remote_xfer_done(a.name, b"one: done") is True
    assert b.check_remote_xfer_done(a.name, b"one") is False
    assert b.check_remote_xfer_done(a.name, b": done", tag_is_prefix=False) is True
    assert b.notifs[a.name] == []


def test_read_notifies_its_target(pair: Pair) -> None:
    local, remote = pair.sides([0], [3])
    handle = pair.a.make_prepped_xfer("READ", local, [0], remote, [0], notif_msg=b"was read")
    finish(pair.a, handle)
    assert (pair.here[:PAGE] == pair.there[3 * PAGE : 4 * PAGE]).all()
    assert notifs(pair.b, 1) == {pair.a.name: [b"was read"]}
    assert pair.a.get_new_notifs() == {}
    pair.a.release_xfer_handle(handle)


# ---- wrong requests ----


def test_wrong_addresses(pair: Pair) -> None:
    a, here, there = pair.a, pair.here, pair.there
    end = there.ctypes.data + there.nbytes
    for wrong in ((end, 16), (end - 8, 16), (there.ctypes.data - 1, 16), (here.ctypes.data, 16), (8, 16)):
        with pytest.raises(bind.nixlNotFoundError):
            a.prep_xfer_dlist(pair.b.name, descs(a, wrong))
        with pytest.raises(bind.nixlNotFoundError):
            a.initialize_xfer("WRITE", descs(a, (here.ctypes.data, 16)), descs(a, wrong), pair.b.name)
    with pytest.raises(bind.nixlNotFoundError):
        a.prep_xfer_dlist("NIXL_INIT_AGENT", descs(a, (there.ctypes.data, 16)))
    with pytest.raises(bind.nixlNotFoundError):
        a.prep_xfer_dlist(pair.b.name, [(there.ctypes.data, 16, 0), (end, 16, 0)], "DRAM")
    for device, mem in ((1, "DRAM"), (0, "VRAM")):
        with pytest.raises(bind.nixlNotFoundError):
            a.prep_xfer_dlist(pair.b.name, [(there.ctypes.data, 16, device)], mem)
    with pytest.raises(TypeError):
        a.prep_xfer_dlist(pair.b.name, [(there.ctypes.data, 16, 0)])


def test_unknown_peer(pair: Pair) -> None:
    a = pair.a
    one = descs(a, (pair.here.ctypes.data, 16))
    with pytest.raises(bind.nixlNotFoundError):
        a.prep_xfer_dlist("nobody", one)
    with pytest.raises(bind.nixlNotFoundError):
        a.initialize_xfer("WRITE", one, one, "nobody")
    with pytest.raises(bind.nixlNotFoundError):
        a.make_connection("nobody")


def test_wrong_transfers(pair: Pair) -> None:
    a = pair.a
    local, remote = pair.sides([0, 1, 2], [0, 1, 2])
    short = a.prep_xfer_dlist(pair.b.name, pages(pair.there, [0, 1, 2], 512), "DRAM")
    with pytest.raises(KeyError):
        a.make_prepped_xfer("COPY", local, [0], remote, [0])
    for sides in (
        (remote, [0], local, [0]),
        (local, [0], local, [0]),
        (local, [3], remote, [0]),
        (local, [0], remote, [3]),
        (local, [-1], remote, [0]),
        (local, [0, 1], remote, [0]),
        (local, [], remote, []),
        (local, [0], short, [0]),
    ):
        with pytest.raises(bind.nixlInvalidParamError):
            a.make_prepped_xfer("WRITE", *sides)
    with pytest.raises(ValueError):
        a.make_prepped_xfer("WRITE", local, np.array([[0]]), remote, np.array([[0]]))
    with pytest.raises(KeyError):
        a.make_prepped_xfer("WRITE", local, [0], remote, [0], backends=["NONE SUCH"])
    with pytest.raises(bind.nixlInvalidParamError):
        a.initialize_xfer(
            "READ", descs(a, (pair.here.ctypes.data, 16)), descs(a, (pair.there.ctypes.data, 8)), pair.b.name
        )
    with pytest.raises(bind.nixlInvalidParamError):
        a.initialize_xfer(
            "READ",
            descs(a, (pair.here.ctypes.data, 16)),
            descs(a, (pair.there.ctypes.data, 16), (pair.there.ctypes.data, 16)),
            pair.b.name,
        )


def test_released_descriptors(pair: Pair) -> None:
    local, remote = pair.sides([0], [0])
    for released in (local, remote):
        assert pair.a.release_dlist_handle(released) is None and pair.a.release_dlist_handle(released) is None
        with pytest.raises(bind.nixlInvalidParamError):
            pair.a.make_prepped_xfer("WRITE", local, [0], remote, [0])
        local = pair.sides([0], [0])[0]


# ---- two processes ----


def _serve(pipe: Any, name: str, size: int) -> None:
    """A target in its own process: answers requests until it is told to end, and never loads metadata."""
    agent = importlib.import_module(API).nixl_agent(name)
    memory = buffer(size, 5)
    regs = register(agent, memory)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    while (request := pipe.recv()) != "end":
        if request == "bytes":
            pipe.send(memory.tobytes())
        elif request == "notifs":
            pipe.send(notifs(agent, 1))
        elif request == "partial":
            pipe.send(agent.get_partial_agent_metadata(regs, True))
        elif request == "descs":
            pipe.send(agent.get_serialized_descs(regs.trim()))
    pipe.close()


@pytest.fixture
def target() -> Iterator[SimpleNamespace]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    name, size = f"process {next(_numbers)}", 64 * PAGE
    process = context.Process(target=_serve, args=(theirs, name, size), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(PATIENCE), "the target starts"
    metadata, address = ours.recv()

    def ask(request: str) -> Any:
        ours.send(request)
        assert ours.poll(PATIENCE), request
        return ours.recv()

    yield SimpleNamespace(name=name, size=size, metadata=metadata, address=address, ask=ask, process=process)
    with contextlib.suppress(OSError):
        ours.send("end")
    process.join(PATIENCE)
    assert not process.is_alive()


def _initiator(target: SimpleNamespace) -> tuple[Any, Any]:
    agent, memory = api.nixl_agent(f"initiator {next(_numbers)}"), buffer(target.size, 1)
    register(agent, memory)
    return agent, memory


def test_two_processes(target: SimpleNamespace) -> None:
    agent, memory = _initiator(target)
    assert agent.add_remote_agent(target.metadata) == target.name.encode()
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", pages(memory, range(64)), "DRAM")
    there = pages(memory, range(64))
    there[:, 0] = np.arange(64) * PAGE + target.address
    remote = agent.prep_xfer_dlist(target.name, there, "DRAM")
    order = np.random.default_rng(1).permutation(64).astype(np.int32)
    write = agent.make_prepped_xfer("WRITE", local, order[:32], remote, order[32:], b"written")
    finish(agent, write)
    assert target.ask("notifs") == {agent.name: [b"written"]}
    theirs = np.frombuffer(target.ask("bytes"), np.uint8).reshape(64, PAGE)
    assert (theirs[order[32:]] == memory.reshape(64, PAGE)[order[:32]]).all()
    assert (theirs[order[:32]] == buffer(target.size, 5).reshape(64, PAGE)[order[:32]]).all()
    read = agent.make_prepped_xfer("READ", local, np.arange(64), remote, np.arange(64), b"read")
    finish(agent, read)
    assert target.ask("notifs") == {agent.name: [b"read"]}
    assert (memory.reshape(64, PAGE) == theirs).all()
    agent.send_notif(target.name, b"alone")
    assert target.ask("notifs") == {agent.name: [b"alone"]}
    for handle in (write, read):
        agent.release_xfer_handle(handle)
    agent.remove_remote_agent(target.name)


def test_partial_metadata_and_descriptors_of_a_process(target: SimpleNamespace) -> None:
    agent, memory = _initiator(target)
    agent.add_remote_agent(target.ask("partial"))
    there = agent.deserialize_descs(target.ask("descs"))
    assert there[0] == (target.address, target.size, 0)
    handle = agent.initialize_xfer("READ", descs(agent, (memory.ctypes.data, target.size)), there, target.name, b"got")
    finish(agent, handle)
    assert memory.tobytes() == target.ask("bytes")
    assert target.ask("notifs") == {agent.name: [b"got"]}
    agent.release_xfer_handle(handle)
    agent.remove_remote_agent(target.name)


def test_killed_peer(target: SimpleNamespace) -> None:
    """A post to a process that was killed ends with an exception, and the agent goes on with others."""
    agent, memory = _initiator(target)
    agent.add_remote_agent(target.metadata)
    here = descs(agent, (memory.ctypes.data, PAGE))
    there = descs(agent, (target.address, PAGE))
    handle = agent.initialize_xfer("WRITE", here, there, target.name, b"x")
    finish(agent, handle)
    os.kill(target.process.pid, signal.SIGKILL)
    target.process.join()

    def has_ended() -> bool:
        try:
            agent.transfer(handle)
            until(lambda: agent.check_xfer_state(handle) != "PROC", "the transfer ends")
        except bind.nixlRemoteDisconnectError:
            return True
        return False

    until(has_ended, "the transfer fails")
    with pytest.raises(bind.nixlRemoteDisconnectError):
        agent.check_xfer_state(handle)
    with pytest.raises(bind.nixlRemoteDisconnectError):
        agent.transfer(handle)
    with pytest.raises(bind.nixlRemoteDisconnectError):
        agent.send_notif(target.name, b"x")
    # The metadata stays until it is removed.
    assert agent.check_remote_metadata(target.name) is True
    agent.release_xfer_handle(handle)
    agent.release_xfer_handle(agent.initialize_xfer("WRITE", here, there, target.name))
    agent.remove_remote_agent(target.name)
    assert agent.check_remote_metadata(target.name) is False
    other = Pair()
    local, remote = other.sides([0], [0])
    again = other.a.make_prepped_xfer("WRITE", local, [0], remote, [0])
    finish(other.a, again)
    assert (other.there[:PAGE] == other.here[:PAGE]).all()
    other.a.release_xfer_handle(again)
    other.a.remove_remote_agent(other.b.name)
