"""Lists over many regions by NIXL: an initiator that measures, and a target in a process of its own.

    python3 nixl_pair.py initiator REGIONS ENTRIES [--no-progress-thread]

ENTRIES are those of the whole list, and a multiple of REGIONS. The initiator starts the target. It serves the
commands `write` and `read`, one a line of its input, and answers each with a line of JSON: the times of two transfers
of the whole list. It ends with its input. Needs numpy and NIXL. Wrong bytes, a failed transfer and a wait beyond its
limit end both processes with an error.
"""

import base64
import json
import mmap
import os
import queue
import subprocess
import sys
import threading
import time
import traceback

import numpy as np

ENTRY = 4096
WORDS = ENTRY // 8
# Between two entries there is room for another, so that no two are neighbours.
STRIDE = 2 * ENTRY
LIMIT_S = 120
# An odd number, so that no two entries are alike.
MULTIPLIER = 0x9E3779B97F4A7C15


class Lines:
    """The lines of JSON of a stream, each awaited within a limit. NIXL's log goes to the same stream and is skipped."""

    def __init__(self, stream):
        self.lines = queue.Queue()
        threading.Thread(target=self._read, args=[stream], daemon=True).start()

    def _read(self, stream):
        for line in stream:
            if line.startswith("{"):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def next(self):
        try:
            line = self.lines.get(timeout=LIMIT_S)
        except queue.Empty:
            raise RuntimeError(f"the target does not answer within {LIMIT_S} s") from None
        if line is None:
            raise RuntimeError("the target has ended")
        return line


class Memory:
    """The regions of one side, in anonymous memory with huge pages where the kernel has them."""

    def __init__(self, regions, entries):
        self.per_region = entries // regions
        size = self.per_region * STRIDE
        self.maps = [mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(regions)]
        for region in self.maps:
            region.madvise(mmap.MADV_HUGEPAGE)
        # Region, entry, the entry or the gap behind it, word.
        shape = (self.per_region, 2, WORDS)
        self.words = [np.frombuffer(region, np.uint64).reshape(shape) for region in self.maps]
        self.wanted = np.empty((self.per_region, WORDS), np.uint64)
        self.clear()

    def clear(self):
        for region in self.words:
            region[:] = 0

    def fill(self):
        """Gives each entry bytes of its own. The gaps stay zero."""
        for number, region in enumerate(self.words):
            region[:, 0] = self._content(number * self.per_region + np.arange(self.per_region))
            region[:, 1] = 0

    def _content(self, indices):
        """The words of as many entries as a region has: of those with these indices."""
        first = indices.astype(np.uint64) * np.uint64(MULTIPLIER)
        return np.add(first[:, None], np.arange(1, WORDS + 1, dtype=np.uint64), out=self.wanted)

    def check(self, sources):
        """Compares all bytes: entry i has those of entry `sources[i]` of the other side, and the gaps are zero."""
        for number, region in enumerate(self.words):
            first = number * self.per_region
            wanted = self._content(sources[first:first + self.per_region])
            if not np.array_equal(region[:, 0], wanted) or region[:, 1].any():
                raise RuntimeError(f"region {number} has other bytes than those that were sent")

    def ranges(self):
        """Address and bytes of each region."""
        return [(region.ctypes.data, region.nbytes) for region in self.words]


def descriptors(ranges):
    """Address, bytes and device of each entry."""
    starts = [np.arange(address, address + bytes_, STRIDE, dtype=np.uint64) for address, bytes_ in ranges]
    starts = np.concatenate(starts)
    return np.stack([starts, np.full_like(starts, ENTRY), np.zeros_like(starts)], axis=1)


def scattered(regions, entries):
    """The local entries in a random order, and for each a random entry of the remote region with the same number."""
    random, per_region = np.random.default_rng(1), entries // regions
    local = random.permutation(entries)
    within = random.permutation(per_region)
    return local.astype(np.int32), (local - local % per_region + within[local % per_region]).astype(np.int32)


def inverse(local, remote):
    """The local entry of each remote entry, and the remote entry of each local one."""
    of_remote, of_local = np.empty_like(local), np.empty_like(local)
    of_remote[remote], of_local[local] = local, remote
    return of_remote, of_local


def opened(name, memory, progress_thread=True):
    """An agent over UCX that has registered the memory. NIXL's default is a progress thread."""
    from nixl._api import nixl_agent, nixl_agent_config

    config = nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"], capture_telemetry=False)
    agent = nixl_agent(name, config)
    regions = [(address, bytes_, 0, "") for address, bytes_ in memory.ranges()]
    agent.register_memory(agent.get_reg_descs(regions, "DRAM"), backends=["UCX"])
    return agent


def say(answer):
    print(json.dumps(answer), flush=True)


def target(regions, entries):
    """Prints how to reach it, and serves `fill`, `clear` and `check` until its input ends."""
    memory = Memory(regions, entries)
    agent = opened("target", memory)
    sources, _ = inverse(*scattered(regions, entries))
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    say({"metadata": metadata, "ranges": memory.ranges()})
    commands = {"fill": memory.fill, "clear": memory.clear, "check": lambda: memory.check(sources)}
    for line in sys.stdin:
        commands[line.strip()]()
        say({"done": line.strip()})


class Initiator:
    """The measuring side."""

    def __init__(self, regions, entries, progress_thread):
        command = [sys.executable, __file__, "target", str(regions), str(entries)]
        self.process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.lines = Lines(self.process.stdout)
        self.memory = Memory(regions, entries)
        self.agent = opened("initiator", self.memory, progress_thread)
        theirs = self.lines.next()
        self.peer = self.agent.add_remote_agent(base64.b64decode(theirs["metadata"]))
        self.local, self.remote = scattered(regions, entries)
        _, self.sources = inverse(self.local, self.remote)
        self.local_list = self._prepared_list("NIXL_INIT_AGENT", self.memory.ranges())
        self.remote_list = self._prepared_list(self.peer, theirs["ranges"])

    def _prepared_list(self, whose, ranges):
        return self.agent.prep_xfer_dlist(whose, self.agent.get_xfer_descs(descriptors(ranges), "DRAM"))

    def _ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        self.lines.next()

    def write(self):
        """One write of the whole list."""
        self.memory.fill()
        return self._round("WRITE", lambda: self._ask("clear"), lambda: self._ask("check"))

    def read(self):
        """One read of the whole list."""
        self._ask("fill")
        return self._round("READ", self.memory.clear, lambda: self.memory.check(self.sources))

    def _round(self, operation, clear, check):
        """Microseconds of a transfer that is made and posted, and of the same one posted again."""
        clear()
        begun = time.perf_counter()
        handle = self.agent.make_prepped_xfer(operation, self.local_list, self.local, self.remote_list, self.remote)
        made = time.perf_counter()
        posted, done = self._transfer(handle)
        times = {"prepare": made - begun, "post": posted - made, "together": posted - begun, "whole": done - begun}
        check()
        clear()
        begun = time.perf_counter()
        posted, done = self._transfer(handle)
        times |= {"post_again": posted - begun, "whole_again": done - begun}
        check()
        handle.release()
        return {name: 1e6 * seconds for name, seconds in times.items()}

    def _transfer(self, handle):
        """Posts and waits. Returns when the post returned and when the transfer was done."""
        state = self.agent.transfer(handle)
        posted = time.perf_counter()
        while state == "PROC":
            if time.perf_counter() > posted + LIMIT_S:
                raise RuntimeError(f"the transfer takes longer than {LIMIT_S} s")
            state = self.agent.check_xfer_state(handle)
        done = time.perf_counter()
        if state != "DONE":
            raise RuntimeError(f"the transfer has failed: {state}")
        return posted, done

    def close(self):
        """Ends the target."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def initiator(regions, entries, progress_thread):
    """Serves `write` and `read` until its input ends."""
    pair = Initiator(regions, entries, progress_thread)
    try:
        say({"ready": True})
        commands = {"write": pair.write, "read": pair.read}
        for line in sys.stdin:
            say(commands[line.strip()]())
    finally:
        pair.close()


def main():
    words = [word for word in sys.argv[1:] if word != "--no-progress-thread"]
    if len(words) != 3 or words[0] not in ("initiator", "target"):
        sys.exit(__doc__)
    regions, entries = int(words[1]), int(words[2])
    if regions < 1 or entries < regions or entries % regions:
        sys.exit("ENTRIES must be a multiple of REGIONS")
    status = 0
    try:
        if words[0] == "target":
            # Its progress thread accepts the connection.
            target(regions, entries)
        else:
            initiator(regions, entries, "--no-progress-thread" not in sys.argv)
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    # NIXL 1.5.1 crashes where Python ends a process that has made an agent, on machines without CUDA.
    os._exit(status)


if __name__ == "__main__":
    main()
