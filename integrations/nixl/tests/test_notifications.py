"""Notifications with and without transfers, and several agents in one process."""

from __future__ import annotations

import threading

import pytest
from nixl._api import nixl_thread_sync_t, nixlBind
from nixl_pairs import PAGE, Pair, finish, make_agent, next_name, notifications, pair, pattern, register, rows, until

#: The kinds of bytes that a message may have.
MESSAGES = [b"x", b"\x00", b"with\x00zero", bytes(range(256)), b"long" * 5000]


def test_messages_of_all_kinds() -> None:
    with pair() as it:
        for message in MESSAGES:
            it.a.send_notif(it.b.name, message)
        assert notifications(it.b, len(MESSAGES)) == {it.a.name: MESSAGES}
        assert it.b.get_new_notifs() == {}


def test_messages_with_transfers() -> None:
    with pair() as it:
        for message in MESSAGES:
            it.here[:PAGE] = len(message) % 251
            finish(it.a, it.transfer("WRITE", [0], [3], message))
            assert notifications(it.b, 1) == {it.a.name: [message]}
            assert (it.there[3 * PAGE : 4 * PAGE] == len(message) % 251).all()


def test_the_message_comes_after_the_bytes() -> None:
    """Whoever has the notification sees all bytes of its transfer."""
    with pair(16 << 20) as it:
        handle = it.whole("WRITE", b"all")
        for turn in range(10):
            it.here[:] = turn + 1
            it.a.transfer(handle)
            # UCX sends the message when the initiator looks at the transfer.
            assert notifications(it.b, 1, lambda: it.a.check_xfer_state(handle)) == {it.a.name: [b"all"]}
            assert (it.there == turn + 1).all()
            until(lambda: it.a.check_xfer_state(handle) == "DONE", "the transfer ends")


@pytest.mark.multirail_only
def test_the_initiator_need_not_look() -> None:
    """Over a connection, a transfer and its message go on without any call of the initiator."""
    with pair(64 << 20) as it:
        it.a.make_connection(it.b.name)
        handle = it.whole("WRITE", b"all")
        it.a.transfer(handle)
        assert notifications(it.b, 1) == {it.a.name: [b"all"]}
        assert (it.there == it.here).all()
        assert it.a.check_xfer_state(handle) == "DONE"


def test_a_read_tells_its_target() -> None:
    with pair() as it:
        finish(it.a, it.transfer("READ", [0], [0], b"read"))
        assert notifications(it.b, 1) == {it.a.name: [b"read"]}


def test_many_messages_in_order() -> None:
    with pair() as it:
        sent = [b"%d" % i for i in range(2000)]
        for message in sent:
            it.a.send_notif(it.b.name, message)
        assert notifications(it.b, len(sent)) == {it.a.name: sent}


def test_the_target_needs_no_metadata() -> None:
    """The target knows no initiator, and tells their messages apart all the same."""
    target = make_agent(next_name("target"))
    memory = pattern(8 * PAGE, 1)
    register(target, memory)
    initiators = [make_agent(next_name("initiator")) for _ in range(4)]
    for initiator in initiators:
        initiator.add_remote_agent(target.get_agent_metadata())
        initiator.send_notif(target.name, initiator.name.encode())
    assert notifications(target, 4) == {it.name: [it.name.encode()] for it in initiators}
    with pytest.raises(nixlBind.nixlNotFoundError):
        target.send_notif(initiators[0].name, b"back")
    for initiator in initiators:
        initiator.remove_remote_agent(target.name)


def test_agents_in_a_ring() -> None:
    """Each agent writes to the next one, and all know all."""
    agents = [make_agent(next_name("ring")) for _ in range(5)]
    memories = [pattern(4 * PAGE, i) for i in range(5)]
    for agent, memory in zip(agents, memories, strict=True):
        register(agent, memory)
    metadata = [agent.get_agent_metadata() for agent in agents]
    for i, agent in enumerate(agents):
        for j, bytes_of_other in enumerate(metadata):
            if i != j:
                agent.add_remote_agent(bytes_of_other)
    for i, agent in enumerate(agents):
        j = (i + 1) % 5
        local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows(memories[i], [0]), "DRAM")
        remote = agent.prep_xfer_dlist(agents[j].name, rows(memories[j], [2]), "DRAM")
        finish(agent, agent.make_prepped_xfer("WRITE", local, [0], remote, [0], b"from %d" % i))
    for i, agent in enumerate(agents):
        j = (i - 1) % 5
        assert notifications(agent, 1) == {agents[j].name: [b"from %d" % j]}
        assert (memories[i][2 * PAGE : 3 * PAGE] == memories[j][:PAGE]).all()
    for i, agent in enumerate(agents):
        for other in agents[:i] + agents[i + 1 :]:
            agent.remove_remote_agent(other.name)


def test_both_directions() -> None:
    with pair() as it:
        it.b.add_remote_agent(it.a.get_agent_metadata())
        for _ in range(5):
            it.a.send_notif(it.b.name, b"ping")
            assert notifications(it.b, 1) == {it.a.name: [b"ping"]}
            it.b.send_notif(it.a.name, b"pong")
            assert notifications(it.a, 1) == {it.b.name: [b"pong"]}
        it.b.remove_remote_agent(it.a.name)


@pytest.mark.parametrize("mode", ["STRICT", "RW"])
def test_threads(mode: str) -> None:
    """Threads that share an agent, in the modes that allow it."""
    it = Pair(64 * PAGE, sync_mode=nixl_thread_sync_t[f"NIXL_THREAD_SYNC_{mode}"])
    handles = [it.transfer("WRITE", range(i * 8, i * 8 + 8), range(i * 8, i * 8 + 8), b"%d" % i) for i in range(4)]
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for _ in range(50):
                finish(it.a, handles[number])
                it.a.send_notif(it.b.name, b"extra")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    got = notifications(it.b, 400)[it.a.name]
    for thread in threads:
        thread.join()
    assert not failures
    assert (it.there[: 32 * PAGE] == it.here[: 32 * PAGE]).all()
    assert sorted(got) == sorted([b"%d" % i for i in range(4)] * 50 + [b"extra"] * 200)
    it.close()
