"""Mooncake's engine over multirail: the differential test with both, and what is ours alone."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from differential_mooncake import HOST, PAGE, Target, closed_port

import multirail
from multirail.compat import mooncake
from multirail.compat.mooncake import TransferEngine

LIMIT = 240
"""Seconds for the differential test, which takes 25 on two cores."""


def new_engine() -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    return engine


def session_of(engine: TransferEngine) -> str:
    return f"{HOST}:{engine.get_rpc_port()}"


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.socket() as server:
        server.bind((HOST, 0))
        server.listen()
        yield f"{HOST}:{server.getsockname()[1]}"


@pytest.mark.parametrize("api", ["multirail.compat.mooncake", "mooncake.engine"])
def test_differential(api: str) -> None:
    if api == "mooncake.engine" and importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed: pip install mooncake-transfer-engine-non-cuda")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    test = Path(__file__).with_name("differential_mooncake.py")
    environment = os.environ | {"MOONCAKE_API": api}
    done = subprocess.run([*command, str(test)], env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_refused_transfers_do_not_harm_the_next() -> None:
    source, target = new_engine(), new_engine()
    memory, theirs = np.ones(PAGE, np.uint8), np.zeros(PAGE, np.uint8)
    assert source.register_memory(memory.ctypes.data, PAGE) == 0
    assert target.register_memory(theirs.ctypes.data, PAGE) == 0
    for _ in range(20):
        assert source.transfer_sync_write(session_of(target), memory.ctypes.data, PAGE, 8) == -1
        theirs[:] = 0
        assert source.transfer_sync_write(session_of(target), memory.ctypes.data, theirs.ctypes.data, PAGE) == 0
        assert (theirs == 1).all()


def test_a_local_buffer_must_be_registered_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    source, target = new_engine(), new_engine()
    memory, theirs = np.ones(PAGE, np.uint8), np.zeros(PAGE, np.uint8)
    assert target.register_memory(theirs.ctypes.data, PAGE) == 0
    here, there = memory.ctypes.data, theirs.ctypes.data
    with caplog.at_level(logging.ERROR, mooncake.__name__):
        assert source.transfer_sync_write(session_of(target), here, there, 8) == -1
        assert source.batch_transfer_sync_write(session_of(target), [here, here], [there, there], [8, 8]) == -1
    assert len(caplog.messages) == 2
    assert "register_memory()" in caplog.messages[0] and session_of(target) in caplog.messages[0]
    assert not theirs.any()


def test_one_transfer_may_not_span_two_buffers() -> None:
    source, target = new_engine(), new_engine()
    memory, theirs = np.ones(2 * PAGE, np.uint8), np.zeros(PAGE, np.uint8)
    here = memory.ctypes.data
    assert source.batch_register_memory([here, here + PAGE], [PAGE, PAGE]) == 0
    assert target.register_memory(theirs.ctypes.data, PAGE) == 0
    assert source.transfer_sync_write(session_of(target), here + PAGE - 8, theirs.ctypes.data, 16) == -1
    assert source.transfer_sync_write(session_of(target), here + PAGE - 8, theirs.ctypes.data, 8) == 0


def test_a_silent_peer_ends_by_the_deadline_and_the_gil_is_free(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    monkeypatch.setenv("MULTIRAIL_COMPAT_DEADLINE", "0.5")
    engine = new_engine()
    memory = np.ones(PAGE, np.uint8)
    assert engine.register_memory(memory.ctypes.data, PAGE) == 0
    is_over, turns = threading.Event(), 0

    def turn() -> None:
        nonlocal turns
        while not is_over.wait(0.01):
            turns += 1

    thread = threading.Thread(target=turn)
    thread.start()
    begun = time.monotonic()
    assert engine.transfer_sync_write(silent, memory.ctypes.data, memory.ctypes.data, 8) == -1
    first = time.monotonic() - begun
    assert engine.batch_transfer_async_write(silent, [memory.ctypes.data], [memory.ctypes.data], [8]) == 0
    assert engine.send_probe(silent) == -102
    assert engine.get_first_buffer_address(silent) == 0
    assert time.monotonic() - begun < 8
    is_over.set()
    thread.join()
    assert 0.4 < first < 4
    assert turns > 10


def test_a_peer_that_comes_back_is_connected_again() -> None:
    engine, target = new_engine(), Target()
    memory = np.arange(PAGE, dtype=np.uint8)
    assert engine.register_memory(memory.ctypes.data, PAGE) == 0
    assert engine.transfer_sync_write(target.session, memory.ctypes.data, target.address, PAGE) == 0
    target.kill()
    # The next owner of the port, with other memory.
    with multirail.Fabric() as fabric:
        region = fabric.alloc(PAGE)
        fabric.publish_catalogue("mooncake", multirail.Catalogue([region]))
        listener = fabric.listen(target.session).wait(30)
        assert engine.transfer_sync_write(target.session, memory.ctypes.data, region.address, PAGE) == 0
        assert region.read_bytes() == memory.tobytes()
        assert engine.transfer_sync_write(target.session, memory.ctypes.data, target.address, PAGE) == -1
        assert engine.send_probe(target.session) == 0
        del listener


def test_transfers_go_on_while_the_target_registers_other_memory() -> None:
    source, target = new_engine(), new_engine()
    memory, theirs = np.ones(PAGE, np.uint8), np.zeros(PAGE, np.uint8)
    other = np.zeros(PAGE, np.uint8)
    assert source.register_memory(memory.ctypes.data, PAGE) == 0
    assert target.register_memory(theirs.ctypes.data, PAGE) == 0
    is_over = threading.Event()
    changes: list[int] = []

    def change() -> None:
        while not is_over.is_set():
            changes.append(target.register_memory(other.ctypes.data, PAGE))
            changes.append(target.unregister_memory(other.ctypes.data))

    thread = threading.Thread(target=change)
    thread.start()
    codes = []
    for _ in range(50):
        # A new engine has no catalogue; an unknown address makes an engine fetch another.
        codes.append(source.transfer_sync_write(session_of(target), memory.ctypes.data, PAGE, 8))
        codes.append(source.transfer_sync_write(session_of(target), memory.ctypes.data, theirs.ctypes.data, PAGE))
    is_over.set()
    thread.join()
    assert codes == [-1, 0] * 50
    assert len(changes) > 10 and set(changes) == {0}


def test_numbers_of_transfers_end_with_their_result() -> None:
    source, target = new_engine(), new_engine()
    memory, theirs = np.ones(PAGE, np.uint8), np.zeros(PAGE, np.uint8)
    assert source.register_memory(memory.ctypes.data, PAGE) == 0
    assert target.register_memory(theirs.ctypes.data, PAGE) == 0
    pieces = ([memory.ctypes.data], [theirs.ctypes.data], [PAGE])
    number = source.batch_transfer_async_write(session_of(target), *pieces)
    assert source.get_batch_transfer_status([number]) == 0
    assert source.get_batch_transfer_status([number]) == -1
    assert source.get_batch_transfer_status([0]) == -1
    theirs[:] = 2
    number = source.batch_transfer_async(session_of(target), *pieces, mooncake.Read)
    while (status := source.transfer_check_status(number)) == 0:
        pass
    assert status == 1
    assert source.transfer_check_status(number) == -1
    assert (memory == 2).all()


def test_no_call_before_initialize_and_no_other_metadata(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = TransferEngine()
    for call in (engine.get_rpc_port, lambda: engine.register_memory(PAGE, 8), lambda: engine.send_probe("x:1")):
        with pytest.raises(RuntimeError, match="initialize"):
            call()
    with caplog.at_level(logging.ERROR, mooncake.__name__):
        assert engine.initialize(HOST, "etcd://127.0.0.1:2379", "rdma", "") == -1
        assert engine.initialize("no.such.host.invalid", "P2PHANDSHAKE", "rdma", "") == -1
        monkeypatch.setenv("MULTIRAIL_COMPAT_DEADLINE", "soon")
        assert engine.initialize(HOST, "P2PHANDSHAKE", "rdma", "") == -1
    assert "P2PHANDSHAKE" in caplog.messages[0]
    assert "no.such.host.invalid" in caplog.messages[1]
    assert "MULTIRAIL_COMPAT_DEADLINE" in caplog.messages[2]


def test_an_engine_that_is_dropped_or_opened_anew_leaves_its_port() -> None:
    engine, other = new_engine(), new_engine()
    first = session_of(engine)
    assert other.send_probe(first) == 0
    assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    second = session_of(engine)
    assert other.send_probe(first) == -102
    assert other.send_probe(second) == 0
    assert other.warmup_efa_segment(second) == 0
    assert len(json.loads(engine.get_local_topology())["cpu:0"][0]) > 0
    del engine
    assert other.send_probe(second) == -102


@pytest.mark.parametrize(
    ("name", "host"),
    [("host", "host"), ("host:7", "host"), ("::1", "[::1]"), ("[::1]", "[::1]"), ("[::1]:7", "[::1]")],
)
def test_hosts_of_names(name: str, host: str) -> None:
    assert mooncake._host_of(name) == host


@pytest.fixture
def without_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    # Entries that a test sets are taken out again.
    for name in ("mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("without_mooncake")
def test_install_modules() -> None:
    mooncake.install_modules()
    mooncake.install_modules()
    assert importlib.import_module("mooncake.engine").TransferEngine is TransferEngine
    assert importlib.import_module("mooncake").engine is mooncake
    assert importlib.util.find_spec("mooncake") is not None
    with pytest.raises(ModuleNotFoundError, match=r"mooncake\.store"):
        importlib.import_module("mooncake.store")


@pytest.mark.usefixtures("without_mooncake")
def test_install_modules_refuses_where_mooncake_is_imported() -> None:
    sys.modules["mooncake"] = ModuleType("mooncake")
    with pytest.raises(RuntimeError, match="force=True"):
        mooncake.install_modules()
    assert "mooncake.engine" not in sys.modules
    mooncake.install_modules(force=True)
    assert importlib.import_module("mooncake.engine") is mooncake


def test_sessions_of_nobody_are_refused_at_once() -> None:
    engine = new_engine()
    begun = time.monotonic()
    assert engine.send_probe(f"{HOST}:{closed_port()}") == -102
    assert time.monotonic() - begun < 5
