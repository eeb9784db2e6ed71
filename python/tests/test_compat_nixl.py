"""The compatibility with NIXL: the differential tests, and what multirail alone promises."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from conftest import SCALE  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from multirail.compat import nixl  # noqa: E402
from multirail.compat.nixl import _wire  # noqa: E402

bind = nixl.nixlBind
HERE = pathlib.Path(__file__).parent
PATIENCE = 30.0


# ---- the differential tests ----


def _differential(api: str) -> tuple[int, int]:
    """The exit status, and how many tests have passed. Fails if any other result is reported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "differential_nixl.py")]
    environment = {**os.environ, "NIXL_API": api, "NIXL_LOG_LEVEL": "FATAL"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    summary = re.search(r"^(\d+) passed(, \d+ warnings?)? in ", done.stdout, re.MULTILINE)
    assert summary is not None, done.stdout[-4000:] + done.stderr[-2000:]
    return done.returncode, int(summary[1])


def test_differential_with_multirail() -> None:
    status, passed = _differential("multirail.compat.nixl")
    assert status == 0 and passed > 40


def test_differential_with_nixl() -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed: pip install --no-deps nixl nixl-cu12")
    status, passed = _differential("nixl._api")
    # NIXL 1.5.1 crashes when the interpreter exits, after the last test, also where multirail was never imported.
    assert status in (0, -signal.SIGSEGV) and passed > 40


# ---- helpers ----


def buffer(length: int, fill: int = 0) -> Any:
    return np.full(length, fill, np.uint8)


def register(agent: Any, array: Any) -> Any:
    return agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")


def whole(agent: Any, array: Any) -> Any:
    return agent.get_xfer_descs([(array.ctypes.data, array.nbytes, 0)], "DRAM")


def outcome(agent: Any, handle: Any) -> Any:
    """The last state, or the exception."""
    end = time.monotonic() + PATIENCE
    try:
        while (state := agent.check_xfer_state(handle)) == "PROC":
            assert time.monotonic() < end, "the transfer does not end"
    except Exception as error:
        return error
    return state


def pair(here: Any, there: Any, tag: str) -> tuple[Any, Any]:
    a, b = nixl.nixl_agent(f"{tag} a"), nixl.nixl_agent(f"{tag} b")
    register(a, here)
    register(b, there)
    a.add_remote_agent(b.get_agent_metadata())
    return a, b


def _serve(pipe: Any, size: int) -> None:
    agent, memory = nixl.nixl_agent("served"), buffer(size, 5)
    register(agent, memory)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    pipe.recv()


@contextlib.contextmanager
def serving() -> Iterator[SimpleNamespace]:
    """An agent named "served" in a process of its own."""
    context, size = multiprocessing.get_context("spawn"), 64 << 20
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, size), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(PATIENCE), "the target starts"
    metadata, address = ours.recv()
    yield SimpleNamespace(process=process, metadata=metadata, address=address, size=size)
    with contextlib.suppress(OSError):
        ours.send("end")
    if process.is_alive():
        os.kill(process.pid, signal.SIGCONT)
    process.join(PATIENCE)
    assert not process.is_alive()


@pytest.fixture
def served() -> Iterator[SimpleNamespace]:
    with serving() as process:
        yield process


@pytest.fixture(scope="module")
def shared() -> Iterator[SimpleNamespace]:
    """As `served`, for tests that leave the process alive."""
    with serving() as process:
        yield process


# ---- metadata ----


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[Any, bytes]]:
    """An agent, and the metadata of another."""
    memory = buffer(4096)
    a, b = pair(memory, memory, "garbage")
    yield a, b.get_agent_metadata()
    assert a.check_remote_metadata("garbage b") is True


@settings(deadline=None, max_examples=100 * SCALE)
@given(data=st.data())
def test_damaged_metadata_is_refused(told: tuple[Any, bytes], data: Any) -> None:
    agent, good = told
    how = data.draw(st.sampled_from(["flip", "cut", "grow", "random"]))
    at = data.draw(st.integers(0, len(good) - 1))
    if how == "flip":
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    elif how == "cut":
        bad = good[:at]
    elif how == "grow":
        bad = good + data.draw(st.binary(min_size=1, max_size=64))
    else:
        bad = data.draw(st.binary(max_size=256))
    with pytest.raises(bind.nixlMismatchError, match="NIXL_ERR_MISMATCH: "):
        agent.add_remote_agent(bad)


@settings(deadline=None, max_examples=100 * SCALE)
@given(fields=st.lists(st.binary(max_size=64), max_size=9), kind=st.integers(0, 4))
def test_well_packed_nonsense_is_refused(told: tuple[Any, bytes], fields: list[bytes], kind: int) -> None:
    agent, _ = told
    packed = _wire._pack(kind, fields)
    try:
        name = agent.add_remote_agent(packed)
    except (bind.nixlMismatchError, bind.nixlNotFoundError):
        pass
    else:
        assert name == fields[0]
        agent.remove_remote_agent(name)
    try:
        descs = agent.deserialize_descs(packed)
    except (bind.nixlMismatchError, RuntimeError):
        pass
    else:
        assert agent.deserialize_descs(agent.get_serialized_descs(descs)) == descs


def test_metadata_says_what_is_wrong(told: tuple[Any, bytes]) -> None:
    agent, good = told
    with pytest.raises(bind.nixlMismatchError, match="of NIXL itself"):
        agent.add_remote_agent(b"\x00\x01nixlSerDes|" + b"x" * 100)
    with pytest.raises(bind.nixlMismatchError, match="version 7"):
        agent.add_remote_agent(good[:4] + (7).to_bytes(2, "little") + good[6:])
    with pytest.raises(bind.nixlMismatchError, match="damaged or cut"):
        agent.add_remote_agent(good[:-1])


def test_metadata_that_lies() -> None:
    """Metadata whose table does not fit its catalogue fails when it is used, and moves nothing."""
    here, there = buffer(4096, 1), buffer(4096, 2)
    a, b = pair(here, there, "lies")
    true = _wire.Metadata.of_bytes(b.get_agent_metadata())
    past = buffer(4096, 3)
    for rows, catalogue in (
        ([[past.ctypes.data, past.nbytes, 0, 0]], true.catalogue[:-1]),
        ([[past.ctypes.data, past.nbytes, 0, 0]], b""),
        ([*true.rows.tolist(), [past.ctypes.data, past.nbytes, 0, 0]], true.catalogue),
        ([[there.ctypes.data, 1 << 40, 0, 0]], true.catalogue),
    ):
        lie = _wire.Metadata(
            true.name, true.incarnation, true.machine, true.addresses, True, np.array(rows, np.uint64), catalogue
        )
        a.add_remote_agent(lie.to_bytes())
        address = rows[-1][0] + (1 << 20 if rows[-1][1] > 4096 else 0)
        with pytest.raises((bind.nixlMismatchError, bind.nixlNotFoundError, bind.nixlInvalidParamError)):
            a.initialize_xfer("WRITE", whole(a, here), a.get_xfer_descs([(address, 4096, 0)], "DRAM"), b.name)
    assert (past == 3).all() and (there == 2).all()


def test_metadata_names_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRAIL_COMPAT_LISTEN", "127.0.0.2, 127.0.0.3:0")
    here, there = buffer(4096, 1), buffer(4096, 2)
    a, b = pair(here, there, "listens")
    addresses = _wire.Metadata.of_bytes(b.get_agent_metadata()).addresses
    assert [address.split(":")[0] for address in addresses] == ["127.0.0.3", "127.0.0.2", "127.0.0.1"]
    handle = a.initialize_xfer("WRITE", whole(a, here), whole(a, there), b.name)
    a.transfer(handle)
    assert outcome(a, handle) == "DONE" and (there == 1).all()
    for wrong in ("0.0.0.0", "[::]:5"):
        monkeypatch.setenv("MULTIRAIL_COMPAT_LISTEN", wrong)
        with pytest.raises(ValueError, match="MULTIRAIL_COMPAT_LISTEN"):
            nixl.nixl_agent("nowhere")


@pytest.mark.parametrize("wrong", ["x", "0", "-1", "nan", "inf"])
def test_wrong_deadline(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("MULTIRAIL_COMPAT_DEADLINE", wrong)
    with pytest.raises(ValueError, match="MULTIRAIL_COMPAT_DEADLINE"):
        nixl.nixl_agent("timeless")


# ---- dead, stopped and restarted peers ----


def test_killed_during_a_transfer(monkeypatch: pytest.MonkeyPatch, served: SimpleNamespace) -> None:
    monkeypatch.setenv("MULTIRAIL_COMPAT_DEADLINE", "5")
    agent, memory = nixl.nixl_agent("kills"), buffer(served.size, 7)
    register(agent, memory)
    agent.add_remote_agent(served.metadata)
    there = agent.get_xfer_descs([(served.address, served.size, 0)], "DRAM")
    handle = agent.initialize_xfer("WRITE", whole(agent, memory), there, "served", b"never")
    agent.transfer(handle)
    os.kill(served.process.pid, signal.SIGKILL)
    start = time.monotonic()
    ended = outcome(agent, handle)
    assert time.monotonic() - start < 7
    assert ended == "DONE" or isinstance(ended, bind.nixlRemoteDisconnectError)
    served.process.join()
    while ended == "DONE":  # until the agent has learned of the end
        with contextlib.suppress(bind.nixlRemoteDisconnectError):
            agent.transfer(handle)
        ended = outcome(agent, handle)
        assert time.monotonic() - start < 7
    assert isinstance(ended, bind.nixlRemoteDisconnectError)
    with pytest.raises(bind.nixlRemoteDisconnectError, match="served"):
        agent.make_connection("served")
    agent.release_xfer_handle(handle)


def test_stopped_before_the_connect(monkeypatch: pytest.MonkeyPatch, served: SimpleNamespace) -> None:
    monkeypatch.setenv("MULTIRAIL_COMPAT_DEADLINE", "1")
    agent, memory = nixl.nixl_agent("waits"), buffer(4096, 7)
    register(agent, memory)
    agent.add_remote_agent(served.metadata)
    os.kill(served.process.pid, signal.SIGSTOP)
    start = time.monotonic()
    handle = agent.initialize_xfer(
        "WRITE", whole(agent, memory), agent.get_xfer_descs([(served.address, 4096, 0)], "DRAM"), "served"
    )
    with pytest.raises(bind.nixlRemoteDisconnectError, match="can not be reached"):
        agent.transfer(handle)
    assert isinstance(outcome(agent, handle), bind.nixlRemoteDisconnectError)
    assert time.monotonic() - start < 5
    # It goes on: the same handle works.
    os.kill(served.process.pid, signal.SIGCONT)
    end = time.monotonic() + PATIENCE
    while True:
        try:
            agent.transfer(handle)
            break
        except bind.nixlRemoteDisconnectError:
            assert time.monotonic() < end
    assert outcome(agent, handle) == "DONE"
    agent.release_xfer_handle(handle)


def test_never_there(served: SimpleNamespace) -> None:
    """A peer that died before anything connected: adding it works, its use is refused."""
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.join()
    agent = nixl.nixl_agent("late")
    assert agent.add_remote_agent(served.metadata) == b"served"
    with pytest.raises(bind.nixlRemoteDisconnectError, match="MULTIRAIL_COMPAT_LISTEN"):
        agent.send_notif("served", b"x")


def test_restarted_peer() -> None:
    here, there = buffer(4096, 1), buffer(4096, 2)
    a, b = pair(here, there, "restarts")
    old = a.initialize_xfer("WRITE", whole(a, here), whole(a, there), b.name)
    a.transfer(old)
    assert outcome(a, old) == "DONE"
    name = b.name
    del b
    gc.collect()
    anew, memory = nixl.nixl_agent(name), buffer(4096, 3)
    register(anew, memory)
    assert a.add_remote_agent(anew.get_agent_metadata()) == name.encode()
    with pytest.raises(bind.nixlNotFoundError, match="new transfer"):
        a.transfer(old)
    new = a.initialize_xfer("WRITE", whole(a, here), whole(a, memory), name)
    a.transfer(new)
    assert outcome(a, new) == "DONE" and (memory == 1).all()
    with pytest.raises(bind.nixlNotFoundError):
        a.prep_xfer_dlist(name, whole(a, there))


# ---- memory is at rest ----


def _release(agent: Any, handle: Any) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return agent.release_xfer_handle(handle)
        except bind.nixlNotAllowedError:
            assert time.monotonic() < end


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
@pytest.mark.parametrize("ends", ["release", "remove", "deregister"])
def test_no_byte_moves_afterwards(shared: SimpleNamespace, operation: str, ends: str) -> None:
    """After a release, a removal or a deregistration, poison in the local memory neither arrives nor is overwritten."""
    agent, memory = nixl.nixl_agent(f"poisons {operation} {ends}"), buffer(shared.size, 1)
    there = agent.get_xfer_descs([(shared.address, shared.size, 0)], "DRAM")
    active = 0
    for _ in range(4):
        memory[:] = 1
        lent = register(agent, memory)
        agent.add_remote_agent(shared.metadata)
        handle = agent.initialize_xfer(operation, whole(agent, memory), there, "served")
        active += agent.transfer(handle) == "PROC"
        if ends == "remove":
            agent.remove_remote_agent("served")
        elif ends == "deregister":
            agent.deregister_memory(lent)
        _release(agent, handle)
        memory[:] = 0xEE
        if ends != "deregister":
            agent.deregister_memory(lent)
        time.sleep(0.02)  # for late bytes: there is no event for what must not happen
        assert (memory == 0xEE).all()
        check, back = nixl.nixl_agent("checks"), buffer(shared.size)
        register(check, back)
        check.add_remote_agent(shared.metadata)
        read = check.initialize_xfer("READ", whole(check, back), there, "served")
        check.transfer(read)
        assert outcome(check, read) == "DONE"
        assert not (back == 0xEE).any()
    assert active, "no transfer was under way when it was ended"


def test_deregistered_memory_is_refused_to_peers() -> None:
    here, there = buffer(4096, 1), buffer(4096, 2)
    a, b = pair(here, there, "revokes")
    handle = a.initialize_xfer("WRITE", whole(a, here), whole(a, there), b.name, b"never")
    a.transfer(handle)
    assert outcome(a, handle) == "DONE"
    b.deregister_memory(b.get_reg_descs([(there.ctypes.data, 4096, 0, "")], "DRAM"))
    there[:] = 9
    try:
        a.transfer(handle)
        ended = outcome(a, handle)
    except bind.nixlNotFoundError as error:
        ended = error
    assert isinstance(ended, bind.nixlNotFoundError | bind.nixlNotAllowedError)
    assert (there == 9).all()


def test_released_handle() -> None:
    here, there = buffer(4096, 1), buffer(4096, 2)
    a, b = pair(here, there, "released")
    handle = a.initialize_xfer("WRITE", whole(a, here), whole(a, there), b.name)
    a.release_xfer_handle(handle)
    for use in (a.transfer, a.check_xfer_state):
        with pytest.raises(bind.nixlInvalidParamError, match="released"):
            use(handle)


def test_agents_leave_nothing_behind() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    here, there = buffer(4096, 1), buffer(4096, 2)

    def once() -> None:
        a, b = pair(here, there, "short-lived")
        handle = a.initialize_xfer("WRITE", whole(a, here), whole(a, there), b.name, b"x")
        a.transfer(handle)
        assert outcome(a, handle) == "DONE"

    once()
    before = descriptors()
    for _ in range(5):
        once()
    assert descriptors() <= before + 2


def test_threads_share_an_agent() -> None:
    threads, rounds, page = 4, 100, 4096
    here, there = np.arange(threads * page, dtype=np.uint32).view(np.uint8), buffer(4 * threads * page)
    a, b = pair(here, there, "threads")
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            local = a.prep_xfer_dlist("", [(here.ctypes.data + number * page, page, 0)], "DRAM")
            remote = a.prep_xfer_dlist(b.name, [(there.ctypes.data + number * page, page, 0)], "DRAM")
            for turn in range(rounds):
                handle = a.make_prepped_xfer("WRITE", local, [0], remote, [0], f"{number}:{turn}")
                a.transfer(handle)
                assert outcome(a, handle) == "DONE"
                a.release_xfer_handle(handle)
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    arrived: list[bytes] = []
    end = time.monotonic() + PATIENCE
    while len(arrived) < threads * rounds and not failures and time.monotonic() < end:
        arrived += b.get_new_notifs().get(a.name, [])
    for thread in running:
        thread.join(PATIENCE)
    assert not failures
    assert sorted(arrived) == sorted(f"{number}:{turn}".encode() for number in range(threads) for turn in range(rounds))
    assert (there[: threads * page] == here[: threads * page]).all()


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    a = nixl.nixl_agent("tensors")
    first, second = torch.arange(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    registered = a.register_memory([first, second])
    assert registered[0] == (first.data_ptr(), 256, 0, b"")
    handle = a.initialize_xfer("WRITE", a.get_xfer_descs(first), a.get_xfer_descs([second]), a.name)
    a.transfer(handle)
    assert outcome(a, handle) == "DONE" and bool((first == second).all())
    assert a.get_xfer_descs(first.reshape(8, 8).T) is None


# ---- install ----


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key != "MULTIRAIL_COMPAT"}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


def test_install() -> None:
    code = """
import importlib.util
import multirail.compat
from multirail.compat import nixl as ours
multirail.compat.install()
multirail.compat.install()
import nixl, nixl_cu12
from nixl._api import nixl_agent, nixl_agent_config, nixlBind
from nixl import nixl_agent as also
import nixl._bindings, nixl_cu12._api, nixl_cu13._api
from nixl._bindings import nixlRemoteDisconnectError, nixlXferTelemetry
assert nixl_agent is ours.nixl_agent is also is nixl_cu13._api.nixl_agent
assert nixl._bindings.DRAM_SEG == nixlBind.DRAM_SEG and nixlRemoteDisconnectError is ours.nixlRemoteDisconnectError
assert all(importlib.util.find_spec(name) for name in ("nixl", "nixl._api", "nixl_cu12._bindings"))
print(nixl_agent("installed").name)
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "installed\n"


def test_install_refuses_to_replace() -> None:
    code = """
import sys, types
real = sys.modules["nixl"] = types.ModuleType("nixl")
import multirail.compat
try:
    multirail.compat.install()
except RuntimeError as error:
    assert "already" in str(error) and "force=True" in str(error), error
    assert sys.modules["nixl"] is real and "nixl._api" not in sys.modules
else:
    raise SystemExit("it was replaced")
multirail.compat.install(force=True)
from nixl._api import nixl_agent
print(nixl_agent.__module__)
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("multirail.compat.nixl")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_plugins(engine: str) -> None:
    code = f"""
import sys
from multirail.compat import {engine}
{engine}.register()
{engine}.register()
print("nixl._api" in sys.modules)
"""
    without, other = _python(code), _python(code, MULTIRAIL_COMPAT="")
    assert without.stdout == other.stdout == "False\n" and without.stderr == other.stderr == ""
    asked = _python(code, MULTIRAIL_COMPAT="nixl")
    assert asked.stdout == "True\n", asked.stderr
    assert asked.stderr.count("multirail serves nixl") == 1
    unknown = _python(code, MULTIRAIL_COMPAT="nixl,other")
    assert unknown.returncode != 0 and "other is unknown" in unknown.stderr
