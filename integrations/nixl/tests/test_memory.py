"""Registration and metadata."""

from __future__ import annotations

import pytest
from nixl._api import nixlBind
from nixl_pairs import BACKEND, PAGE, finish, make_agent, next_name, notifications, pair, pattern, register, rows


def test_the_plugin_is_listed() -> None:
    agent = make_agent(next_name("lone"))
    assert BACKEND in agent.get_plugin_list() and list(agent.backends) == [BACKEND]
    assert agent.get_plugin_mem_types(BACKEND)[:2] == ["DRAM_SEG", "VRAM_SEG"]
    assert set(agent.get_backend_mem_types(BACKEND)) >= {"DRAM_SEG", "VRAM_SEG"}
    assert isinstance(agent.get_plugin_params(BACKEND), dict)
    assert agent.get_backend_params(BACKEND) is not None
    with pytest.raises(nixlBind.nixlInvalidParamError):
        agent.create_backend(BACKEND)


def test_registration_many_times() -> None:
    agent = make_agent(next_name("lone"))
    memory = pattern(16 * PAGE, 1)
    for _ in range(20):
        registered = register(agent, memory)
        assert registered.descCount() == 1
        agent.deregister_memory(registered)
    with pytest.raises(nixlBind.nixlNotFoundError):
        agent.deregister_memory(registered)
    assert (memory == pattern(16 * PAGE, 1)).all()


def test_memory_that_is_registered_twice() -> None:
    agent = make_agent(next_name("lone"))
    memory = pattern(16 * PAGE, 1)
    first, second = register(agent, memory), register(agent, memory)
    agent.deregister_memory(first)
    agent.deregister_memory(second)


def test_unregistered_memory_is_refused() -> None:
    with pair() as it:
        stranger = pattern(PAGE, 9)
        with pytest.raises(nixlBind.nixlNotFoundError):
            it.a.prep_xfer_dlist("NIXL_INIT_AGENT", rows(stranger, [0]), "DRAM")
        with pytest.raises(nixlBind.nixlNotFoundError):
            it.a.prep_xfer_dlist(it.b.name, rows(stranger, [0]), "DRAM")
        beyond = it.a.get_xfer_descs([(it.there.ctypes.data + it.there.nbytes - 1, 2, 0)], "DRAM")
        with pytest.raises(nixlBind.nixlNotFoundError):
            it.a.prep_xfer_dlist(it.b.name, beyond)


def test_metadata_is_checked() -> None:
    with pair() as it:
        metadata = it.b.get_agent_metadata()
        assert it.a.check_remote_metadata(it.b.name)
        assert it.a.add_remote_agent(metadata) in (it.b.name, it.b.name.encode())
        own = it.a.get_agent_metadata()
        with pytest.raises(nixlBind.nixlInvalidParamError):
            it.a.add_remote_agent(own)
        finish(it.a, it.transfer("WRITE", [1], [2]))
        stranger = make_agent(next_name("stranger"))
        for bad in (b"", b"no metadata", metadata[:20], metadata[: len(metadata) // 2]):
            with pytest.raises(Exception, match="NIXL_ERR"):
                stranger.add_remote_agent(bad)
        stranger.add_remote_agent(metadata)
        stranger.remove_remote_agent(it.b.name)


def test_partial_metadata() -> None:
    """Metadata of some ranges, with and without the way to the agent."""
    name = next_name("initiator")
    a, b = make_agent(name), make_agent(next_name("target"))
    here, first, second = pattern(4 * PAGE, 1), pattern(4 * PAGE, 2), pattern(4 * PAGE, 3)
    register(a, here)
    known, later = register(b, first), register(b, second)
    a.add_remote_agent(b.get_partial_agent_metadata(known, inc_conn_info=True))
    descs = [a.get_xfer_descs([(array.ctypes.data, PAGE, 0)], "DRAM") for array in (here, first, second)]
    assert a.check_remote_metadata(b.name, descs[1])
    assert not a.check_remote_metadata(b.name, descs[2])
    finish(a, a.initialize_xfer("WRITE", descs[0], descs[1], b.name))
    a.add_remote_agent(b.get_partial_agent_metadata(later, inc_conn_info=False))
    assert a.check_remote_metadata(b.name, descs[2])
    finish(a, a.initialize_xfer("WRITE", descs[0], descs[2], b.name, b"later"))
    assert (first[:PAGE] == here[:PAGE]).all() and (second[:PAGE] == here[:PAGE]).all()
    assert notifications(b, 1) == {name: [b"later"]}
    a.remove_remote_agent(b.name)


def test_the_way_to_an_agent_alone() -> None:
    """Metadata without memory is enough for notifications."""
    name = next_name("initiator")
    a, b = make_agent(name), make_agent(next_name("target"))
    empty = b.get_reg_descs([(0, 0, 0, "")], "DRAM")
    empty.clear()
    a.add_remote_agent(b.get_partial_agent_metadata(empty, inc_conn_info=True))
    a.send_notif(b.name, b"hello")
    assert notifications(b, 1) == {name: [b"hello"]}
    a.remove_remote_agent(b.name)


def test_metadata_of_memory_that_is_registered_later() -> None:
    with pair() as it:
        finish(it.a, it.transfer("WRITE", [0], [0]))
        more = pattern(4 * PAGE, 7)
        register(it.b, more)
        it.a.add_remote_agent(it.b.get_agent_metadata())
        local = it.a.get_xfer_descs([(it.here.ctypes.data, PAGE, 0)], "DRAM")
        remote = it.a.get_xfer_descs([(more.ctypes.data, PAGE, 0)], "DRAM")
        finish(it.a, it.a.initialize_xfer("WRITE", local, remote, it.b.name))
        assert (more[:PAGE] == it.here[:PAGE]).all()


def test_deregistered_memory_of_the_target() -> None:
    """The target takes memory back and registers it anew. Old metadata reaches it no more; new metadata does."""
    with pair() as it:
        finish(it.a, it.transfer("WRITE", [0, 1], [0, 1]))
        it.b.deregister_memory(it.there_registered)
        it.a.remove_remote_agent(it.b.name)
        it.there[:] = 0
        it.there_registered = register(it.b, it.there)
        it.a.add_remote_agent(it.b.get_agent_metadata())
        finish(it.a, it.transfer("WRITE", [4], [5]))
        assert (it.there[5 * PAGE : 6 * PAGE] == it.here[4 * PAGE : 5 * PAGE]).all()
        assert not it.there[: 5 * PAGE].any()


@pytest.mark.multirail_only
def test_a_stale_descriptor_fails_typed() -> None:
    """A transfer with metadata from before a deregistration is refused, and touches nothing."""
    with pair() as it:
        handle = it.transfer("WRITE", range(32), range(32))
        finish(it.a, handle)
        it.b.deregister_memory(it.there_registered)
        it.there[:] = 77
        with pytest.raises((nixlBind.nixlNotFoundError, nixlBind.nixlNotAllowedError)):
            finish(it.a, handle)
        assert (it.there == 77).all()


def test_deregistered_memory_of_the_initiator() -> None:
    with pair() as it:
        finish(it.a, it.transfer("READ", [0, 1], [0, 1]))
        it.a.deregister_memory(it.here_registered)
        with pytest.raises(nixlBind.nixlNotFoundError):
            it.a.prep_xfer_dlist("NIXL_INIT_AGENT", rows(it.here, [0]), "DRAM")
        it.here_registered = register(it.a, it.here)
        finish(it.a, it.transfer("READ", [2], [3]))
        assert (it.here[2 * PAGE : 3 * PAGE] == it.there[3 * PAGE : 4 * PAGE]).all()
