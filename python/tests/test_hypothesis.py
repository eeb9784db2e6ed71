"""Bad input to every method: an exception with a sentence, never a crash and never a panic.

The tests run in a process of their own as well: a crash there is a failure here, and not the end of the suite.
"""

from __future__ import annotations

import array
import contextlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT, SCALE, Pair, connected
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import multirail

ALLOWED = (TypeError, ValueError, OverflowError, AttributeError, BufferError, NotImplementedError, multirail.Error)
"""`AttributeError`, `BufferError` and `NotImplementedError` come from objects that are asked for what they lack."""

EXAMPLES = settings(
    # The run that is guarded against crashes takes fewer.
    max_examples=(10 if "MULTIRAIL_TEST_GUARDED" in os.environ else 30) * SCALE,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)


class Interface:
    def __init__(self, interface: object, name: str) -> None:
        setattr(self, name, interface)

    def __repr__(self) -> str:
        return f"Interface({vars(self)})"


class Index:
    """An integer by `__index__` alone, or a lie."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __index__(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    def __repr__(self) -> str:
        return f"Index({self.value!r})"


KEPT = np.zeros(64, np.uint8)
ADDRESS = int(KEPT.__array_interface__["data"][0])
"""Memory that lying interfaces may name: 64 bytes."""

HUGE = [1, 8, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**5000]
integers = st.sampled_from([*HUGE, 0, *[-number for number in HUGE]])
floats = st.sampled_from([0.0, -0.0, 0.5, -1.0, 1e-300, 1e19, 1e300, float("nan"), float("inf"), float("-inf")])
texts = st.sampled_from(["", "a", "a\0b", "\ud800", "é" * 300, "cpu", "cuda:0", "rdma", "127.0.0.1:1", "x" * 100_000])
scalars = st.one_of(
    integers,
    floats,
    texts,
    st.sampled_from([None, True, False, b"", b"bytes", b"\0" * 300, 1j, ..., int, object(), print]),
)
DTYPES = "? i1 u1 i2 >u2 i4 u4 >i4 i8 u8 f2 f4 f8 c8 S3 U2 V5 M8[s]"
arrays = st.builds(
    lambda kind, shape, view: view(np.zeros(shape, kind)),
    st.sampled_from(DTYPES.split()),
    st.sampled_from([(), (0,), (1,), (3,), (0, 3), (2, 2), (1, 1, 1), (4, 1)]),
    st.sampled_from(
        [
            lambda a: a,
            lambda a: a[::2] if a.ndim else a,
            lambda a: a[::-1] if a.ndim else a,
            lambda a: a.T,
            lambda a: np.broadcast_to(a, (3, *a.shape)),
            lambda a: a.setflags(write=False) or a,
            lambda a: np.array(a, dtype=object),
            lambda a: np.ma.masked_array(a) if a.dtype.kind in "iuf" else a,
        ]
    ),
)
BUFFERS: list[Any] = [
    bytearray(),
    bytearray(5),
    memoryview(b"abcd"),
    memoryview(bytearray(8))[::2],
    memoryview(bytearray(8)).cast("Q", (1,)),
    memoryview(bytearray(8)).cast("B", (2, 2, 2)),
    array.array("d", [1.5]),
    array.array("q", [-1, 2**40]),
    array.array("I", [0, 2**32 - 1]),
    array.array("u", "ab"),
]
# Chosen by their position: a writable memoryview has no hash.
buffers = st.integers(0, len(BUFFERS) - 1).map(BUFFERS.__getitem__)
addresses = st.one_of(
    # Memory that is really there. A wild address would crash any reader; address 0 has a test of its own.
    st.just((ADDRESS, False)),
    st.sampled_from(
        [
            None,
            (),
            (ADDRESS,),
            (ADDRESS, False, 1),
            ("x", False),
            (-1, False),
            (2**64, False),
            5,
            b"xy",
            [ADDRESS, False],
        ]
    ),
)
shapes = st.sampled_from(
    [
        (8,),
        (0,),
        (),
        (2, 4),
        (1,) * 70,
        (-1,),
        (2**62, 2**62),
        (2**70,),
        ("a",),
        (1.5,),
        None,
        5,
        "8",
        [8],
        {},
        (0, 2**62),
    ]
)
typestrs = st.sampled_from(
    [
        "|u1",
        "<u4",
        ">u4",
        "<i8",
        "<f4",
        "|b1",
        "|O8",
        "|V0",
        "|u0",
        "",
        "<",
        "<u",
        "u4",
        "<u-1",
        "<u99999999999999999999",
        "é4",
        "<é8",
        "\0\0\0",
        None,
        4,
        b"<u4",
        "<u18446744073709551615",
    ]
)
strides = st.sampled_from([None, (1,), (4,), (-1,), (0,), (2**62,), (2**64,), ("a",), 5, (), (4, 1), (1, 1, 1)])
interfaces = st.one_of(
    st.builds(
        lambda name, fields, missing: Interface({k: v for k, v in fields.items() if k not in missing}, name),
        st.sampled_from(["__array_interface__", "__cuda_array_interface__"]),
        st.fixed_dictionaries(
            {"shape": shapes, "typestr": typestrs, "data": addresses, "strides": strides, "version": scalars}
        ),
        st.sets(st.sampled_from(["shape", "typestr", "data", "strides", "version"]), max_size=2),
    ),
    st.builds(Interface, scalars, st.sampled_from(["__array_interface__", "__cuda_array_interface__"])),
    st.builds(Interface, st.just(lambda: scalars), st.sampled_from(["__dlpack__", "__dlpack_device__"])),
    st.sampled_from(
        [
            type("Lie", (), {"__dlpack_device__": lambda self: (1, 0), "__dlpack__": lambda self, **k: None})(),
            type("Lie", (), {"__dlpack_device__": lambda self: "no", "__dlpack__": lambda self, **k: 5})(),
            type("Lie", (), {"__dlpack_device__": lambda self: (99, 0), "__dlpack__": lambda self, **k: 5})(),
            type("Lie", (), {"__dlpack_device__": lambda self: (2, 0), "__dlpack__": lambda self, **k: 5})(),
            type("Lie", (), {"__array_interface__": property(lambda self: {})})(),
        ]
    ),
)
indices = st.builds(
    Index, st.one_of(integers, st.sampled_from(["text", 1.5, None, ValueError("an error of the object's own")]))
)
leaves = st.one_of(scalars, arrays, buffers, interfaces, indices)
tuples = st.one_of(
    st.sampled_from([(), (1,), (0, 8), (0, 0), (4096, -1), (10**30, 8), (-8, 8), (2**64 - 8, 4096), (0, 8, "cpu")]),
    st.tuples(st.sampled_from([0, -1, 2**64, None, "x", 1.5]), leaves),
    st.tuples(st.sampled_from([0, -1, None]), integers, leaves),
)
anything = st.one_of(leaves, tuples, st.lists(leaves, max_size=3), st.builds(iter, st.lists(leaves, max_size=2)))
numbers = st.one_of(anything, st.sampled_from([[0], [1, 0], range(2), np.arange(2), [0, 0, 0]]))


def _refused(call: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
    """Calls, and lets nothing but good exceptions pass. What succeeds is cancelled, and ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = call(*arguments, **keywords)
        except ALLOWED as error:
            if not isinstance(error, AttributeError):
                assert len(str(error)) > 5, repr(error)
            return
        if isinstance(result, multirail.Operation):
            result.cancel()
            with contextlib.suppress(multirail.Error):
                result.wait(LIMIT)


def _tiny_or_absurd(length: Any) -> Any:
    """The length, or one that no machine has instead of one that would take seconds to fill."""
    if isinstance(length, Index):
        return Index(_tiny_or_absurd(length.value))
    return max(length, 2**62) if type(length) is int and length > 2**20 else length


class Target:
    """Objects of every class, and their methods."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.src, self.dst, self.remote = pair.regions(4096)
        self.local, self.there = multirail.LocalList(), multirail.RemoteList()
        self.local.append(self.src, 0, 8)
        self.there.append(self.remote, 0, 8)
        self.prepared = pair.ab.prepare_write_pages(self.src, [0], self.remote, [0], 64)
        self.catalogue = multirail.Catalogue([self.src])
        self.theirs = pair.ab.import_catalogue(multirail.Catalogue([self.dst]).to_bytes())
        self.group = multirail.PeerGroup([pair.ab])
        self.operation = pair.ba.imm(4321).expect(1)

    def methods(self) -> dict[str, Callable[..., Any]]:
        a, ab, src, remote = self.pair.a, self.pair.ab, self.src, self.remote
        counter = self.pair.ba.imm(1)
        return {
            "alloc": lambda x, **k: a.alloc(_tiny_or_absurd(x), **k),
            "register": a.register,
            "publish": a.publish,
            "unpublish": a.unpublish,
            "publish_catalogue": a.publish_catalogue,
            "recv": lambda *x, **k: a.recv(src, *x, **k),
            "recv_any": a.recv,
            "connect_local": a.connect_local,
            "tenant": a.tenant,
            "write_bytes": src.write_bytes,
            "read_bytes": src.read_bytes,
            "import_region": ab.import_region,
            "import_catalogue": ab.import_catalogue,
            "region": ab.region,
            "catalogue": ab.catalogue,
            "set_paths": lambda x: multirail.Fabric("loopback", paths=x).close(),
            "write": lambda *x, **k: ab.write(src, remote, *x, **k),
            "write_any": ab.write,
            "read": lambda *x, **k: ab.read(src, remote, *x, **k),
            "write_pages": lambda x, *y, **k: ab.write_pages(src, x, remote, [0, 1], *(y or (64,)), **k),
            "read_pages": lambda x, *y, **k: ab.read_pages(src, [0, 1], remote, x, *(y or (64,)), **k),
            "prepare_write_pages": lambda x, *y, **k: ab.prepare_write_pages(src, [0], remote, x, *(y or (64,)), **k),
            "prepare_read_pages": lambda x, *y, **k: ab.prepare_read_pages(src, x, remote, x, *(y or (64,)), **k),
            "explain_write_pages": lambda x, **k: ab.explain_write_pages(src, x, remote, x, 64, **k),
            "explain_write": lambda *x, **k: ab.explain_write(src, remote, *x, **k),
            "explain_read": lambda *x, **k: ab.explain_read(src, remote, *x, **k),
            "write_list": lambda x, **k: ab.write_list(self.local, self.there, local_selection=x, **k),
            "read_list": lambda x, **k: ab.read_list(self.local, self.there, remote_selection=x, **k),
            "prepare_write_list": lambda x, **k: ab.prepare_write_list(self.local, self.there, local_selection=x, **k),
            "prepare_read_list": lambda x, **k: ab.prepare_read_list(self.local, self.there, local_selection=x, **k),
            "write_imm": ab.write_imm,
            "send": lambda *x, **k: ab.send(src, *x, deadline=0.05, **k),
            "notify": ab.notify,
            "imm": ab.imm,
            "post": lambda imm=None, notify=None: self.prepared.post(imm=imm, notify=notify),
            "append": lambda *x: multirail.LocalList().append(src, *x),
            "append_strided": lambda *x: multirail.RemoteList().append_strided(remote, *x),
            "extend": lambda *x: multirail.LocalList().extend(src, *x),
            "extend_remote": lambda *x: multirail.RemoteList().extend(remote, *x),
            "of_addresses": lambda *x: multirail.LocalList.of_addresses(self.catalogue, *x),
            "of_remote_addresses": lambda *x: multirail.RemoteList.of_addresses(self.theirs, *x),
            "find": self.theirs.find,
            "number": self.theirs.region,
            "Catalogue": multirail.Catalogue,
            "PeerGroup": multirail.PeerGroup,
            "barrier": self.group.barrier,
            "scatter": lambda *x, **k: self.group.scatter(src, [remote], *x, **k),
            "scatter_any": lambda x: self.group.scatter(src, x),
            "group_imm": self.group.write_imm,
            "expect": counter.expect,
            "try_take": counter.try_take,
            "wait": lambda x: self.operation.wait(x if x not in (1e19, 1e300, None) and _is_short(x) else -1.0),
        }


def _is_short(limit: object) -> bool:
    """Whether a wait with this limit ends soon, or is refused."""
    return not isinstance(limit, (int, float, Index, np.ndarray)) or (isinstance(limit, float) and not limit > 0.5)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with connected(notifications=4 << 20, token=b"0123456789abcdef") as pair:
        yield Target(pair)


METHODS = """
    alloc register publish unpublish publish_catalogue recv recv_any connect_local tenant write_bytes read_bytes
    import_region import_catalogue region catalogue set_paths write write_any read write_pages read_pages
    prepare_write_pages prepare_read_pages explain_write_pages explain_write explain_read write_list read_list
    prepare_write_list prepare_read_list write_imm send notify imm post append append_strided extend extend_remote
    of_addresses of_remote_addresses find number Catalogue PeerGroup barrier scatter scatter_any group_imm expect
    try_take wait
"""
NAMES = METHODS.split()
OPTIONAL = """
    imm notify deadline paths cold coalesce src_stride dst_stride src_offset dst_offset imm_per_request access device
    owner length offset timeout nonsense
"""
KEYWORDS = st.dictionaries(st.sampled_from(OPTIONAL.split()), anything, max_size=2)


@pytest.mark.parametrize("name", NAMES)
@seed(1)
@EXAMPLES
@given(arguments=st.lists(numbers, min_size=1, max_size=3), keywords=st.one_of(st.just({}), KEYWORDS))
def test_bad_arguments_are_refused_with_a_sentence(
    target: Target, name: str, arguments: list[Any], keywords: dict[str, Any]
) -> None:
    _refused(target.methods()[name], arguments[0])
    _refused(target.methods()[name], *arguments, **keywords)


def test_every_method_is_named(target: Target) -> None:
    assert sorted(NAMES) == sorted(target.methods())


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "token": scalars,
        "tls": st.one_of(scalars, st.tuples(texts, texts, texts), st.tuples(texts, texts)),
        # Much memory has a test of its own.
        "notifications": st.one_of(floats, texts, st.sampled_from([None, -1, 0, 1, 2**64, 10**30, True])),
        "deadline": anything,
        "heartbeat": st.one_of(floats, texts),
        "peer_timeout": st.one_of(floats, texts),
        "paths": anything,
        "max_operations": st.one_of(st.sampled_from([0, -1, 1, 2**24 + 1, 2**62, 2**64, 10**30]), texts),
        "nonsense": scalars,
    },
)


@seed(1)
@EXAMPLES
@given(backend=st.one_of(st.sampled_from(["loopback"]), scalars), options=OPTIONS)
def test_bad_options_are_refused_with_a_sentence(backend: Any, options: dict[str, Any]) -> None:
    _refused(lambda: multirail.Fabric("loopback" if backend in (None, "auto") else backend, **options).close())


@seed(1)
@EXAMPLES
@given(count=scalars, size=scalars)
def test_bad_pools_are_refused_with_a_sentence(target: Target, count: Any, size: Any) -> None:
    is_large = isinstance(count, int) and isinstance(size, int) and count * size > 2**24
    _refused(target.pair.b.recv_pool, max(count, 2**40) if is_large else count, size)


@seed(1)
@EXAMPLES
@given(address=scalars)
def test_bad_addresses_are_refused_with_a_sentence(target: Target, address: Any) -> None:
    # "x" * 100_000 would ask the resolver.
    if address != "x":
        _refused(target.pair.a.listen, address)
        _refused(target.pair.a.connect, address)


@seed(1)
@settings(EXAMPLES, max_examples=100 * SCALE)
@given(data=st.binary(max_size=200), cut=st.integers(0, 300), flip=st.integers(0, 2400))
def test_bytes_of_a_descriptor_that_were_changed(target: Target, data: bytes, cut: int, flip: int) -> None:
    for good in (target.dst.descriptor(), target.catalogue.to_bytes()):
        changed = bytearray(good)
        changed[flip // 8 % len(good)] ^= 1 << flip % 8
        for wrong in (data, bytes(changed), good[:cut], good + data):
            _refused(target.pair.ab.import_region, wrong)
            _refused(target.pair.ab.import_catalogue, wrong)


@pytest.mark.skipif("MULTIRAIL_TEST_GUARDED" in os.environ, reason="this is the guarded run")
def test_no_bad_input_crashes_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "MULTIRAIL_TEST_GUARDED": "1"},
        capture_output=True,
        text=True,
        timeout=170 * SCALE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
