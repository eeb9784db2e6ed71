"""An agent in a process of its own, which the test asks for things and may kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
import zlib
from multiprocessing.connection import Connection
from typing import Any

from nixl_pairs import PATIENCE, finish, make_agent, notifications, pattern, register


class Target:
    """The parent's side."""

    def __init__(self, name: str, size: int, parameters: dict[str, str]) -> None:
        self.name, self._size, self._parameters = name, size, parameters
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, self.name, self._size, self._parameters)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        self.metadata, self.address, self.checksum = self._answer()

    def ask(self, *question: Any) -> Any:
        self._pipe.send(question)
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(2 * PATIENCE), "the target does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def freeze(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process.is_alive():
            self.thaw()
            self._pipe.send(("stop",))
            self._process.join(PATIENCE)
            if self._process.is_alive():
                self._process.kill()
                raise AssertionError("the target does not end")


def _serve(pipe: Connection, name: str, size: int, parameters: dict[str, str]) -> None:
    agent = make_agent(name, parameters)
    memory = pattern(size, 5)
    register(agent, memory)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data, checksum(memory)))
    while True:
        question, *arguments = pipe.recv()
        if question == "stop":
            return
        try:
            pipe.send(_answer(agent, memory, question, arguments))
        except Exception as error:
            pipe.send(RuntimeError(repr(error)))


def _answer(agent: Any, memory: Any, question: str, arguments: list[Any]) -> Any:
    if question == "notifications":
        return notifications(agent, arguments[0])
    if question == "checksum":
        return checksum(memory)
    if question == "fill":
        memory[:] = arguments[0]
        return None
    if question == "send to":
        metadata, receiver, address = arguments
        agent.add_remote_agent(metadata)
        memory[:4096] = 3
        sides = [agent.get_xfer_descs([(start, 4096, 0)], "DRAM") for start in (memory.ctypes.data, address)]
        finish(agent, agent.initialize_xfer("WRITE", *sides, receiver, b"from target"))
        return None
    raise ValueError(question)


def checksum(memory: Any) -> int:
    return zlib.crc32(memory)
