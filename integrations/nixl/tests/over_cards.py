"""Moves 1 GB between two agents over simulated EFA cards, and verifies every byte. Each agent's process is a host.

    EFA_SIM_DEVICES=4 ci/efa-sim/run python3 over_cards.py         NIXL_PLUGIN_DIR names our plug-in
    EFA_SIM_DEVICES=4 EFA_SIM_FAULTS=die=2@500 ci/efa-sim/run python3 over_cards.py lost

With `lost`, a card dies in the middle: the other cards move everything, or the transfer ends with an error if libfabric
cannot keep out what the dead card has sent (1.17).
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
from nixl_pairs import end_of, make_agent

PAGE = 64 << 10
PAGES = 2000
#: 1.05 GB in all.
TRANSFERS = 8
PATIENCE = 300.0
PARAMETERS = {"transports": "efa", "report": "1"}


def side(name: str, value: int) -> tuple[Any, np.ndarray]:
    agent = make_agent(name, PARAMETERS)
    memory = np.full(PAGE * PAGES, value, np.uint8)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    return agent, memory


def rows(agent: Any, address: int, pages: np.ndarray) -> Any:
    table = np.empty((len(pages), 3), np.uint64)
    table[:, 0] = pages.astype(np.uint64) * np.uint64(PAGE) + np.uint64(address)
    table[:, 1], table[:, 2] = PAGE, 0
    return agent.get_xfer_descs(table, "DRAM")


def target() -> None:
    agent, memory = side("target", 0)
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    print(json.dumps({"metadata": metadata, "address": memory.ctypes.data}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"arrived": bool((memory == int(line)).all())}), flush=True)


def initiator(loses_card: bool) -> None:
    pipe = subprocess.PIPE
    # The fault is the initiator's.
    environment = {name: value for name, value in os.environ.items() if name != "EFA_SIM_FAULTS"}
    started = subprocess.Popen(
        [sys.executable, __file__, "target"], stdin=pipe, stdout=pipe, text=True, env=environment
    )
    assert started.stdin is not None and started.stdout is not None
    output = started.stdout
    told = json.loads(next(line for line in output if line.startswith("{")))
    agent, memory = side("initiator", 1)
    peer = agent.add_remote_agent(base64.b64decode(told["metadata"]))
    random = np.random.default_rng(1)
    begun, ended = time.monotonic(), None
    for number in range(1, TRANSFERS + 1):
        memory[:] = number
        from_, to = (random.permutation(PAGES) for _ in range(2))
        local, remote = rows(agent, memory.ctypes.data, from_), rows(agent, told["address"], to)
        handle = agent.initialize_xfer("WRITE", local, remote, peer)
        agent.transfer(handle)
        ended = end_of(agent, handle, PATIENCE)
        if ended != "DONE":
            break
        agent.release_xfer_handle(handle)
        started.stdin.write(f"{number}\n")
        started.stdin.flush()
        assert json.loads(next(line for line in output if line.startswith("{")))["arrived"], "bytes are missing"
    seconds = time.monotonic() - begun
    started.stdin.close()
    started.wait(PATIENCE)
    if loses_card:
        assert ended == "DONE" or type(ended).__name__ == "nixlBackendError", ended
        print(f"a card was lost, and the transfers ended with {type(ended).__name__}: {ended}")
        return
    assert ended == "DONE", ended
    print(f"{TRANSFERS * PAGES * PAGE} bytes moved and verified in {seconds:.1f} s")


if __name__ == "__main__":
    target() if sys.argv[1:] == ["target"] else initiator(sys.argv[1:] == ["lost"])
