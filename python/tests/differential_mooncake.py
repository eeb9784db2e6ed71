"""Tests of Mooncake's ``TransferEngine`` that pass with Mooncake's wheel and with ours.

The environment variable ``MOONCAKE_API`` names the module: ``mooncake.engine``, or ``multirail.compat.mooncake``. Run
it by ``pytest differential_mooncake.py``; ``test_compat_mooncake.py`` runs it with each. Only results that a user may
rely on are compared: codes below zero where Mooncake has several for one cause, and nothing that it leaves undefined.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

API = os.environ.get("MOONCAKE_API", "multirail.compat.mooncake")
HOST = "127.0.0.1"
SIZE = 1 << 20
PAGE = 4096


def new_engine() -> Any:
    engine = importlib.import_module(API).TransferEngine()
    assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    return engine


def run_target() -> None:
    """The other process: an engine, ``SIZE`` registered bytes, and a buffer for later. Obeys the lines of its input."""
    engine = new_engine()
    memory, later = np.zeros(SIZE, np.uint8), np.zeros(PAGE, np.uint8)
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    print("TARGET", engine.get_rpc_port(), memory.ctypes.data, later.ctypes.data, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["sum", start, end]:
                answer = int(memory[int(start) : int(end)].astype(np.uint64).sum())
            case ["fill", value]:
                memory[:] = int(value)
                answer = 0
            case ["register"]:
                answer = engine.register_memory(later.ctypes.data, later.nbytes)
            case ["unregister"]:
                answer = engine.unregister_memory(memory.ctypes.data)
            case ["restore"]:
                answer = engine.register_memory(memory.ctypes.data, memory.nbytes)
            case ["reset"]:
                # Whatever a test has registered or not: afterwards all is as at the start.
                engine.get_notifies()
                for array in (memory, later):
                    engine.unregister_memory(array.ctypes.data)
                memory[:] = 0
                answer = engine.register_memory(memory.ctypes.data, memory.nbytes)
            case ["notifies"]:
                arrived = engine.get_notifies()
                answer = sum(1 for notify in arrived if (notify.name, notify.msg) == ("layer", "three"))
        print("TARGET", answer, flush=True)


class Target:
    """A process with an engine, and what it told of itself."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        port, self.address, self.later = self.answer()
        self.session = f"{HOST}:{port}"

    def answer(self) -> list[int]:
        assert self.process.stdout is not None
        # Mooncake logs to the same stream.
        for line in self.process.stdout:
            if "TARGET" in line:
                return [int(word) for word in line.partition("TARGET")[2].split()]
        raise AssertionError("the target has ended")

    def ask(self, request: str) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        return self.answer()[0]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def targets() -> Iterator[list[Target]]:
    """The target that lives, if one does: to start one takes as long as all that a test does."""
    kept: list[Target] = []
    yield kept
    for target in kept:
        target.kill()


@pytest.fixture
def target(targets: list[Target]) -> Iterator[Target]:
    target = targets.pop() if targets else Target()
    yield target
    if target.process.poll() is None:
        assert target.ask("reset") == 0
        targets.append(target)


@pytest.fixture
def engine() -> Any:
    return new_engine()


@pytest.fixture
def memory(engine: Any) -> npt.NDArray[np.uint8]:
    memory = np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8)
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    return memory


# Each holds its port and does not listen, so that no other program can listen there.
_SILENT: list[socket.socket] = []


def closed_port() -> int:
    probe = socket.socket()
    probe.bind((HOST, 0))
    _SILENT.append(probe)
    port: int = probe.getsockname()[1]
    return port


def test_a_sync_write_arrives_and_a_read_returns_it(engine: Any, memory: npt.NDArray[np.uint8], target: Target) -> None:
    here = memory.ctypes.data
    half = SIZE // 2
    assert engine.transfer_sync_write(target.session, here, target.address + 10, half) == 0
    assert target.ask(f"sum 10 {10 + half}") == int(memory[:half].astype(np.uint64).sum())
    assert target.ask(f"sum 0 {SIZE}") == int(memory[:half].astype(np.uint64).sum())
    assert engine.transfer_sync_read(target.session, here + half, target.address + 10, half) == 0
    assert (memory[half:] == memory[:half]).all()


@pytest.mark.parametrize("count", [2, 64, 1000])
def test_batches_move_each_piece_to_its_place(
    engine: Any, memory: npt.NDArray[np.uint8], target: Target, count: int
) -> None:
    rng = np.random.default_rng(count)
    size = SIZE // 1024
    sources, places = (rng.permutation(1024)[:count] * size for _ in range(2))
    lengths = rng.integers(1, size + 1, count)
    assert target.ask("fill 0") == 0
    want = np.zeros(SIZE, np.uint8)
    for source, place, length in zip(sources, places, lengths, strict=True):
        want[place : place + length] = memory[source : source + length]
    local = [memory.ctypes.data + int(source) for source in sources]
    remote = [target.address + int(place) for place in places]
    each = [int(length) for length in lengths]
    assert engine.batch_transfer_sync_write(target.session, local, remote, each) == 0
    back = np.zeros(SIZE, np.uint8)
    assert engine.register_memory(back.ctypes.data, SIZE) == 0
    assert engine.transfer_sync_read(target.session, back.ctypes.data, target.address, SIZE) == 0
    assert (back == want).all()
    # Scattered back, to where the pieces came from.
    again = np.zeros(SIZE, np.uint8)
    assert engine.register_memory(again.ctypes.data, SIZE) == 0
    local = [again.ctypes.data + int(source) for source in sources]
    assert engine.batch_transfer_sync_read(target.session, local, remote, each) == 0
    for source, length in zip(sources, lengths, strict=True):
        assert (again[source : source + length] == memory[source : source + length]).all()


def test_numpy_integers_tuples_and_keywords_are_taken(
    engine: Any, memory: npt.NDArray[np.uint8], target: Target
) -> None:
    here = memory.ctypes.data
    pieces = [np.array([number], np.uint64) for number in (here, target.address, PAGE)]
    assert engine.batch_transfer_sync_write(target.session, *pieces) == 0
    assert engine.batch_transfer_sync_write(target.session, (here,), (target.address,), (PAGE,)) == 0
    written = engine.transfer_sync_write(
        target_hostname=target.session, buffer=here, peer_buffer_address=target.address, length=np.int64(PAGE)
    )
    assert written == 0


def test_empty_transfers_succeed_and_unequal_lists_do_not(
    engine: Any, memory: npt.NDArray[np.uint8], target: Target
) -> None:
    here = memory.ctypes.data
    assert engine.transfer_sync_write(target.session, here, target.address, 0) == 0
    assert engine.batch_transfer_sync_write(target.session, [], [], []) == 0
    assert engine.batch_transfer_sync_write(target.session, [here], [target.address] * 2, [8]) < 0
    assert engine.batch_transfer_async_write(target.session, [here], [target.address], [8, 8]) == 0


def test_wrong_types_raise(engine: Any, memory: npt.NDArray[np.uint8], target: Target) -> None:
    here = memory.ctypes.data
    calls: list[Callable[[], int]] = [
        lambda: engine.register_memory("memory", 8),
        lambda: engine.register_memory(1.5, 8),
        lambda: engine.register_memory(-1, 8),
        lambda: engine.register_memory(here, -8),
        lambda: engine.transfer_sync_write(target.session, 1.5, target.address, 8),
        lambda: engine.batch_transfer_sync_write(target.session, [-1], [target.address], [8]),
        lambda: engine.batch_transfer_sync_write(target.session, [-1, here], [target.address] * 2, [8, 8]),
        lambda: engine.transfer_sync(target.session, here, target.address, 8, 1),
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()


def test_registration_refuses_overlaps_and_unknown_memory(engine: Any) -> None:
    memory = np.zeros(8 * PAGE, np.uint8)
    here = memory.ctypes.data
    assert engine.register_memory(here + PAGE, 2 * PAGE) == 0
    for start, length in [(1, 2), (1, 1), (2, 1), (0, 2), (2, 2), (0, 4)]:
        assert engine.register_memory(here + start * PAGE, length * PAGE) == -7
    # Neighbours do not overlap.
    assert engine.register_memory(here, PAGE) == 0
    assert engine.register_memory(here + 3 * PAGE, PAGE) == 0
    assert engine.register_memory(here + 6 * PAGE, 0) < 0
    assert engine.unregister_memory(here + 2 * PAGE) == -3
    assert engine.unregister_memory(here + PAGE) == 0
    assert engine.unregister_memory(here + PAGE) == -3
    assert engine.register_memory(here + PAGE, PAGE) == 0


def test_batches_are_registered_as_one(engine: Any) -> None:
    memory = np.zeros(8 * PAGE, np.uint8)
    first, second, third = (memory.ctypes.data + 2 * number * PAGE for number in range(3))
    assert engine.batch_register_memory([first, second], [PAGE, PAGE]) == 0
    assert engine.batch_register_memory([third, second], [PAGE, PAGE]) == -7
    assert engine.unregister_memory(third) == -3
    assert engine.batch_register_memory([third, first], [PAGE]) < 0
    assert engine.batch_register_memory([], []) == 0
    assert engine.batch_unregister_memory([first, second]) == 0
    assert engine.batch_unregister_memory([first, second]) == -3


def test_unknown_addresses_of_the_peer_fail_and_harm_nothing(
    engine: Any, memory: npt.NDArray[np.uint8], target: Target
) -> None:
    here = memory.ctypes.data
    end = target.address + SIZE
    for address, length in [(PAGE, 8), (end - 10, 11), (target.address - 1, 8), (end, 1)]:
        assert engine.transfer_sync_write(target.session, here, address, length) < 0
        assert engine.transfer_sync_read(target.session, here, address, length) < 0
    assert engine.batch_transfer_sync_write(target.session, [here, here], [target.address, PAGE], [8, 8]) < 0
    # Mooncake fails one good transfer after some that were refused.
    assert any(engine.transfer_sync_write(target.session, here, end - 10, 10) == 0 for _ in range(3))


def test_memory_that_is_registered_later_is_found(engine: Any, memory: npt.NDArray[np.uint8], target: Target) -> None:
    here = memory.ctypes.data
    assert engine.transfer_sync_write(target.session, here, target.address, 8) == 0
    assert engine.transfer_sync_write(target.session, here, target.later, PAGE) < 0
    assert target.ask("register") == 0
    assert engine.transfer_sync_write(target.session, here, target.later, PAGE) == 0
    assert engine.transfer_sync_read(target.session, here + PAGE, target.later, PAGE) == 0
    assert (memory[PAGE : 2 * PAGE] == memory[:PAGE]).all()


def test_memory_that_is_taken_back_is_refused_until_it_is_registered_again(
    engine: Any, memory: npt.NDArray[np.uint8], target: Target
) -> None:
    here = memory.ctypes.data
    assert engine.transfer_sync_write(target.session, here, target.address, 8) == 0
    assert target.ask("unregister") == 0
    assert engine.transfer_sync_write(target.session, here, target.address, 8) < 0
    assert target.ask("restore") == 0
    assert engine.transfer_sync_write(target.session, here, target.address, 8) == 0
    assert engine.batch_transfer_sync_write(target.session, [here] * 2, [target.address] * 2, [8, 8]) == 0


def test_async_transfers_are_waited_for_by_number(engine: Any, memory: npt.NDArray[np.uint8], target: Target) -> None:
    here, half = memory.ctypes.data, SIZE // 2
    write = engine.batch_transfer_async_write(target.session, [here, here + 64], [target.address] * 2, [64, 64])
    assert write > 0
    assert engine.get_batch_transfer_status([write]) == 0
    assert engine.get_batch_transfer_status([]) == 0
    reads = [
        engine.batch_transfer_async_read(target.session, [here + half + at], [target.address], [64]) for at in (0, 64)
    ]
    assert all(read > 0 for read in reads)
    assert engine.get_batch_transfer_status(reads) == 0
    assert (memory[half : half + 64] == memory[half + 64 : half + 128]).all()
    assert engine.batch_transfer_async_write(f"{HOST}:{closed_port()}", [here], [target.address], [8]) == 0
    submitted = engine.transfer_submit_write(target.session, here, target.address, 64)
    assert submitted > 0
    while (status := engine.transfer_check_status(submitted)) == 0:
        pass
    assert status == 1


def test_opcodes_and_notifications(engine: Any, memory: npt.NDArray[np.uint8], target: Target) -> None:
    api = importlib.import_module(API)
    here, peer, half = memory.ctypes.data, target.address, SIZE // 2
    assert (int(api.TransferOpcode.Read), int(api.TransferOpcode.Write)) == (0, 1)
    assert api.TransferEngine.TransferOpcode.Write == api.TransferOpcode.Write
    notify = api.TransferNotify("layer", "three")
    assert engine.transfer_sync(target.session, here, peer, 64, api.TransferOpcode.Write, notify) == 0
    assert engine.batch_transfer_sync(target.session, [here + half], [peer], [64], api.TransferOpcode.Read) == 0
    assert (memory[half : half + 64] == memory[:64]).all()
    # The transfer may end before its notification is in the list.
    arrived = 0
    while arrived == 0:
        arrived = target.ask("notifies")
    assert arrived == 1
    assert target.ask("notifies") == 0


def test_probes_and_the_first_buffer(engine: Any, target: Target) -> None:
    assert engine.send_probe(target.session) == 0
    assert engine.send_probe(f"{HOST}:{closed_port()}") == -102
    assert engine.send_probe("no address") == -101
    assert engine.get_first_buffer_address(target.session) == target.address
    assert engine.get_first_buffer_address(f"{HOST}:{closed_port()}") == 0


def test_managed_buffers(engine: Any, target: Target) -> None:
    buffer = engine.allocate_managed_buffer(PAGE)
    assert buffer > 0
    assert engine.write_bytes_to_buffer(buffer, b"he\xffl\0", 5) == 0
    assert engine.read_bytes_from_buffer(buffer, 5) == b"he\xffl\0"
    assert engine.transfer_sync_write(target.session, buffer, target.address, 5) == 0
    assert target.ask("sum 0 5") == sum(b"he\xffl\0")
    assert engine.free_managed_buffer(buffer, PAGE) == 0


def test_an_engine_reaches_itself(engine: Any, memory: npt.NDArray[np.uint8]) -> None:
    here = memory.ctypes.data
    assert engine.transfer_sync_write(f"{HOST}:{engine.get_rpc_port()}", here, here + PAGE, PAGE) == 0
    assert (memory[:PAGE] == memory[PAGE : 2 * PAGE]).all()


def test_sessions_that_are_not_there_fail(engine: Any, memory: npt.NDArray[np.uint8]) -> None:
    here = memory.ctypes.data
    for session in (f"{HOST}:{closed_port()}", "no address"):
        assert engine.transfer_sync_write(session, here, here, 8) < 0
        assert engine.transfer_sync_read(session, here, here, 8) < 0
        assert engine.batch_transfer_sync_write(session, [here], [here], [8]) < 0
        assert engine.batch_transfer_sync_write(session, [], [], []) < 0


def test_a_dead_peer_fails_and_the_engine_lives_on(engine: Any, memory: npt.NDArray[np.uint8], target: Target) -> None:
    here = memory.ctypes.data
    assert engine.transfer_sync_write(target.session, here, target.address, PAGE) == 0
    target.kill()
    assert engine.transfer_sync_write(target.session, here, target.address, PAGE) < 0
    assert engine.batch_transfer_sync_read(target.session, [here], [target.address], [PAGE]) < 0
    assert engine.send_probe(target.session) == -102
    other = Target()
    assert engine.transfer_sync_write(other.session, here, other.address, PAGE) == 0
    other.kill()
    assert engine.unregister_memory(here) == 0


def test_threads_share_an_engine(engine: Any, memory: npt.NDArray[np.uint8], target: Target) -> None:
    here, codes = memory.ctypes.data, []

    def write(number: int) -> None:
        for turn in range(20):
            at = (number * 20 + turn) * PAGE
            codes.append(engine.transfer_sync_write(target.session, here + at, target.address + at, PAGE))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 80
    assert target.ask(f"sum 0 {80 * PAGE}") == int(memory[: 80 * PAGE].astype(np.uint64).sum())


if __name__ == "__main__" and sys.argv[1:] == ["target"]:
    run_target()
