"""Ray's actors pass tensors over multirail."""

# Ray and torch have no types here, or are missing.
# mypy: disallow-untyped-decorators=False
# mypy: disable-error-code="import-not-found,import-untyped,no-any-return,attr-defined"

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray==2.60.*'")
pytest.importorskip("ray.experimental.rdt", reason="this Ray has no tensor transports: pip install 'ray==2.60.*'")

import multirail.ray as transport  # noqa: E402
from multirail import errors  # noqa: E402

HAS_TORCH = importlib.util.find_spec("torch") is not None
DEADLINE = 4.0
LIMIT = 60.0


def content(kind: str) -> list[Any]:
    """Tensors of many shapes and types, the same in each process."""
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 256, (3, 5, 7), dtype=np.uint8)
    arrays = [
        rng.standard_normal(1 << 20).astype(np.float32),
        shared,
        shared,
        shared[1:],
        np.empty((0, 4), np.int16),
        np.array(7.5),
        rng.integers(-9, 9, (1, 33), dtype=np.int64),
    ]
    if kind == "numpy":
        read_only = np.frombuffer(b"bytes that may not change", np.uint8)
        return [*arrays, read_only]
    import torch

    return [*(torch.from_numpy(array) for array in arrays), torch.arange(999, dtype=torch.bfloat16)]


def same(got: list[Any], want: list[Any]) -> bool:
    def raw(tensor: Any) -> bytes:
        if isinstance(tensor, np.ndarray):
            return tensor.tobytes()
        import torch

        return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()

    pairs = list(zip(got, want, strict=True))
    return all(a.shape == b.shape and a.dtype == b.dtype and raw(a) == raw(b) for a, b in pairs)


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, Callable[[], Any]]]:
    """Makers of actors, by the kind of their tensors."""
    environment = {"MULTIRAIL_COMPAT_DEADLINE": str(DEADLINE)}
    os.environ.update(environment)
    # Without a token, Ray makes one and writes it to the user's home.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, runtime_env={"env_vars": environment})
    kinds = {"numpy": "MULTIRAIL_NUMPY"}
    transport.register("multirail_numpy", data_type=np.ndarray)
    if HAS_TORCH:
        kinds["torch"] = "MULTIRAIL"
        transport.register()
    # Ray's workers do not import this file: what they run is pickled by value.
    make, compare = content, same
    for function in (make, compare):
        function.__module__ = "__main__"

    def maker(kind: str, name: str) -> Callable[[], Any]:
        @ray.remote(num_cpus=0.4)
        class Actor:
            @ray.method(tensor_transport=name)
            def tensors(self) -> list[Any]:
                return make(kind)

            @ray.method(tensor_transport=name)
            def array(self, length: int) -> Any:
                return np.arange(length)

            def is_same(self, tensors: list[Any]) -> bool:
                return compare(tensors, make(kind))

            def total(self, array: Any) -> int:
                return int(array.sum())

            def process(self) -> int:
                return os.getpid()

            def held(self) -> int:
                util = importlib.import_module("ray.experimental.rdt.util")
                return len(util.get_tensor_transport_manager(name).process()._regions)

        return Actor.remote

    yield {kind: maker(kind, name) for kind, name in kinds.items()}
    ray.shutdown()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_every_byte_arrives_and_the_source_frees(cluster: dict[str, Callable[[], Any]], kind: str) -> None:
    if kind not in cluster:
        pytest.skip("torch is not installed")
    source, receiver = cluster[kind](), cluster[kind]()
    tensors = source.tensors.remote()
    assert ray.get(receiver.is_same.remote(tensors), timeout=LIMIT) is True
    # Again, over the connection that is there; in the source itself; and in this process.
    assert ray.get(receiver.is_same.remote(source.tensors.remote()), timeout=LIMIT) is True
    assert ray.get(source.is_same.remote(tensors), timeout=LIMIT) is True
    assert same(ray.get(tensors, timeout=LIMIT), content(kind))
    assert ray.get(source.held.remote(), timeout=LIMIT) > 0
    del tensors
    end = time.monotonic() + LIMIT
    while ray.get(source.held.remote(), timeout=LIMIT) > 0:
        assert time.monotonic() < end, "the source still holds the memory of an object that nobody refers to"


def test_a_dead_source_ends_typed_and_the_receiver_lives_on(cluster: dict[str, Callable[[], Any]]) -> None:
    source, receiver, other = (cluster["numpy"]() for _ in range(3))
    array = source.array.remote(1000)
    assert ray.get(receiver.total.remote(array), timeout=LIMIT) == 499500
    later = source.array.remote(2000)
    ray.wait([later], fetch_local=False, timeout=LIMIT)
    process = ray.get(receiver.process.remote(), timeout=LIMIT)
    os.kill(ray.get(source.process.remote(), timeout=LIMIT), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(ray.exceptions.RayError) as failure:
        ray.get(receiver.total.remote(later), timeout=LIMIT)
    assert not isinstance(failure.value, ray.exceptions.GetTimeoutError)
    assert isinstance(failure.value, (transport.TransferFailed, ray.exceptions.ActorDiedError)), failure.value
    assert time.monotonic() - begun < DEADLINE + 10
    assert ray.get(receiver.process.remote(), timeout=LIMIT) == process
    assert ray.get(receiver.total.remote(other.array.remote(1000)), timeout=LIMIT) == 499500


def test_a_dead_receiver_leaves_the_source_alive(cluster: dict[str, Callable[[], Any]]) -> None:
    source, receiver, other = (cluster["numpy"]() for _ in range(3))
    array = source.array.remote(1000)
    assert ray.get(receiver.total.remote(array), timeout=LIMIT) == 499500
    ray.kill(receiver)
    assert ray.get(other.total.remote(array), timeout=LIMIT) == 499500


def test_a_stopped_source_ends_by_the_deadline(cluster: dict[str, Callable[[], Any]]) -> None:
    source, receiver = cluster["numpy"](), cluster["numpy"]()
    array = source.array.remote(1000)
    ray.wait([array], fetch_local=False, timeout=LIMIT)
    # The receiver runs as well: the start of its process does not count.
    pid, _ = ray.get([source.process.remote(), receiver.process.remote()], timeout=LIMIT)
    os.kill(pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(transport.TransferFailed) as failure:
            ray.get(receiver.total.remote(array), timeout=LIMIT)
        assert time.monotonic() - begun < DEADLINE + 10
        assert failure.value.cause.kind in ("deadline_exceeded", "unreachable")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ray.get(receiver.total.remote(array), timeout=LIMIT) == 499500


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_an_abort_ends_a_fetch_under_way(cluster: dict[str, Callable[[], Any]], silent: str) -> None:
    manager = transport.MultirailTransport()
    own = manager.extract_tensor_transport_metadata("own", [np.ones(64)])
    own.address = silent
    thread = threading.Timer(0.3, manager.abort_transport, ("own", manager.get_communicator_metadata(None, None)))
    thread.start()
    begun = time.monotonic()
    with pytest.raises(transport.TransferFailed) as failure:
        manager.recv_multiple_tensors("own", own, manager.get_communicator_metadata(None, None))
    thread.join()
    assert 0.2 < time.monotonic() - begun < 0.3 + DEADLINE / 2
    assert failure.value.kind == "cancelled"
    assert isinstance(failure.value.__cause__, errors.Cancelled)


def test_fetches_go_on_without_a_waiter_and_take_buffers(cluster: dict[str, Callable[[], Any]]) -> None:
    source, receiver = transport.MultirailTransport(), transport.MultirailTransport()
    none = source.get_communicator_metadata(None, None)
    want = [np.arange(1000.0), np.empty(0), np.arange(50, dtype=np.int8)]
    metadata = source.extract_tensor_transport_metadata("many", want)
    assert source.extract_tensor_transport_metadata("many", want) == metadata
    buffers = [np.zeros_like(array) for array in want]
    fetch = receiver.fetch_multiple_tensors("many", metadata, none, buffers)
    got = receiver.wait_fetch_complete(fetch)
    assert all(array is buffer for array, buffer in zip(got, buffers, strict=True))
    assert same(got, want)
    assert same(receiver.wait_fetch_complete(fetch, 0), got)
    source.garbage_collect("many", metadata, want)
    with pytest.raises(transport.TransferFailed) as failure:
        receiver.recv_multiple_tensors("many", metadata, none)
    assert failure.value.kind in ("revoked", "remote_access", "not_found")


@pytest.mark.parametrize(("array", "error"), [(np.ones((4, 4)).T[:2], ValueError), (np.array([object()]), TypeError)])
def test_arrays_that_cannot_travel_are_refused(
    cluster: dict[str, Callable[[], Any]], array: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        transport.MultirailTransport().extract_tensor_transport_metadata("bad", [array])


def test_a_name_is_taken_once(cluster: dict[str, Callable[[], Any]]) -> None:
    with pytest.raises(ValueError, match="already registered"):
        transport.register("multirail_numpy", data_type=np.ndarray)
