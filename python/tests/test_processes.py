"""Several processes: peers that die, forks, spawns, and interpreters that exit with work under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from conftest import LIMIT, check_clean, child, line_of, pattern, run_python, tell

import multirail

SERVER = """
    import sys, multirail
    fabric = multirail.Fabric("loopback", notifications=4 << 20)
    region = fabric.alloc(64 << 20)
    region.write_bytes(bytes(range(256)))
    fabric.publish("memory", region)
    listener = fabric.listen().wait(20)
    print(listener.address, flush=True)
    peer = listener.accept().wait(20)
    for line in sys.stdin:
        print(eval(line), flush=True)
"""


def test_two_processes() -> None:
    with multirail.Fabric("loopback", notifications=4 << 20) as fabric, child(SERVER) as server:
        peer = fabric.connect(line_of(server)).wait(LIMIT)
        remote = peer.region("memory").wait(LIMIT)
        src, back = fabric.alloc(64 << 20), fabric.alloc(256)
        peer.read(back, remote, 256).wait(LIMIT)
        assert back.read_bytes() == bytes(range(256))
        src.write_bytes(pattern(64 << 20))
        operation = peer.write(src, remote, imm=1, notify=b"done")
        receipt_bytes = operation.wait(LIMIT).bytes
        receipt = operation.receipt()
        assert receipt is not None and sum(rail.bytes for rail in receipt.rails) == receipt_bytes == 64 << 20
        tell(server, "peer.imm(1).expect(1).wait(20), fabric.notifications().next().wait(20).data")
        assert line_of(server) == "(None, b'done')"
        tell(server, "__import__('zlib').crc32(region.read_bytes())")
        assert int(line_of(server)) == __import__("zlib").crc32(pattern(64 << 20))
        tell(server, "region.revoke().wait(20)")
        line_of(server)
        with pytest.raises(multirail.Revoked):
            peer.write(src, remote).wait(LIMIT)
        tell(server, "fabric.close()")
        assert line_of(server) == "None"
        assert isinstance(peer.closed().wait(LIMIT), multirail.Closed)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_ends_all_operations(how: signal.Signals) -> None:
    with (
        multirail.Fabric("loopback", heartbeat=0.1, peer_timeout=3.0) as fabric,
        child(SERVER) as server,
    ):
        peer = fabric.connect(line_of(server)).wait(LIMIT)
        remote, src = peer.region("memory").wait(LIMIT), fabric.alloc(64 << 20)
        prepared = peer.prepare_write_pages(src, range(1024), remote, range(1024), 64 << 10)
        never = [peer.imm(9).expect(1), peer.imm(8).arrivals().next(), peer.closed()]
        under_way = [peer.write(src, remote) for _ in range(4)] + [peer.read(src, remote) for _ in range(4)]
        os.kill(server.pid, how)
        assert isinstance(never.pop().wait(LIMIT), multirail.PeerDied)
        for operation in never:
            with pytest.raises(multirail.PeerDied):
                operation.wait(LIMIT)
        for operation in under_way:
            try:
                assert operation.wait(LIMIT).bytes == 64 << 20
            except multirail.PeerDied as error:
                assert isinstance(error, ConnectionError) and error.hint
        for use in (lambda: peer.write(src, remote), lambda: peer.write_imm(1), prepared.post):
            with pytest.raises(multirail.PeerDied):
                use().wait(LIMIT)
        assert not peer.is_alive
    # The fabric closes and another peer is served: nothing hangs.


def test_one_peer_dies_and_the_other_lives_on() -> None:
    with multirail.Fabric("loopback") as fabric, child(SERVER) as first, child(SERVER) as second:
        peers = [fabric.connect(line_of(server)).wait(LIMIT) for server in (first, second)]
        src = fabric.alloc(1 << 20)
        remotes = [peer.region("memory").wait(LIMIT) for peer in peers]
        first.kill()
        assert isinstance(peers[0].closed().wait(LIMIT), multirail.PeerDied)
        assert peers[1].write(src, remotes[1]).wait(LIMIT).bytes == 1 << 20


FORK = """
    import asyncio, os, sys, warnings, multirail
    # From Python 3.12 on, the interpreter warns: this process has threads, as every one with a fabric.
    warnings.filterwarnings("ignore", "This process", DeprecationWarning)
    a, b = multirail.Fabric("loopback"), multirail.Fabric("loopback")
    ab, ba = a.connect_local(b)
    src, dst = a.alloc(64 << 20), b.alloc(64 << 20)
    remote = ab.import_region(dst.descriptor())
    counter, pool, pieces = ba.imm(1), b.recv_pool(1, 64), multirail.LocalList()
    prepared = ab.prepare_write_pages(src, [0], remote, [0], 4096)
    group, catalogue, arrivals = multirail.PeerGroup([ab]), multirail.Catalogue([src]), ba.imm(2).arrivals()
    listener = b.listen().wait(20)
    write, never = ab.write(src, remote), counter.expect(1)
    child = os.fork()
    if child == 0:
        uses = [
            lambda: a.alloc(10), lambda: a.counters(), lambda: a.close(), lambda: a.listen(), lambda: a.aclose(),
            lambda: ab.write(src, remote), lambda: ab.is_alive, lambda: repr(ab), lambda: ab.imm(1), lambda: ab.drain(),
            lambda: len(src), lambda: src.read_bytes(), lambda: src.address, lambda: src.as_numpy(), lambda: repr(src),
            lambda: len(remote), lambda: counter.count, lambda: counter.expect(1), lambda: arrivals.next(),
            lambda: pool.try_next(), lambda: len(pieces), lambda: pieces.append(src, 0, 1), lambda: prepared.post(),
            lambda: group.barrier("x"), lambda: len(group), lambda: len(catalogue), lambda: listener.accept(),
            lambda: write.done(), lambda: write.wait(1), lambda: write.cancel(), lambda: write.result(),
            lambda: never.wait(1), lambda: never.detach(), lambda: write.receipt(), lambda: a.publish("x", src),
        ]
        for number, use in enumerate(uses):
            try:
                use()
            except RuntimeError as error:
                assert "fork" in str(error), error
            else:
                print("use", number, "worked")
        with multirail.Fabric("loopback") as c, multirail.Fabric("loopback") as d:
            cd, dc = c.connect_local(d)
            mine, theirs = c.alloc(4096), d.alloc(4096)
            mine.write_bytes(b"child")
            async def main():
                await cd.write(mine, cd.import_region(theirs.descriptor()))
            asyncio.run(main())
            assert theirs.read_bytes(0, 5) == b"child"
        print("child")
        if sys.argv[1] == "exit":
            sys.exit(0)
        del src, dst, remote, ab, ba, a, b, write, never, prepared, pool
        import gc; gc.collect()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert write.wait(20).bytes == 64 << 20
    ab.write_imm(1).wait(20)
    never.wait(20)
    print("parent")
"""


@pytest.mark.parametrize("how", ["exit", "drop"])
def test_fork_with_operations_under_way(how: str) -> None:
    done = run_python(FORK, how)
    assert (done.returncode, done.stderr, sorted(done.stdout.split("\n"))) == (0, "", ["", "child", "parent"])


def test_fork_in_a_running_loop() -> None:
    program = """
        import asyncio, os, multirail
        async def use(number):
            with multirail.Fabric("loopback") as a:
                there, here = a.connect_local(a)
                await asyncio.gather(there.write_imm(number), here.imm(number).expect(1))
        async def main():
            await use(1)
            child = os.fork()
            if child == 0:
                os._exit(run_child())
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            await use(2)
        def run_child():
            asyncio._set_running_loop(None)
            asyncio.run(use(3))
            return 0
        asyncio.run(main())
    """
    check_clean(run_python(program))


def test_multiprocessing_spawn_and_fork(tmp_path_factory: pytest.TempPathFactory) -> None:
    program = """
        import multiprocessing, sys, multirail
        def work(address, queue):
            with multirail.Fabric("loopback") as fabric:
                peer = fabric.connect(address).wait(20)
                region = fabric.alloc(4096)
                region.write_bytes(b"from the child")
                peer.write(region, peer.region("memory").wait(20), imm=1).wait(20)
                queue.put("written")
                peer.closed().wait(20)
        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                context = multiprocessing.get_context(method)
                with multirail.Fabric("loopback") as fabric:
                    region = fabric.alloc(4096)
                    fabric.publish("memory", region)
                    listener = fabric.listen().wait(20)
                    queue = context.Queue()
                    process = context.Process(target=work, args=(listener.address, queue))
                    process.start()
                    peer = listener.accept().wait(20)
                    peer.imm(1).expect(1).wait(20)
                    assert queue.get(timeout=20) == "written"
                    assert region.read_bytes(0, 14) == b"from the child"
                process.join(20)
                assert process.exitcode == 0, process.exitcode
    """
    file = tmp_path_factory.mktemp("program") / "program.py"
    file.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60, check=False)
    check_clean(done)


OPEN = """
    import asyncio, os, sys, threading, time, multirail
    a, b = multirail.Fabric("loopback", notifications=4 << 20), multirail.Fabric("loopback", notifications=4 << 20)
    ab, ba = a.connect_local(b)
    src, dst = a.alloc(32 << 20), b.alloc(32 << 20)
    remote = ab.import_region(dst.descriptor())
    def all_kinds():
        return [ab.write(src, remote), b.recv(dst), ba.imm(1).expect(1), b.notifications().next(),
                ba.imm(2).arrivals().next(), ab.closed(), b.listen()]
    async def wait_for(operation):
        await operation
"""

EXITS = {
    "an open fabric": "",
    "a listener": "listener = b.listen().wait(20); accept = listener.accept()",
    "operations": "operations = all_kinds()",
    "sys.exit": "operations = all_kinds(); sys.exit(0)",
    "a cycle": "operations = all_kinds(); operations.append(operations)",
    "detached operations": "operations = all_kinds(); ab.write(src, remote).detach(); ab.write_imm(9).detach()",
    "a view": "view = src.as_numpy(); del src, a",
    "a loop that has ended": """
async def main():
    tasks = [asyncio.create_task(wait_for(operation)) for operation in all_kinds()]
    await asyncio.sleep(0)
asyncio.run(main())
""",
    "a daemon thread that waits": """
started = threading.Event()
def wait():
    operation = ba.imm(7).expect(1)
    started.set()
    operation.wait()
threading.Thread(target=wait, daemon=True).start()
started.wait()
""",
    "a daemon thread that transfers": """
started = threading.Event()
def transfer():
    while True:
        ab.write(src, remote).wait()
        started.set()
threading.Thread(target=transfer, daemon=True).start()
started.wait()
""",
    "a daemon thread with a running loop": """
started = threading.Event()
async def main():
    while True:
        await asyncio.gather(ab.write(src, remote), ab.write_imm(5))
        started.set()
threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()
started.wait()
""",
    "a thread that ends later": """
done = threading.Event()
def wait():
    threading.main_thread().join()
    for operation in all_kinds():
        operation.cancel()
    assert ab.write(src, remote).wait(20).bytes == 32 << 20
threading.Thread(target=wait).start()
""",
    "a fabric that a thread has opened": """
def make():
    global c, waiting
    c = multirail.Fabric("loopback")
    waiting = c.connect_local(a)[0].imm(1).expect(1)
thread = threading.Thread(target=make)
thread.start()
thread.join()
""",
    "atexit": "import atexit; atexit.register(lambda: ab.write(src, remote).wait(20)); atexit.register(a.close)",
    "a running loop that exits": """
async def main():
    tasks = [asyncio.create_task(wait_for(operation)) for operation in all_kinds()]
    await asyncio.sleep(0)
    raise SystemExit(0)
asyncio.run(main())
""",
}


@pytest.mark.parametrize("name", EXITS)
def test_the_interpreter_exits_with(name: str) -> None:
    # The order in which CPython destroys globals decides whether it still warns.
    done = run_python(textwrap.dedent(OPEN) + EXITS[name], PYTHONWARNINGS="ignore::ResourceWarning")
    if name == "atexit":
        assert done.returncode == 0
        return
    check_clean(done)


def test_ctrl_c_interrupts_a_wait() -> None:
    program = """
        import signal, sys, time, multirail
        signal.signal(signal.SIGINT, signal.default_int_handler)  # A job in the background begins without.
        with multirail.Fabric("loopback") as a:
            there, here = a.connect_local(a)
            operation = here.imm(1).expect(1)
            for limit in (None, 20):
                try:
                    print("ready", flush=True)
                    start = time.monotonic()
                    operation.wait(limit)
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
                    assert time.monotonic() - start < 10
            there.write_imm(1).wait(20)
            print(operation.wait(20), flush=True)
    """
    with child(program) as process:
        for _ in range(2):
            assert line_of(process) == "ready"
            # The program says so just before it waits. A signal that comes earlier still falls into the same block.
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            assert line_of(process) == "interrupted"
        assert line_of(process) == "None"
        assert process.wait(LIMIT) == 0


def test_ctrl_c_interrupts_a_running_loop() -> None:
    program = """
        import asyncio, signal, multirail
        signal.signal(signal.SIGINT, signal.default_int_handler)  # A job in the background begins without.
        a, b = multirail.Fabric("loopback"), multirail.Fabric("loopback")
        ab, ba = a.connect_local(b)
        src, dst = a.alloc(32 << 20), b.alloc(32 << 20)
        remote = ab.import_region(dst.descriptor())
        async def main():
            print("ready", flush=True)
            while True:
                await ab.write(src, remote)
        try:
            asyncio.run(main())
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        assert ab.write(src, remote).wait(20).bytes == 32 << 20
        b.close(); a.close()
        print("closed", flush=True)
    """
    with child(program) as process:
        assert line_of(process) == "ready"
        time.sleep(0.2)  # So that the signal falls into the transfers.
        process.send_signal(signal.SIGINT)
        assert (line_of(process), line_of(process)) == ("interrupted", "closed")
        assert process.wait(LIMIT) == 0


def test_the_command_for_nixl(tmp_path: Path) -> None:
    plugins = tmp_path / "lib/python3.12/site-packages/.nixl_cu12.mesonpy.libs/plugins"
    plugins.mkdir(parents=True)
    built = tmp_path / "built.so"
    built.write_bytes(b"the plug-in")
    places = ["--venv", str(tmp_path), "--plugin", str(built)]

    def run(action: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "multirail.nixl", action, *places]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)

    assert run("status").returncode == 1
    assert run("install").returncode == 0
    assert (plugins / "libplugin_MULTIRAIL.so").read_bytes() == b"the plug-in"
    assert run("status").returncode == 0
    assert run("uninstall").returncode == 0
    assert list(plugins.iterdir()) == []
