"""Agents of the NIXL that is installed, with the back end of `NIXL_TEST_BACKEND`: `UCX` or `MULTIRAIL`."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config, nixlBind

BACKEND = os.environ.get("NIXL_TEST_BACKEND", "MULTIRAIL")
#: Seconds until anything that must happen counts as missing.
PATIENCE = 20.0
PAGE = 4096
numbers = itertools.count()


def make_agent(name: str, parameters: dict[str, str] | None = None, **config: Any) -> Any:
    agent = nixl_agent(name, nixl_agent_config(backends=[], **config))
    agent.create_backend(BACKEND, parameters or {})
    return agent


def until(found: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        result = found()
        if result:
            return result
    raise AssertionError(f"{what}: not within {patience} s")


def finish(agent: Any, handle: Any) -> None:
    assert agent.transfer(handle) in ("PROC", "DONE")
    until(lambda: agent.check_xfer_state(handle) != "PROC", "the transfer ends")
    assert agent.check_xfer_state(handle) == "DONE"


def end_of(agent: Any, handle: Any, patience: float = PATIENCE) -> Exception | str:
    """How a transfer ends: "DONE", "ERR", or NIXL's exception."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            state = agent.check_xfer_state(handle)
        except Exception as error:
            return error
        if state != "PROC":
            return str(state)
    raise AssertionError(f"the transfer has not ended within {patience} s")


def notifications(agent: Any, count: int, meanwhile: Callable[[], Any] = lambda: None) -> dict[str, list[bytes]]:
    """All notifications, once there are `count`. Calls `meanwhile` now and then."""
    found: dict[str, list[bytes]] = {}

    def collect() -> bool:
        meanwhile()
        for name, messages in agent.get_new_notifs().items():
            found.setdefault(name, []).extend(messages)
        return sum(map(len, found.values())) >= count

    until(collect, f"{count} notifications")
    return found


def pattern(length: int, seed: int) -> Any:
    # 251 is prime, so that no page looks like another one near by.
    return np.resize(((np.arange(251) * 7 + seed * 13) % 251).astype(np.uint8), length)


def register(agent: Any, *arrays: Any) -> Any:
    return agent.register_memory([(array.ctypes.data, array.nbytes, 0, "") for array in arrays], "DRAM")


def rows(array: Any, pages: Any, page: int = PAGE) -> Any:
    """The pages of an array with these numbers, as N x 3."""
    found = np.zeros((len(pages), 3), np.uint64)
    found[:, 0] = array.ctypes.data + np.asarray(pages, np.uint64) * np.uint64(page)
    found[:, 1] = page
    return found


class Pair:
    """Two agents of this process. The initiator knows the target, and not the other way round."""

    def __init__(self, size: int = 64 * PAGE, parameters: dict[str, str] | None = None, **config: Any) -> None:
        number = next(numbers)
        self.a = make_agent(f"initiator {number}", parameters, **config)
        self.b = make_agent(f"target {number}", parameters, **config)
        self.here, self.there = pattern(size, 1), pattern(size, 2)
        self.here_registered, self.there_registered = register(self.a, self.here), register(self.b, self.there)
        self.a.add_remote_agent(self.b.get_agent_metadata())

    def transfer(self, operation: str, here: Any, there: Any, note: bytes = b"", page: int = PAGE) -> Any:
        """A transfer of pages by lists that were prepared."""
        local = self.a.prep_xfer_dlist("NIXL_INIT_AGENT", rows(self.here, here, page), "DRAM")
        remote = self.a.prep_xfer_dlist(self.b.name, rows(self.there, there, page), "DRAM")
        count = list(range(len(here)))
        return self.a.make_prepped_xfer(operation, local, count, remote, count, note)

    def whole(self, operation: str, note: bytes = b"") -> Any:
        """A transfer of the whole memory as one descriptor."""
        sides = [
            self.a.get_xfer_descs([(array.ctypes.data, array.nbytes, 0)], "DRAM") for array in (self.here, self.there)
        ]
        return self.a.initialize_xfer(operation, *sides, self.b.name, note)

    def close(self) -> None:
        with contextlib.suppress(nixlBind.nixlNotFoundError):
            self.a.remove_remote_agent(self.b.name)


@contextlib.contextmanager
def pair(size: int = 64 * PAGE, parameters: dict[str, str] | None = None, **config: Any) -> Iterator[Pair]:
    made = Pair(size, parameters, **config)
    yield made
    made.close()


def next_name(what: str) -> str:
    return f"{what} {next(numbers)}"
