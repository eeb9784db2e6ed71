"""NIXL or Mooncake between two processes: an initiator that measures, and a target in a process of its own.

    python3 side.py nixl|mooncake

The initiator starts the target. It serves the commands of `benches/src/bin/peers.rs`, one a line of its input, and
answers each with a line of JSON. A command that the library has no calls for is answered with {"missing": reason}, and so
is one that fails. Needs numpy and the library.
"""

import base64
import json
import os
import statistics
import subprocess
import sys
import time
import traceback

import numpy as np

# As in peers.rs.
MEMORY = 128 << 20
SAMPLES_TAKE_S, LEAST_SAMPLES, LIMIT_S = 0.1, 3, 60
BATCH, BURST = 64, 1024
#: The batch of Mooncake's own benchmark. It fails large ones.
MOONCAKE_BATCH = 128
HOST = "127.0.0.1"
ECHO, COUNTED, LAST = b"e", b"c", b"l"


class Missing(Exception):
    """A command that the library has no calls for."""


def say(answer):
    print(json.dumps(answer), flush=True)


def lines(stream):
    """The lines of JSON of a stream. The libraries log to the same one."""
    return (json.loads(line) for line in stream if line.startswith("{"))


def median_us(operations, sample):
    """The median time of one of a sample's operations."""
    end, samples = time.perf_counter() + SAMPLES_TAKE_S, []
    while len(samples) < LEAST_SAMPLES or time.perf_counter() < end:
        begun = time.perf_counter_ns()
        sample()
        samples.append(time.perf_counter_ns() - begun)
    return statistics.median(samples) / 1e3 / operations


def address_of(memory):
    return memory.ctypes.data


class Nixl:
    """An agent over UCX. UCX_TLS says what carries the bytes."""

    def __init__(self, name, length):
        from nixl._api import nixl_agent, nixl_agent_config

        self.name, self.memory = name, np.ones(length, np.uint8)
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"], capture_telemetry=False))
        registered = self.agent.get_reg_descs([(address_of(self.memory), length, 0, "")], "DRAM")
        self.agent.register_memory(registered, backends=["UCX"])

    def offer(self):
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"name": self.name, "metadata": metadata, "address": address_of(self.memory)}

    def connect(self, offer):
        return self.agent.add_remote_agent(base64.b64decode(offer["metadata"])), offer["address"]

    def disconnect(self, peer):
        self.agent.remove_remote_agent(peer[0])

    def _list(self, whose, address, count, size, gap):
        rows = np.zeros((count, 3), np.uint64)
        rows[:, 0] = np.arange(count, dtype=np.uint64) * np.uint64(size + gap) + np.uint64(address)
        rows[:, 1] = size
        return self.agent.prep_xfer_dlist(whose, self.agent.get_xfer_descs(rows, "DRAM"))

    def prepared(self, peer, count, size, gap=0):
        """A call that writes so many shuffled pages, and returns once they are delivered."""
        random, (name, address) = np.random.default_rng(1), peer
        local = self._list("NIXL_INIT_AGENT", address_of(self.memory), count, size, gap)
        remote = self._list(name, address, count, size, gap)
        from_, to = (random.permutation(count).astype(np.int32) for _ in range(2))
        handle = self.agent.make_prepped_xfer("WRITE", local, from_, remote, to)

        def write():
            state, end = self.agent.transfer(handle), time.monotonic() + LIMIT_S
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
                if time.monotonic() > end:
                    raise RuntimeError(f"the transfer is not done within {LIMIT_S} s")
            if state != "DONE":
                raise RuntimeError(f"the transfer ended as {state}")

        return write

    def notify(self, peer, kind, size):
        self.agent.send_notif(peer[0], notif_msg=kind * size)

    def notifications(self):
        return [message for messages in self.agent.get_new_notifs().values() for message in messages]


class Mooncake:
    """An engine over TCP, the only one of its protocols that needs no card."""

    def __init__(self, _name, length):
        from mooncake.engine import TransferEngine

        self.engine, self.memory = TransferEngine(), np.ones(length, np.uint8)
        self._done(self.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""))
        self._done(self.engine.register_memory(address_of(self.memory), length))

    def _done(self, code):
        if code != 0:
            raise RuntimeError(f"Mooncake returned {code}")

    def offer(self):
        return {"session": f"{HOST}:{self.engine.get_rpc_port()}", "address": address_of(self.memory)}

    def connect(self, offer):
        return offer["session"], offer["address"]

    def disconnect(self, _peer):
        """Mooncake has no such call."""

    def prepared(self, peer, count, size, gap=0):
        random, (session, address) = np.random.default_rng(1), peer
        stride, own = size + gap, address_of(self.memory)
        if count == 1:
            return lambda: self._done(self.engine.transfer_sync_write(session, own, address, size))
        from_, to = (random.permutation(count).tolist() for _ in range(2))
        from_, to = [own + page * stride for page in from_], [address + page * stride for page in to]

        def write():
            for at in range(0, count, MOONCAKE_BATCH):
                these = slice(at, at + MOONCAKE_BATCH)
                sizes = [size] * len(from_[these])
                self._done(self.engine.batch_transfer_sync_write(session, from_[these], to[these], sizes))

        return write

    def notify(self, _peer, _kind, _size):
        raise Missing("TransferEngine has no messages")


LIBRARIES = {"nixl": Nixl, "mooncake": Mooncake}


def target(library):
    """Prints how to reach it, and serves `echo` and `peers COUNT` until its input ends."""
    side = LIBRARIES[library]("target", MEMORY)
    say(side.offer())
    others = []
    for line in sys.stdin:
        words = line.split()
        if words[0] == "echo":
            echo(side, side.connect(json.loads(line.split(maxsplit=1)[1])))
        else:
            others.clear()
            others.extend(LIBRARIES[library](f"target{number}", 64) for number in range(int(words[1])))
            for other in others:
                say(other.offer())


def echo(side, peer):
    """Answers notifications until one says that it is the last."""
    while True:
        for message in side.notifications():
            if not message.startswith(COUNTED):
                side.notify(peer, ECHO, len(message))
            if message == LAST:
                return


class Initiator:
    def __init__(self, library):
        self.library, pipe = library, subprocess.PIPE
        command = [sys.executable, __file__, library, "target"]
        self.started = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.offers = lines(self.started.stdout)
        self.offer = next(self.offers)
        self.side = LIBRARIES[library]("initiator", MEMORY)
        self.peer = self.side.connect(self.offer)

    def _ask(self, command):
        self.started.stdin.write(command + "\n")
        self.started.stdin.flush()

    def write(self, size):
        write, batch = self.side.prepared(self.peer, 1, size), BATCH if size < 65536 else 1
        return {"us": median_us(batch, lambda: [write() for _ in range(batch)])}

    def pages(self, count, size, gap):
        return {"us": median_us(count, self.side.prepared(self.peer, count, size, gap))}

    def _await_answer(self):
        end = time.monotonic() + LIMIT_S
        while not self.side.notifications():
            if time.monotonic() > end:
                raise RuntimeError("the target does not answer")

    def _with_echo(self, operations, sample):
        if not hasattr(self.side, "notifications"):
            raise Missing(f"{self.library} has no messages")
        self._ask(f"echo {json.dumps(self.side.offer())}")
        measured = median_us(operations, sample)
        self.side.notify(self.peer, LAST, 1)
        self._await_answer()
        return {"us": measured}

    def message(self, size):
        # A single byte is the end.
        def trip():
            self.side.notify(self.peer, ECHO, size)
            self._await_answer()

        return self._with_echo(2, trip)

    def messages(self, size):
        def burst():
            for _ in range(BURST - 1):
                self.side.notify(self.peer, COUNTED, size)
            self.side.notify(self.peer, ECHO, size)
            self._await_answer()

        return self._with_echo(BURST, burst)

    def peers(self, count):
        self._ask(f"peers {count}")
        writes, connects, peers = [], [], []
        for offer in [next(self.offers) for _ in range(count)]:
            begun = time.perf_counter_ns()
            peers.append(self.side.connect(offer))
            writes.append(self.side.prepared(peers[-1], 1, 8))
            writes[-1]()
            connects.append((time.perf_counter_ns() - begun) / 1e3)
        measured = median_us(count, lambda: [write() for write in writes])
        writes.clear()
        for peer in peers:
            self.side.disconnect(peer)
        return {"us": measured, "connect_us": statistics.median(connects)}

    def run(self, command):
        kind, *numbers = command.split()
        try:
            return getattr(self, kind)(*map(int, numbers))
        except Missing as why:
            return {"missing": str(why)}
        except (RuntimeError, OSError) as why:
            return {"missing": f"failed: {why}"}


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in LIBRARIES:
        sys.exit(__doc__)
    status = 0
    try:
        if sys.argv[2:] == ["target"]:
            target(sys.argv[1])
        else:
            initiator = Initiator(sys.argv[1])
            say({"ready": True})
            for line in sys.stdin:
                say(initiator.run(line))
            initiator.started.stdin.close()
            initiator.started.wait(LIMIT_S)
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    # NIXL 1.5.1 crashes where Python ends a process that has made an agent, on machines without CUDA.
    os._exit(status)


if __name__ == "__main__":
    main()
