"""Agents of other processes: their removal, death and restart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from nixl._api import nixlBind
from nixl_pairs import (
    BACKEND,
    PAGE,
    PATIENCE,
    end_of,
    finish,
    make_agent,
    next_name,
    notifications,
    pattern,
    register,
    rows,
)
from target_process import Target, checksum

#: Milliseconds; the deadlines of the agents of these tests.
DEADLINES = {"deadline_ms": "4000", "peer_timeout_ms": "3000"} if BACKEND == "MULTIRAIL" else {}
#: Seconds within which an error must come: the deadline, and a second for the machine.
LIMIT = 5.0
SIZE = 64 << 20
#: The pieces of a transfer.
COUNT = 64


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target(next_name("target"), SIZE, DEADLINES)
    yield made
    made.stop()


class Initiator:
    """An agent of this process with memory of its own, as large as the target's."""

    def __init__(self, target: Target) -> None:
        self.agent = make_agent(next_name("initiator"), DEADLINES)
        self.memory = pattern(SIZE, 1)
        self.registered = register(self.agent, self.memory)
        self.agent.add_remote_agent(target.metadata)

    def whole(self, target: Target, operation: str, note: bytes = b"", address: int | None = None) -> Any:
        """A transfer of all memory, in pieces whose order is turned round."""
        piece = SIZE // COUNT
        local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows(self.memory, range(COUNT), piece), "DRAM")
        there = rows(self.memory, range(COUNT)[::-1], piece)
        there[:, 0] += np.uint64(((address or target.address) - self.memory.ctypes.data) % (1 << 64))
        remote = self.agent.prep_xfer_dlist(target.name, there, "DRAM")
        return self.agent.make_prepped_xfer(operation, local, list(range(COUNT)), remote, list(range(COUNT)), note)

    def turned(self) -> Any:
        """The memory as a transfer leaves it at the other side."""
        return np.ascontiguousarray(self.memory.reshape(COUNT, -1)[::-1])


def post_and_raise(agent: Any, handle: Any) -> None:
    """Posts a transfer, and raises its error, whether the post or a later look at it tells."""
    agent.transfer(handle)
    failure = end_of(agent, handle)
    assert isinstance(failure, Exception), failure
    raise failure


def test_write_and_read(target: Target) -> None:
    it = Initiator(target)
    finish(it.agent, it.whole(target, "WRITE", b"written"))
    assert target.ask("notifications", 1) == {it.agent.name: [b"written"]}
    written = it.memory.copy()
    assert target.ask("checksum") == checksum(it.turned())
    it.memory[:] = 0
    handle = it.whole(target, "READ", b"read")
    finish(it.agent, handle)
    assert (it.memory == written).all()
    assert target.ask("notifications", 1) == {it.agent.name: [b"read"]}
    it.agent.release_xfer_handle(handle)
    it.agent.remove_remote_agent(target.name)


def test_removed_agent(target: Target) -> None:
    """A removed agent is unknown, its transfers fail, and new metadata makes it known again."""
    it = Initiator(target)
    handle = it.whole(target, "WRITE")
    finish(it.agent, handle)
    it.agent.remove_remote_agent(target.name)
    assert not it.agent.check_remote_metadata(target.name)
    with pytest.raises(nixlBind.nixlNotFoundError):
        it.agent.transfer(handle)
    with pytest.raises(nixlBind.nixlNotFoundError):
        it.agent.send_notif(target.name, b"?")
    it.agent.add_remote_agent(target.metadata)
    with pytest.raises(nixlBind.nixlNotFoundError):
        it.agent.transfer(handle)
    finish(it.agent, it.whole(target, "WRITE", b"anew"))
    assert target.ask("notifications", 1) == {it.agent.name: [b"anew"]}
    it.agent.release_xfer_handle(handle)
    it.agent.remove_remote_agent(target.name)


def test_removed_while_a_transfer_is_under_way(target: Target) -> None:
    it = Initiator(target)
    finish(it.agent, it.whole(target, "WRITE"))
    handle = it.whole(target, "READ")
    it.agent.transfer(handle)
    it.agent.remove_remote_agent(target.name)
    end = end_of(it.agent, handle)
    assert end == "DONE" or isinstance(end, nixlBind.nixlNotFoundError)
    with contextlib.suppress(nixlBind.nixlRepostActiveError):
        it.agent.release_xfer_handle(handle)
    if not handle._released:
        it.agent.release_xfer_handle(handle)
    if BACKEND == "MULTIRAIL":
        it.memory[:] = 88
        it.agent.add_remote_agent(target.metadata)
        it.agent.send_notif(target.name, b"alive")
        assert target.ask("notifications", 1) == {it.agent.name: [b"alive"]}
        assert (it.memory == 88).all()


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_killed_target(target: Target, operation: str, record_property: Any) -> None:
    """Transfers go on one after the other until one fails, which must come within the deadline."""
    it = Initiator(target)
    handle = it.whole(target, operation)
    finish(it.agent, handle)
    it.agent.transfer(handle)
    target.kill()
    killed = time.monotonic()
    failure: Exception | str = "DONE"
    limit = LIMIT if BACKEND == "MULTIRAIL" else PATIENCE
    while failure == "DONE" and time.monotonic() < killed + limit:
        failure = end_of(it.agent, handle, limit)
        if failure == "DONE":
            try:
                it.agent.transfer(handle)
            except Exception as error:
                failure = error
    took = time.monotonic() - killed
    record_property("killed_target", f"{BACKEND} {operation}: {took * 1000:.0f} ms, {type(failure).__name__}")
    print(f"{BACKEND}, {operation}, target killed: {failure!r} after {took * 1000:.0f} ms")
    assert isinstance(failure, nixlBind.nixlRemoteDisconnectError) and took < limit
    with pytest.raises((nixlBind.nixlNotFoundError, nixlBind.nixlRemoteDisconnectError)):
        post_and_raise(it.agent, handle)
    it.agent.release_xfer_handle(handle)


def test_restarted_target(target: Target) -> None:
    """A target that starts anew under its name: new metadata works, and old transfers fail typed."""
    it = Initiator(target)
    old = it.whole(target, "WRITE")
    finish(it.agent, old)
    target.kill()
    target.start()
    with contextlib.suppress(Exception):
        it.agent.remove_remote_agent(target.name)
    it.agent.add_remote_agent(target.metadata)
    with pytest.raises((nixlBind.nixlNotFoundError, nixlBind.nixlRemoteDisconnectError)):
        post_and_raise(it.agent, old)
    finish(it.agent, it.whole(target, "WRITE", b"reborn"))
    assert target.ask("notifications", 1) == {it.agent.name: [b"reborn"]}
    assert target.ask("checksum") == checksum(it.turned())
    it.agent.release_xfer_handle(old)
    it.agent.remove_remote_agent(target.name)


@pytest.mark.multirail_only
def test_old_metadata_of_a_restarted_target(target: Target) -> None:
    """Metadata from before the restart never reaches the new process."""
    it = Initiator(target)
    old, address = target.metadata, target.address
    target.kill()
    target.start()
    handle = it.whole(target, "WRITE", address=address)
    with pytest.raises(nixlBind.nixlRemoteDisconnectError):
        post_and_raise(it.agent, handle)
    assert target.ask("checksum") == target.checksum
    it.agent.release_xfer_handle(handle)
    it.agent.add_remote_agent(old)
    with pytest.raises(nixlBind.nixlRemoteDisconnectError):
        it.agent.send_notif(target.name, b"?")


@pytest.mark.multirail_only
def test_target_that_is_gone_before_the_first_use(target: Target) -> None:
    it = Initiator(target)
    target.kill()
    started = time.monotonic()
    handle = it.whole(target, "WRITE")
    assert time.monotonic() - started < 1.0
    with pytest.raises(nixlBind.nixlRemoteDisconnectError):
        post_and_raise(it.agent, handle)
    it.agent.release_xfer_handle(handle)


@pytest.mark.multirail_only
def test_stopped_target_meets_the_deadline(target: Target) -> None:
    """A target that does not answer: connecting does not block, and the transfer fails within its time."""
    it = Initiator(target)
    target.freeze()
    started = time.monotonic()
    handle = it.whole(target, "WRITE")
    state = it.agent.transfer(handle)
    assert time.monotonic() - started < 1.0 and state == "PROC"
    failure = end_of(it.agent, handle, LIMIT)
    assert isinstance(failure, nixlBind.nixlRemoteDisconnectError)
    target.thaw()
    it.agent.release_xfer_handle(handle)


@pytest.mark.multirail_only
@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_released_memory_is_not_touched_at_both_ends(target: Target, operation: str) -> None:
    it = Initiator(target)
    finish(it.agent, it.whole(target, operation))
    for turn in range(8):
        handle = it.whole(target, operation)
        it.agent.transfer(handle)
        with contextlib.suppress(nixlBind.nixlRepostActiveError):
            it.agent.release_xfer_handle(handle)
        if not handle._released:
            it.agent.release_xfer_handle(handle)
        mark = 100 + turn
        if operation == "WRITE":
            target.ask("fill", mark)
            it.memory[:] = turn
        else:
            it.memory[:] = mark
            target.ask("fill", turn)
        it.agent.send_notif(target.name, b"after")
        assert target.ask("notifications", 1) == {it.agent.name: [b"after"]}
        if operation == "WRITE":
            assert target.ask("checksum") == checksum(np.full(SIZE, mark, np.uint8))
        else:
            assert (it.memory == mark).all()


def test_notification_of_a_peer_that_ends(target: Target) -> None:
    """What an agent has sent arrives, even if it ends right after the transfer."""
    receiver = make_agent(next_name("receiver"), DEADLINES)
    memory = pattern(PAGE, 4)
    register(receiver, memory)
    target.ask("send to", receiver.get_agent_metadata(), receiver.name, memory.ctypes.data)
    assert notifications(receiver, 1) == {target.name: [b"from target"]}
    assert (memory == 3).all()
