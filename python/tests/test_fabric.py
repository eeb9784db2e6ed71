"""Fabrics: opening, listening, who may connect, and what is known of the machine."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import urllib.request
import warnings
import weakref
from pathlib import Path

import pytest
from conftest import LIMIT, Pair, check_clean, connected, pattern, run_python

import multirail

TOKEN, OTHER = b"0123456789abcdef-one", b"0123456789abcdef-two"


def joined(server: multirail.Fabric, client: multirail.Fabric) -> tuple[multirail.Peer, multirail.Peer]:
    """The client as the server sees it, and the server as the client sees it."""
    listener = server.listen().wait(LIMIT)
    accept, connect = listener.accept(), client.connect(listener.address)
    there = connect.wait(LIMIT)
    return accept.wait(LIMIT), there


def check_transfer(client: multirail.Fabric, to: multirail.Peer, server: multirail.Fabric) -> None:
    src, dst = client.alloc(1 << 20), server.alloc(1 << 20)
    src.write_bytes(pattern(1 << 20))
    to.write(src, to.import_region(dst.descriptor())).wait(LIMIT)
    assert dst.read_bytes() == pattern(1 << 20)


def test_listen_and_connect(pair: Pair) -> None:
    listener = pair.b.listen("127.0.0.1:0").wait(LIMIT)
    host, _, port = listener.address.rpartition(":")
    assert host == "127.0.0.1" and 0 < int(port) < 65536 and listener.address in repr(listener)
    accept = listener.accept()
    there = pair.a.connect(listener.address).wait(LIMIT)
    here = accept.wait(LIMIT)
    assert there.is_alive and here.incarnation == pair.a.incarnation
    check_transfer(pair.a, there, pair.b)


def test_a_connect_runs_whether_or_not_anybody_waits_for_it(pair: Pair) -> None:
    listener = pair.b.listen().wait(LIMIT)
    accept = listener.accept()
    connect = pair.a.connect(listener.address)
    assert accept.wait(LIMIT).is_alive
    assert connect.wait(LIMIT).is_alive


def test_a_listener_that_is_dropped_listens_no_more(pair: Pair) -> None:
    listener = pair.b.listen().wait(LIMIT)
    address = listener.address
    pair.a.connect(address).wait(LIMIT)
    del listener
    gc.collect()
    with pytest.raises(multirail.Error):
        pair.a.connect(address).wait(LIMIT)


def test_a_fabric_connects_to_itself(pair: Pair) -> None:
    there, here = pair.a.connect_local(pair.a)
    src, dst = pair.a.alloc(100), pair.a.alloc(100)
    src.write_bytes(pattern(100))
    there.write(src, there.import_region(dst.descriptor()), imm=1).wait(LIMIT)
    here.imm(1).expect(1).wait(LIMIT)
    assert dst.read_bytes() == pattern(100)


def test_a_device_is_taken_out_of_service_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIRAIL_LOOPBACK_THREADS", "2")
    with connected(deadline=LIMIT) as pair:
        size = 8 << 20
        src, dst, remote = pair.regions(size)
        src.write_bytes(pattern(size))

        def carried() -> dict[str, int]:
            pair.ab.write(src, remote).wait(LIMIT)
            assert dst.read_bytes() == pattern(size)
            dst.write_bytes(bytes(size))
            return {rail["device"]: rail["bytes"] for rail in pair.a.counters()}

        first = carried()
        assert sorted(first) == ["lo0", "lo1"] and first["lo1"] > 0
        running = pair.ab.write(src, remote)
        assert pair.a.drain_device("lo1").wait(LIMIT) is None
        running.wait(LIMIT)
        drained = carried()
        assert carried()["lo1"] == drained["lo1"]
        assert pair.a.restore_device("lo1") is None
        pair.a.restore_device("lo1")
        # The device's worker takes it back, in its own time.
        assert any(carried()["lo1"] > drained["lo1"] for _ in range(1000))
        for call in (pair.a.drain_device, pair.a.restore_device):
            with pytest.raises(multirail.InvalidRequest, match="there are lo0, lo1"):
                call("lo7")
    with pytest.raises(multirail.Closed):
        pair.a.drain_device("lo1")


def scraped(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT) as answer:
        page: str = answer.read().decode()
    return page


def test_metrics_are_scraped(pair: Pair) -> None:
    size = 8 << 20
    src, dst = pair.a.alloc(size), pair.b.alloc(size)
    remote = pair.ab.import_region(dst.descriptor())
    with pair.a.serve_metrics("127.0.0.1:0") as server:
        pair.ab.write(src, remote).wait(LIMIT)
        page = scraped(server.address)
        total = 0
        for line in page.splitlines():
            if line.startswith(("multirail_rail_bytes_total{", "multirail_rail_direct_bytes_total{")):
                total += int(line.rsplit(" ", 1)[1])
        assert total == sum(rail["bytes"] + rail["direct_bytes"] for rail in pair.a.counters()) >= size
        assert "multirail_peers 1" in page and "multirail_peer_bytes_total" not in page
        with pytest.raises(multirail.Busy):
            pair.b.serve_metrics(server.address)
        assert server.address in repr(server)
    server.close()
    with pytest.raises(OSError):
        scraped(server.address)
    with pytest.raises(multirail.InvalidRequest):
        pair.a.serve_metrics("nonsense")


def test_peers_have_metrics_if_asked(pair: Pair) -> None:
    src, dst = pair.a.alloc(8 << 20), pair.b.alloc(8 << 20)
    pair.ab.write(src, pair.ab.import_region(dst.descriptor())).wait(LIMIT)
    with pair.a.serve_metrics("127.0.0.1:0", peers=1) as server:
        page = scraped(server.address)
        assert f'multirail_peer_bytes_total{{peer="{pair.ab.id}",' in page
        assert page.count("\nmultirail_peer_errors_total{") == 1


def test_a_metrics_server_ends_with_its_last_reference(pair: Pair) -> None:
    server = pair.a.serve_metrics("127.0.0.1:0")
    address = server.address
    assert "multirail_peers" in scraped(address)
    del server
    gc.collect()
    with pytest.raises(OSError):
        scraped(address)


async def _drain_and_restore(fabric: multirail.Fabric) -> None:
    await fabric.drain_device("lo0")
    fabric.restore_device("lo0")


def test_a_drain_of_a_device_is_awaited(pair: Pair) -> None:
    asyncio.run(_drain_and_restore(pair.a))


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("", multirail.InvalidRequest),
        ("nonsense", multirail.InvalidRequest),
        ("127.0.0.1:99999", multirail.InvalidRequest),
        ("127.0.0.1:1", multirail.Unreachable),
        ("a\0b:1", multirail.Error),
    ],
)
def test_addresses_that_lead_nowhere(pair: Pair, address: str, kind: type[multirail.Error]) -> None:
    with pytest.raises(kind):
        pair.a.connect(address).wait(LIMIT)
    if address != "127.0.0.1:1":
        with pytest.raises(multirail.Error):
            pair.a.listen(address).wait(LIMIT)


def test_with_closes_and_close_may_come_twice() -> None:
    with multirail.Fabric("loopback") as fabric:
        assert fabric.transports()
    with pytest.raises(multirail.Closed):
        fabric.alloc(10)
    fabric.close()
    assert fabric.aclose().wait(LIMIT) is None


def test_a_fabric_that_is_dropped_is_freed() -> None:
    fabric = multirail.Fabric("loopback")
    gone = weakref.ref(fabric)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del fabric
        gc.collect()
    assert gone() is None


def test_with_passes_exceptions_on() -> None:
    with pytest.raises(ZeroDivisionError), multirail.Fabric("loopback"):
        raise ZeroDivisionError


def test_transports_and_counters(pair: Pair) -> None:
    (transport,) = pair.a.transports()
    assert transport["backend"] == "loopback" and transport["devices"]
    assert len(pair.a.counters()) >= len(transport["devices"])
    assert {row["backend"] for row in pair.a.counters()} == {"loopback"}


def test_backends_and_topology_describe_this_machine() -> None:
    rows = {row["backend"]: row for row in multirail.backends()}
    assert {"loopback", "efa", "verbs"} <= set(rows) and rows["loopback"]["available"]
    for row in rows.values():
        assert row["devices"] if row["available"] else row["reason"] and row["remedy"]
    machine = multirail.topology()
    assert machine["nodes"] and set(machine) == {"allowed", "cores", "functions", "nodes"}
    assert multirail.__version__.count(".") == 2


def test_wrong_options() -> None:
    for options in (
        {"token": b"short"},
        {"token": "/no/such/file"},
        {"tls": ("no", "such", "file")},
        {"notifications": 1},
        {"max_operations": 0},
        {"max_operations": 2**62},
        {"paths": "by-mail"},
        {"paths": []},
        {"heartbeat": 2.0, "peer_timeout": 1.0},
    ):
        with pytest.raises(multirail.Error):
            multirail.Fabric("loopback", **options)  # type: ignore[arg-type]
    for options in ({"deadline": -1.0}, {"heartbeat": float("nan")}, {"notifications": -1}, {"notifications": 2**64}):
        with pytest.raises(ValueError):
            multirail.Fabric("loopback", **options)  # type: ignore[arg-type]
    for options in ({"deadline": "1"}, {"token": 5}, {"tls": ("a", "b")}, {"paths": 5}, {"nothing": 1}):
        with pytest.raises((TypeError, ValueError)):
            multirail.Fabric("loopback", **options)  # type: ignore[arg-type]
    with pytest.raises(multirail.NotFound):
        multirail.Fabric("no such backend")


@pytest.mark.parametrize("notifications", [2**40, 2**62])
def test_more_memory_for_notifications_than_there_is(notifications: int) -> None:
    program = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
        import multirail
        try:
            multirail.Fabric("loopback", notifications=int(sys.argv[1]))
        except multirail.Error:
            print("refused")
    """
    check_clean(run_python(program, str(notifications)), "refused")


def test_the_backend_comes_from_the_environment() -> None:
    program = "import multirail; print(multirail.Fabric().transports()[0]['backend'])"
    check_clean(run_python(program, MULTIRAIL_BACKEND="loopback"), "loopback")
    done = run_python(program, MULTIRAIL_BACKEND="nonsense")
    assert done.returncode == 1 and "multirail.errors.NotFound" in done.stderr


def test_more_operations_than_max_operations_are_busy_and_not_lost() -> None:
    with multirail.Fabric("loopback", max_operations=4) as a, multirail.Fabric("loopback") as b:
        ab, _ba = a.connect_local(b)
        src, dst = a.alloc(1 << 20), b.alloc(1 << 20)
        remote = ab.import_region(dst.descriptor())
        started: list[multirail.Operation[multirail.Outcome]] = []
        for _ in range(200):
            try:
                started.append(ab.write(src, remote))
            except multirail.Busy:
                started.pop().wait(LIMIT)
        assert all(operation.wait(LIMIT).bytes == 1 << 20 for operation in started)
        assert ab.write(src, remote).wait(LIMIT).bytes == 1 << 20


# ---- who may connect ----


def test_only_peers_with_the_token_connect(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    with multirail.Fabric("loopback", token=TOKEN) as server:
        listener = server.listen().wait(LIMIT)
        accept = listener.accept()
        for token in (OTHER, None):
            with multirail.Fabric("loopback", token=token) as client, pytest.raises(multirail.Permission) as caught:
                client.connect(listener.address).wait(LIMIT)
            assert isinstance(caught.value, PermissionError) and caught.value.kind == "permission"
        assert not accept.done()
        for good in (TOKEN, file, str(file)):
            with multirail.Fabric("loopback", token=good) as client:
                assert client.connect(listener.address).wait(LIMIT).is_alive
        assert accept.wait(LIMIT).incarnation


def test_tenants_are_kept_apart() -> None:
    with multirail.Fabric("loopback", token=TOKEN) as server:
        tenant = server.tenant("blue", OTHER)
        listener = server.listen().wait(LIMIT)
        accept = listener.accept()
        with multirail.Fabric("loopback", token=OTHER) as client:
            there = client.connect(listener.address).wait(LIMIT)
            here = accept.wait(LIMIT)
            assert here.tenant == "blue"
            check_transfer(client, there, tenant)
            mine, theirs = tenant.alloc(64), server.alloc(64)
            tenant.publish("name", mine)
            server.publish("hidden", theirs)
            assert len(there.region("name").wait(LIMIT)) == 64
            with pytest.raises(multirail.NotFound):
                there.region("hidden").wait(LIMIT)
            with pytest.raises(multirail.Error):
                there.import_region(theirs.descriptor())
                there.write(client.alloc(64), there.import_region(theirs.descriptor())).wait(LIMIT)
        with pytest.raises(multirail.Error):
            server.tenant("blue", b"0123456789abcdef-three")
        with pytest.raises(multirail.Error):
            server.tenant("red", OTHER)
        tenant.close()
    with multirail.Fabric("loopback") as open_, pytest.raises(multirail.InvalidRequest, match="token"):
        open_.tenant("blue", TOKEN)


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=multirail test", "-days", "2"]
    (directory / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=CA:FALSE\n")
    try:
        for name in ("ca", "other"):
            curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
            openssl(directory, "req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", *subject)
        openssl(directory, "req", *curve, "-keyout", "host.key", "-out", "host.csr", *subject[:2])
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
        openssl(directory, "x509", "-req", "-in", "host.csr", "-out", "host.pem", *signed)
    except FileNotFoundError:
        pytest.skip("there is no openssl here")
    return directory


def test_tls(certificates: Path) -> None:
    files = (certificates / "host.pem", certificates / "host.key", certificates / "ca.pem")
    with (
        multirail.Fabric("loopback", tls=files, token=TOKEN) as server,
        multirail.Fabric("loopback", tls=tuple(map(str, files)), token=TOKEN) as client,  # type: ignore[arg-type]
    ):
        _here, there = joined(server, client)
        check_transfer(client, there, server)


def test_tls_refuses_who_has_no_certificate_of_the_authority(certificates: Path) -> None:
    files = (certificates / "host.pem", certificates / "host.key", certificates / "ca.pem")
    distrusts = (certificates / "host.pem", certificates / "host.key", certificates / "other.pem")
    unknown = (certificates / "other.pem", certificates / "other.key", certificates / "ca.pem")
    with multirail.Fabric("loopback", tls=files) as server:
        listener = server.listen().wait(LIMIT)
        for tls in (distrusts, unknown, None):
            with multirail.Fabric("loopback", tls=tls) as client, pytest.raises(multirail.Error):
                client.connect(listener.address).wait(LIMIT)


# ---- another backend, and the command ----


def test_efa_over_libfabric_tcp() -> None:
    program = """
        import asyncio, multirail
        row = {row["backend"]: row for row in multirail.backends()}["efa"]
        if not row["available"]:
            print("unavailable")
            raise SystemExit
        with multirail.Fabric("efa", notifications=4 << 20) as a, multirail.Fabric("efa", notifications=4 << 20) as b:
            ab, ba = a.connect_local(b)
            src, dst = a.alloc(1 << 20), b.alloc(1 << 20)
            data = bytes(range(256)) * 4096
            src.write_bytes(data)
            remote = ab.import_region(dst.descriptor())
            async def main():
                written, _ = await asyncio.gather(ab.write(src, remote, imm=1), ba.imm(1).expect(1))
                assert written.bytes == 1 << 20
                assert dst.read_bytes() == data
                await ab.write_pages(src, [1, 0], remote, [7, 9], 65536, notify=b"pages")
                assert (await b.notifications().next()).data == b"pages"
                assert dst.read_bytes(7 << 16, 65536) == data[65536:131072]
                buffer = b.alloc(4096)
                _, received = await asyncio.gather(ab.send(src, 100), b.recv(buffer))
                assert received.bytes == 100 and buffer.read_bytes(0, 100) == data[:100]
                receive = b.recv(buffer)
                try:
                    await asyncio.wait_for(receive, 0.1)
                except asyncio.TimeoutError:
                    assert receive.done()
                dst.write_bytes(bytes(1 << 20))
                await ab.read(src, remote)
                assert src.read_bytes() == bytes(1 << 20)
            asyncio.run(main())
            print({row["backend"] for row in a.counters()})
    """
    done = run_python(program, limit=60, MULTIRAIL_EFA_PROVIDER="tcp", MULTIRAIL_EFA_NODE="127.0.0.1")
    if done.stdout.strip() == "unavailable":
        pytest.skip("there is no libfabric here")
    check_clean(done, "{'efa'}")


def test_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "multirail", "info"], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0 and "loopback" in done.stdout
    wrong = subprocess.run(
        [sys.executable, "-m", "multirail", "nonsense"], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert wrong.returncode != 0 and "nonsense" in wrong.stderr
