"""What a write of 4 KiB costs by NIXL's Python over UCX: an initiator that measures, and a target process.

    python3 nixl_pair.py

It serves the command `calls`, as pair.py does: one prepared handle, posted and checked until it is done.
"""

import base64
import json
import statistics
import subprocess
import sys
import time

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

PAGE = 4096
WRITES = 2_000
LIMIT_S = 60


def opened(name):
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"], capture_telemetry=False))
    memory = np.zeros(PAGE, np.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, PAGE, 0, "")], "DRAM"), backends=["UCX"])
    return agent, memory


def target():
    agent, memory = opened("target")
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    print(json.dumps({"metadata": metadata, "address": memory.ctypes.data}), flush=True)
    sys.stdin.read()


def write(agent, handle):
    state = agent.transfer(handle)
    end = time.monotonic() + LIMIT_S
    while state == "PROC":
        state = agent.check_xfer_state(handle)
        if time.monotonic() > end:
            raise RuntimeError(f"the transfer is not done within {LIMIT_S} s")
    if state != "DONE":
        raise RuntimeError(f"the transfer ended as {state}")


def initiator():
    command, pipe = [sys.executable, __file__, "target"], subprocess.PIPE
    started = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    line = next(line for line in started.stdout if line.startswith("{"))
    told = json.loads(line)
    agent, memory = opened("initiator")
    peer = agent.add_remote_agent(base64.b64decode(told["metadata"]))
    local = agent.get_xfer_descs([(memory.ctypes.data, PAGE, 0)], "DRAM")
    remote = agent.get_xfer_descs([(told["address"], PAGE, 0)], "DRAM")
    handle = agent.initialize_xfer("WRITE", local, remote, peer)
    write(agent, handle)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        measured = []
        for _ in range(WRITES):
            begun = time.perf_counter_ns()
            write(agent, handle)
            measured.append(time.perf_counter_ns() - begun)
        print(json.dumps({"write": statistics.median(measured) / 1e3}), flush=True)
    started.stdin.close()
    started.wait(LIMIT_S)


if __name__ == "__main__":
    target() if sys.argv[1:] == ["target"] else initiator()
