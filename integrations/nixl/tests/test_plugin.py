"""What the plug-in itself promises: its symbols, its parameters, and the NIXL that it refuses."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from nixl._api import nixlBind
from nixl_pairs import BACKEND, PAGE, finish, make_agent, next_name, pair

pytestmark = pytest.mark.multirail_only

PLUGIN = pathlib.Path(os.environ.get("NIXL_PLUGIN_DIR", "")) / "libplugin_MULTIRAIL.so"
KNOWN = ["transports", "provider", "domains", "token_file", "tls_cert", "path_policy", "deadline_ms", "listen"]


def test_only_two_symbols_are_exported() -> None:
    told = subprocess.run(["nm", "-D", "--defined-only", PLUGIN], check=True, capture_output=True, text=True).stdout
    assert {line.split()[-1] for line in told.splitlines()} == {"nixl_plugin_init", "nixl_plugin_fini"}


def test_the_libraries_that_it_needs() -> None:
    told = subprocess.run(["objdump", "-p", PLUGIN], check=True, capture_output=True, text=True).stdout
    needed = {line.split()[1] for line in told.splitlines() if "NEEDED" in line}
    system = ["c.so.6", "m.so.6", "dl.so.2", "pthread.so.0", "gcc_s.so.1", "stdc++.so.6"]
    assert "libc.so.6" in needed
    assert needed <= {f"lib{name}" for name in system} | {"ld-linux-x86-64.so.2"}


def test_parameters_are_listed() -> None:
    agent = make_agent(next_name("lone"))
    listed = agent.get_plugin_params(BACKEND)
    assert set(KNOWN) <= set(listed) and listed["deadline_ms"] == "30000"
    # A caller may pass the whole list on unchanged.
    make_agent(next_name("lone"), listed)


def test_parameters_are_taken() -> None:
    given = {"deadline_ms": "1234", "listen": "127.0.0.1:0", "transports": "loopback"}
    agent = make_agent(next_name("lone"), given)
    assert agent.get_backend_params(BACKEND) == given


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"no_such": "1"}, ["no_such", *KNOWN]),
        ({"deadline_ms": "soon"}, ["deadline_ms"]),
        ({"transports": "pigeons"}, ["pigeons"]),
        ({"token_file": "/no/such/file"}, ["/no/such/file"]),
        ({"listen": "nowhere"}, ["nowhere"]),
        ({"path_policy": "by-foot"}, ["by-foot"]),
        ({"report": "yes"}, ["report is 0, 1", "yes"]),
    ],
)
def test_wrong_parameters_are_refused(
    given: dict[str, str], told: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(nixlBind.nixlBackendError):
        make_agent(next_name("lone"), given)
    text = capfd.readouterr().err
    assert all(word in text for word in told), text


def test_parameters_of_the_environment(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MULTIRAIL_NIXL_TRANSPORTS", "pigeons")
    with pytest.raises(nixlBind.nixlBackendError):
        make_agent(next_name("lone"))
    make_agent(next_name("lone"), {"transports": "loopback"})
    monkeypatch.setenv("MULTIRAIL_NIXL_TRANSPORTS", "loopback")
    make_agent(next_name("lone"))
    capfd.readouterr()
    monkeypatch.setenv("MULTIRAIL_NIXL_NONSENSE", "1")
    with pytest.raises(nixlBind.nixlBackendError):
        make_agent(next_name("lone"))
    text = capfd.readouterr().err
    assert "MULTIRAIL_NIXL_NONSENSE" in text and "deadline_ms" in text


def test_receipts_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """Each transfer with its receipt, and at the end of the agent what went where, by which device and path."""
    size = 64 * PAGE
    with pair(size, {"report": "2", "transports": "loopback"}) as it:
        for operation, times in [("WRITE", 2), ("READ", 1)]:
            for _ in range(times):
                handle = it.whole(operation)
                finish(it.a, handle)
                it.a.release_xfer_handle(handle)
        name, other = it.a.name, it.b.name
    # NIXL closes an agent once no handle of it is left.
    del it, handle
    gc.collect()
    text = capfd.readouterr().err
    lines = [line for line in text.splitlines() if line.startswith(f"multirail: NIXL agent {name}: ")]
    receipts = [json.loads(line[line.index("{") :]) for line in lines if f"wrote to agent {other}: {{" in line]
    assert [receipt["bytes"] for receipt in receipts] == [size] * 2, text
    assert all(sum(rail["bytes"] for rail in receipt["rails"]) == size for receipt in receipts), text
    for what, times in [("wrote to", 2), ("read from", 1)]:
        sums = f"{what} agent {other}: transfers {times}, bytes {times * size}; "
        ways = next(line.partition(sums)[2] for line in lines if sums in line).split(", ")
        assert all(" by memory-copy: " in way for way in ways), text
        assert sum(int(way.rpartition(" ")[2]) for way in ways) == times * size, text


def test_a_token_keeps_strangers_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for number in range(2):
        file = tmp_path / f"token{number}"
        file.write_text(f"a token of enough bytes {number}\n")
        file.chmod(0o600)
        files.append({"token_file": str(file)})
    target = make_agent(next_name("target"), files[0])
    friend, stranger = make_agent(next_name("friend"), files[0]), make_agent(next_name("stranger"), files[1])
    for agent in (friend, stranger):
        agent.add_remote_agent(target.get_agent_metadata())
    friend.make_connection(target.name)
    with pytest.raises(nixlBind.nixlRemoteDisconnectError):
        stranger.make_connection(target.name)
    monkeypatch.setenv("MULTIRAIL_TOKEN_FILE", files[0]["token_file"])
    other = make_agent(next_name("other"))
    other.add_remote_agent(target.get_agent_metadata())
    other.make_connection(target.name)


CREATE = """
import sys
from nixl._api import nixl_agent, nixl_agent_config
try:
    nixl_agent("lone", nixl_agent_config(backends=[])).create_backend(sys.argv[1])
except Exception as error:
    print(type(error).__name__)
else:
    print("created")
"""


def create_in(environment: pathlib.Path, plugins: pathlib.Path, name: str = "MULTIRAIL") -> tuple[str, str]:
    """Creates the back end in a process whose `nixl` is in this folder. Returns the result and standard error."""
    variables = os.environ | {"PYTHONPATH": str(environment), "NIXL_PLUGIN_DIR": str(plugins)}
    done = subprocess.run(
        [sys.executable, "-c", CREATE, name], check=True, capture_output=True, text=True, env=variables
    )
    return done.stdout.split()[-1], done.stderr


@pytest.fixture
def wheel(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the installed NIXL, which a test may change."""
    installed = pathlib.Path(nixlBind.__file__).parent.parent
    for folder in installed.iterdir():
        # The libraries of other packages are found at their own place.
        if "nixl" in folder.name and folder.is_dir() and not folder.name.startswith("nixl_ep"):
            shutil.copytree(folder, tmp_path / folder.name)
    shutil.copy(installed / "nixl_meta_utils.py", tmp_path)
    return tmp_path


def info(wheel: pathlib.Path) -> pathlib.Path:
    return next(folder for folder in wheel.glob("nixl_cu*-*.dist-info"))


def test_an_old_nixl_is_refused(wheel: pathlib.Path) -> None:
    assert create_in(wheel, PLUGIN.parent)[0] == "created"
    info(wheel).rename(wheel / (info(wheel).name.split("-")[0] + "-1.3.2.dist-info"))
    result, text = create_in(wheel, PLUGIN.parent)
    assert result != "created" and "NIXL 1.3.2 has an older interface; install" in text


def test_a_later_nixl_of_the_same_interface_is_taken(wheel: pathlib.Path) -> None:
    info(wheel).rename(wheel / (info(wheel).name.split("-")[0] + "-1.9.0.dist-info"))
    assert create_in(wheel, PLUGIN.parent)[0] == "created"


def test_a_nixl_of_another_interface_is_refused(wheel: pathlib.Path) -> None:
    """The names of NIXL's virtual functions are changed in its own plug-in, which the probe reads."""
    posix = next(wheel.glob(".nixl_cu*/plugins/libplugin_POSIX.so"))
    told = posix.read_bytes()
    # A string table keeps the end of a name where another name has the same end.
    assert b"registerMemERK" in told
    posix.write_bytes(told.replace(b"registerMemERK", b"registerNewERK"))
    result, text = create_in(wheel, PLUGIN.parent)
    assert result != "created" and "has another interface: function 6 is" in text and "install" in text


def test_a_later_nixl_that_can_not_be_compared_is_refused(wheel: pathlib.Path) -> None:
    info(wheel).rename(wheel / (info(wheel).name.split("-")[0] + "-1.9.0.dist-info"))
    next(wheel.glob(".nixl_cu*/plugins/libplugin_POSIX.so")).unlink()
    result, text = create_in(wheel, PLUGIN.parent)
    assert result != "created" and "to compare its interface with" in text


FORK = """
import os
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("lone", nixl_agent_config(backends=["MULTIRAIL"]))
child = os.fork()
if child == 0:
    del agent
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
agent.send_notif("lone", b"still here")
while not agent.get_new_notifs():
    pass
print("parent")
"""


def test_the_child_of_a_fork_ends() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and done.stdout.split()[-1] == "parent", done.stderr


BESIDE = """
import os
import numpy
from nixl._api import nixl_agent, nixl_agent_config
a, b = [nixl_agent(name, nixl_agent_config(backends=["UCX", "MULTIRAIL"])) for name in "ab"]
assert sorted(a.backends) == ["MULTIRAIL", "UCX"], a.backends
here, there = numpy.full(65536, 7, numpy.uint8), numpy.zeros(65536, numpy.uint8)
for agent, memory in ((a, here), (b, there)):
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
a.add_remote_agent(b.get_agent_metadata())
sides = [a.get_xfer_descs([(memory.ctypes.data, memory.nbytes, 0)], "DRAM") for memory in (here, there)]
for number, backend in enumerate(("UCX", "MULTIRAIL"), 1):
    here[:] = number
    handle = a.initialize_xfer("WRITE", *sides, "b", b"x", [backend])
    assert a.query_xfer_backend(handle) == backend
    a.transfer(handle)
    while a.check_xfer_state(handle) == "PROC":
        b.get_new_notifs()
    assert a.check_xfer_state(handle) == "DONE" and (there == number).all()
    a.release_xfer_handle(handle)
print("both", flush=True)
# UCX's own libraries may crash at the end of a process, also without another back end.
os._exit(0)
"""


def test_beside_ucx(wheel: pathlib.Path) -> None:
    """The plug-in is added to the wheel's folder, and one agent has both back ends."""
    shutil.copy(PLUGIN, next(wheel.glob(".nixl_cu*/plugins")))
    variables = {name: value for name, value in os.environ.items() if name != "NIXL_PLUGIN_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", BESIDE], env=variables | {"PYTHONPATH": str(wheel)}, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.split()[-1] == "both", done.stderr


def test_under_another_name(tmp_path: pathlib.Path) -> None:
    """A program that names another back end can have this one under that name."""
    shutil.copy(PLUGIN, tmp_path / "libplugin_UCX.so")
    installed = pathlib.Path(nixlBind.__file__).parent.parent
    assert create_in(installed, tmp_path, "UCX")[0] == "created"


def test_many_agents_leave_nothing() -> None:
    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    make_agent(next_name("first"))
    before = used()
    for _ in range(20):
        make_agent(next_name("passing"))
    assert used() == before
