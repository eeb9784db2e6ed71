"""The tree of exceptions."""

from __future__ import annotations

import pytest
from conftest import LIMIT, Pair

import multirail
from multirail import errors

BASES: dict[str, type[Exception]] = {
    "InvalidRequest": ValueError,
    "OutOfBounds": ValueError,
    "LocalAccess": PermissionError,
    "RemoteAccess": PermissionError,
    "TooLarge": ValueError,
    "DeadlineExceeded": TimeoutError,
    "PeerDied": ConnectionError,
    "NotFound": LookupError,
    "Unreachable": ConnectionError,
    "Permission": PermissionError,
    "Io": OSError,
}


@pytest.mark.parametrize("name", errors.__all__)
def test_every_class_is_an_error_with_a_kind_and_a_hint(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, multirail.Error) and getattr(multirail, name) is kind
    assert issubclass(kind, BASES.get(name, Exception))
    assert kind.__doc__
    if kind is not multirail.Error:
        assert kind.hint
        assert kind.kind == "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")
    made = kind("text")
    assert str(made) == "text" and made.operation is None


def test_no_two_classes_have_one_kind() -> None:
    kinds = [getattr(errors, name).kind for name in errors.__all__]
    assert len(set(kinds)) == len(kinds)


def test_an_error_has_the_message_of_the_library_and_the_call(pair: Pair) -> None:
    src, _dst, remote = pair.regions(100)
    with pytest.raises(multirail.OutOfBounds) as caught:
        pair.ab.write(src, remote, 101)
    assert caught.value.operation == "write" and str(caught.value).startswith("write: out of bounds: bytes 0..101")
    with pytest.raises(multirail.NotFound) as missing:
        pair.ab.region("nothing").wait(LIMIT)
    assert "nothing" in str(missing.value) and missing.value.operation


def test_one_failure_is_raised_anew_each_time(pair: Pair) -> None:
    operation = pair.ab.region("nothing")
    seen = []
    for _ in range(3):
        with pytest.raises(multirail.NotFound) as caught:
            operation.wait(LIMIT)
        seen.append(caught.value)
    assert len({id(error) for error in seen}) == 3
    assert isinstance(operation.exception(), multirail.NotFound)
    assert repr(operation).startswith("<Operation failed: ")


def test_after_close_all_calls_raise_closed(pair: Pair) -> None:
    src, dst, remote = pair.regions(4096)
    prepared = pair.ab.prepare_write_pages(src, [0], remote, [0], 4096)
    pool, arrivals, counter = pair.a.recv_pool(1, 64), pair.a.notifications(), pair.ab.imm(1)
    pair.a.close()
    pair.a.close()
    calls = (
        lambda: pair.a.alloc(10),
        lambda: pair.a.register(bytearray(10)),
        lambda: pair.a.listen().wait(LIMIT),
        lambda: pair.a.connect("127.0.0.1:1").wait(LIMIT),
        lambda: pair.a.connect_local(pair.b),
        lambda: pair.b.connect_local(pair.a),
        lambda: pair.a.recv(src).wait(LIMIT),
        lambda: pair.a.recv_pool(1, 64),
        lambda: pair.ab.write(src, remote).wait(LIMIT),
        lambda: pair.ab.read(src, remote).wait(LIMIT),
        lambda: pair.ab.write_imm(1).wait(LIMIT),
        lambda: pair.ab.notify(b"x").wait(LIMIT),
        lambda: pair.ab.send(src).wait(LIMIT),
        lambda: prepared.post().wait(LIMIT),
        lambda: pool.next().wait(LIMIT),
        lambda: arrivals.next().wait(LIMIT),
        lambda: counter.expect(1).wait(LIMIT),
        lambda: counter.arrivals().next().wait(LIMIT),
    )
    for number, call in enumerate(calls):
        try:
            call()
        except multirail.Closed as error:
            assert str(error)
        else:
            pytest.fail(f"call {number} has raised nothing")
    assert isinstance(pair.ab.closed().wait(LIMIT), multirail.Closed)
    assert isinstance(pair.ba.closed().wait(LIMIT), multirail.Closed)
    assert not pair.ab.is_alive and not pair.ba.is_alive and "gone" in repr(pair.ab)
    assert src.read_bytes() == dst.read_bytes()


def test_after_close_names_are_not_looked_up(pair: Pair) -> None:
    pair.a.close()
    with pytest.raises(multirail.Closed):
        pair.ab.region("x").wait(LIMIT)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_wait_on_an_operation_without_a_name_raises_its_own_error(pair: Pair) -> None:
    with pytest.raises(multirail.DeadlineExceeded):
        pair.b.recv(pair.b.alloc(64)).wait(0.01)


def test_after_a_disconnect_both_sides_see_closed(pair: Pair) -> None:
    src, _dst, remote = pair.regions(4096)
    never = pair.ba.imm(1).expect(1)
    pair.ab.disconnect()
    assert isinstance(pair.ba.closed().wait(LIMIT), multirail.Closed)
    with pytest.raises(multirail.Closed):
        never.wait(LIMIT)
    with pytest.raises(multirail.Closed):
        pair.ab.write(src, remote).wait(LIMIT)
    there, _here = pair.a.connect_local(pair.b)
    assert there.is_alive
