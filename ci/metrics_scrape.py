#!/usr/bin/env python3
"""Has a real Prometheus scrape a running `multirail bench`, and compares.

    metrics_scrape.py PROMETHEUS PROMTOOL MULTIRAIL [PYTHON]

- `promtool check metrics` accepts a page.
- The bytes that Prometheus has of each rail are those that bench prints, within 1 %. Bench cannot print them, and so
  does not end, until Prometheus has the final counts, however late it scrapes.
- Each metric that the dashboard, the rules or docs/observability.md name is scraped, and each that is scraped is in the
  docs. The dashboard's and the rules' expressions evaluate; the dashboard's have a result.
- PYTHON is an interpreter that has the package `multirail`: Prometheus has the bytes that a process of it counts.
"""

import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

NAME = re.compile(r"\bmultirail_[a-z_]+")
DEPLOY = pathlib.Path("deploy")
# The target alone is scraped this often; a second is the least in a real configuration.
INTERVAL = "100ms"
LIMIT = 60


# Moves bytes, prints the counters, and waits to be scraped.
PROGRAM = """
import json, multirail, sys
a, b = multirail.Fabric("loopback"), multirail.Fabric("loopback")
ab, _ba = a.connect_local(b)
server = a.serve_metrics(sys.argv[1], peers=10)
src, dst = a.alloc(8 << 20), b.alloc(8 << 20, "write")
remote = ab.import_region(dst.descriptor())
for _ in range(100):
    ab.write(src, remote).wait()
print(json.dumps(a.counters()), flush=True)
sys.stdin.readline()
"""


def free_address(number):
    """An address on which nobody listens until it is used: the host is of this process and this number alone."""
    # Every address that begins with 127 is this machine's. Of 127.0.0.1, another program might get the port meanwhile.
    high, low = os.getpid() >> 8 & 255, os.getpid() & 255
    host = f"127.{high}.{low}.{number}"
    with socket.socket() as listener:
        listener.bind((host, 0))
        return f"{host}:{listener.getsockname()[1]}"


def ask(address, path, **query):
    """The data of an answer of Prometheus's API."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        sys.exit(f"{path} {query}: {error.read().decode()}")


def until(what, done):
    """Waits until `done` returns something."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        found = done()
        if found:
            return found
        time.sleep(0.05)
    sys.exit(f"{what}: not within {LIMIT} s")


def answers(address, path):
    """The page at `path`, or None if nobody answers yet."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return None


def full_pipe():
    """A pipe into which nothing more goes until it is read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n" * 4096)
    os.set_blocking(writer, True)
    return reader, writer


def counted_bytes(target):
    """The bytes of each device as a process counts them."""
    total = {}
    sample = re.compile(r'^multirail_rail_(?:direct_)?bytes_total\{.*device="([^"]*)".*\} (\d+)$', re.MULTILINE)
    for device, count in sample.findall(answers(target, "/metrics") or ""):
        total[device] = total.get(device, 0) + int(count)
    return total


def at_rest(target):
    """The bytes of each device once a process moves no more, and when it was last seen to move some."""
    last = time.time()

    def same_for_a_second():
        nonlocal last
        before = counted_bytes(target)
        time.sleep(1)
        if counted_bytes(target) == before:
            return before
        last = time.time()
        return None

    return until("the end of the transfer", same_for_a_second), last


def expressions(dashboard):
    """The expressions of the dashboard's panels, with values for Grafana's variables."""
    variables = {"$job": ".*", "$instance": ".*", "$__rate_interval": "5s"}
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in variables.items():
                expression = expression.replace(variable, value)
            assert "$" not in expression, f"{panel['title']}: an unknown variable in {expression}"
            yield panel["title"], expression


def scraped_bytes(address, job):
    """The bytes of each device that Prometheus has seen last."""
    total = {}
    for metric in ("multirail_rail_bytes_total", "multirail_rail_direct_bytes_total"):
        # The series may have ended by now, so this asks for its last, and highest, value.
        query = f'max_over_time({metric}{{job="{job}"}}[5m])'
        for series in ask(address, "query", query=query)["result"]:
            device = series["metric"]["device"]
            total[device] = total.get(device, 0) + int(series["value"][1])
    return total


def check_bytes(rows, address):
    """Compares the bytes of each rail with bench's."""
    (row,) = rows
    assert row["verified"], row
    total = scraped_bytes(address, "multirail")
    for rail in row["rails"]:
        device, expected, scraped = rail["device"], rail["bytes"], total[rail["device"]]
        assert expected > 0, row
        print(f"metrics: {device}: {scraped} bytes in Prometheus, {expected} of bench")
        assert abs(scraped - expected) <= 0.01 * expected, "they differ by more than 1 %"


def check_python(python, target, address):
    """Compares the bytes of each rail with those of a Python process."""
    process = subprocess.Popen(
        [python, "-c", PROGRAM, target], cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert line, "the Python process failed"
        expected = {rail["device"]: rail["bytes"] + rail["direct_bytes"] for rail in json.loads(line)}
        assert sum(expected.values()) >= 100 * (8 << 20), expected
        until("the bytes of the Python process", lambda: scraped_bytes(address, "python") == expected)
        print(f"metrics: Python: {expected} bytes, the same in Prometheus")
        process.communicate("\n", timeout=LIMIT)
        assert process.returncode == 0, process.returncode
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def check_names(address):
    """Compares the scraped names with those that are written down."""
    scraped = {name for name in ask(address, "label/__name__/values") if NAME.fullmatch(name)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in scraped}
    documented = set(NAME.findall(pathlib.Path("docs/observability.md").read_text(encoding="utf-8")))
    assert families == documented, f"only scraped: {families - documented}; only in the docs: {documented - families}"
    for path in (DEPLOY / "grafana/multirail.json", DEPLOY / "prometheus/alerts.yml"):
        named = set(NAME.findall(path.read_text(encoding="utf-8")))
        assert named and named <= scraped, f"{path} names what nobody counts: {named - scraped}"
    print(f"metrics: {len(families)} metrics, all of them in the docs")


def check_dashboard(address, at):
    """Evaluates the dashboard's expressions at a time when bench ran."""
    dashboard = json.loads((DEPLOY / "grafana/multirail.json").read_text(encoding="utf-8"))
    count = 0
    for title, expression in expressions(dashboard):
        result = ask(address, "query", query=expression, time=at)["result"]
        assert result, f"{title}: no data: {expression}"
        count += 1
    print(f"metrics: {count} expressions of the dashboard have data")


def check_rules(address):
    """Asks how the evaluation of the rules went."""
    rules = [rule for group in ask(address, "rules")["groups"] for rule in group["rules"]]
    assert rules
    for rule in rules:
        assert rule["health"] == "ok", rule
    recorded = ask(address, "query", query="max_over_time(multirail:rail_bytes:rate1m[5m])")["result"]
    assert recorded, "the recording rule has no result"
    print(f"metrics: {len(rules)} rules evaluate")


def main():
    prometheus, promtool, multirail, *python = sys.argv[1:]
    target, of_python, address = (free_address(number) for number in (1, 2, 3))
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "prometheus.yml"
        rules = (DEPLOY / "prometheus/alerts.yml").resolve()
        config.write_text(
            f"global: {{scrape_interval: {INTERVAL}, evaluation_interval: 1s}}\n"
            f"rule_files: [{rules}]\n"
            "scrape_configs:\n"
            f"- {{job_name: multirail, static_configs: [{{targets: ['{target}']}}]}}\n"
            f"- {{job_name: python, static_configs: [{{targets: ['{of_python}']}}]}}\n",
            encoding="utf-8",
        )
        log = open(f"{folder}/log", "w", encoding="utf-8")
        command = [prometheus, f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        server = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        bench = None
        try:
            until("Prometheus", lambda: answers(address, "/-/ready"))
            options = ["--pages", "4096", "--duration", "5s", "--no-limit", "--json"]
            reader, writer = full_pipe()
            command = [multirail, "bench", "-v", "--metrics", target, "--metrics-peers", "4", *options]
            bench = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True)
            os.close(writer)
            page = until("the metrics of bench", lambda: answers(target, "/metrics"))
            subprocess.run([promtool, "check", "metrics"], input=page, text=True, check=True)
            assert any("measuring" in line for line in bench.stderr), "bench has ended before it measured"
            counted, moved_at = at_rest(target)
            until("the last bytes of bench", lambda: scraped_bytes(address, "multirail") == counted)
            with open(reader, encoding="utf-8") as said:
                rows = [json.loads(line) for line in said if line.strip()]
            bench.communicate(timeout=LIMIT)
            assert bench.returncode == 0, bench.returncode
            seen = ask(address, "query", query="max_over_time((multirail_peers == 1)[5m:1s])")["result"]
            assert seen, "Prometheus has seen no peer"
            check_bytes(rows, address)
            check_names(address)
            check_dashboard(address, moved_at)
            check_rules(address)
            if python:
                check_python(python[0], of_python, address)
        except BaseException:
            print(pathlib.Path(f"{folder}/log").read_text(encoding="utf-8"), file=sys.stderr)
            raise
        finally:
            for process in (server, bench):
                if process is not None and process.poll() is None:
                    process.terminate()
                    process.wait()
            log.close()


main()
