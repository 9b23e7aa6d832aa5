"""`lmcache metrics`: what a scrape says is what the server reports, whatever becomes of the server."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from core_stand import wait_until
from prometheus_client.parser import text_string_to_metric_families

from lmcache.core.client import Client, ClientSettings, Engine, ServerAddress
from lmcache.core.control import Control
from lmcache.core.metrics import GAUGES, Counters, TierCounters
from lmcache.core.protocol import Role
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

UNBUFFERED = {**os.environ, "PYTHONWARNINGS": "error", "PYTHONUNBUFFERED": "1"}
GEOMETRY = Geometry((KVGroup(GroupKind.FULL, 16, (4096,)),))
READY = re.compile(r"lmcache metrics of 127\.0\.0\.1:\d+ ready on (http://127\.0\.0\.1:\d+/metrics)\n")

Scrape = Callable[[], dict[tuple[str, str], float]]
"""Name of a sample and its label's value (or both, where it has two) → value."""


def samples(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, " ".join(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def start_exporter() -> Iterator[Callable[..., tuple[subprocess.Popen[str], Scrape]]]:
    started: list[subprocess.Popen[str]] = []

    def start(port: int, *arguments: str) -> tuple[subprocess.Popen[str], Scrape]:
        command = [sys.executable, "-m", "lmcache", "metrics", "--port", str(port), "--listen", "0", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=UNBUFFERED)
        started.append(process)
        line = process.stdout.readline()
        ready = READY.fullmatch(line)
        assert ready, line + process.stderr.read()

        def scrape() -> dict[tuple[str, str], float]:
            with urllib.request.urlopen(ready[1], timeout=60) as answer:
                assert answer.status == 200
                return samples(answer.read().decode())

        return process, scrape

    yield start
    for process in started:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def storing(port: int, tenant: str, chunks: int, keys: str = "") -> Iterator[None]:
    """A worker that has stored chunks, as long as the block lasts."""
    engine = Engine({"model": "toy"}, GEOMETRY, Role.WORKER)
    client = Client(ServerAddress(port=port), engine, ClientSettings(deadline=30, keys=keys))
    client.start(30)
    try:
        link = client.link()
        hashes = b"".join(bytes([number]) * 16 for number in range(chunks))
        link.commit(link.reserve(tenant, b"", hashes, 0, 0).reservation)
        link.drop(link.lookup(tenant, hashes, 16 * chunks).wait().ticket)
        yield
    finally:
        client.close()


def test_a_scrape_says_what_status_says(start_server, start_exporter, tmp_path: Path) -> None:
    tier = f"disk://{tmp_path}"
    flags = ("--chunk-size", "16", "--quota", "team=0.01", "--guarantee", "other=20%", "--l2", f"{tier}?size_gb=1")
    server = start_server(*flags)
    _, scrape = start_exporter(server.port)
    with storing(server.port, "team", 3), Control(ServerAddress(port=server.port), 60) as control:
        control.wait_idle()
        found = wait_until(lambda: (seen := scrape()).get(("lmcache_tier_stored_total", tier)) == 3 and seen)
        report = control.status()
    assert found["lmcache_up", ""] == 1
    about = " ".join(str(report[name]) for name in ("address", "epoch", "eviction_policy", "version"))
    assert found["lmcache_server_info", about] == 1
    for name, value in report["counters"].items():
        assert found[f"lmcache_{name}_total", ""] == value, name
    for name, value in report["gauges"].items():
        assert found[f"lmcache_{name.removesuffix('_total')}", ""] == value, name
    [tiers] = report["tiers"]
    for name, value in tiers["counters"].items():
        assert found[f"lmcache_tier_{name}_total", tier] == value, name
    assert (found["lmcache_tier_usable", tier], found["lmcache_tier_limit_bytes", tier]) == (1, 1 << 30)
    for tenant in report["tenants"]:
        for name in ("cells", "quota_cells", "guaranteed_cells"):
            # a tenant without a quota has no metric of one
            assert found.get((f"lmcache_tenant_{name}", tenant["tenant"])) == tenant[name]
    assert found["lmcache_tenant_cells", "team"] == 3
    [space] = report["namespaces"]
    assert found["lmcache_namespace_chunks", f"toy {space['digest']}"] == 3
    assert found["lmcache_model_clients", "toy worker"] == 1
    assert found["lmcache_tokens_hit_total", ""] == 48


def test_every_figure_of_the_tables_is_there_under_its_sentence(start_server, lmcache, tmp_path: Path) -> None:
    server = start_server("--l2", f"disk://{tmp_path}?size_gb=1")
    once = lmcache("metrics", "--port", str(server.port), "--once")
    assert (once.returncode, once.stderr) == (0, "")
    helps = dict(re.findall(r"^# HELP lmcache_(\w+) (.*)$", once.stdout, re.MULTILINE))
    for field in attrs.fields(Counters):
        assert helps[f"{field.name}_total"] == field.metadata["sentence"]
    for field in attrs.fields(TierCounters):
        assert helps[f"tier_{field.name}_total"] == field.metadata["sentence"]
    for name, (_, sentence) in GAUGES.items():
        assert helps[name.removesuffix("_total")] == sentence
    kinds = dict(re.findall(r"^# TYPE lmcache_(\w+) (\w+)$", once.stdout, re.MULTILINE))
    assert {name for name, kind in kinds.items() if kind == "counter"} == {n for n in kinds if n.endswith("_total")}


def test_a_server_that_goes_is_down_and_one_that_comes_is_up_again(start_server, start_exporter) -> None:
    server = start_server()
    exporter, scrape = start_exporter(server.port)
    assert scrape()["lmcache_up", ""] == 1
    server.end(signal.SIGKILL)
    assert scrape() == {("lmcache_up", ""): 0}
    assert scrape() == {("lmcache_up", ""): 0}
    start_server("--port", str(server.port))
    assert scrape()["lmcache_up", ""] == 1
    exporter.send_signal(signal.SIGTERM)
    out, err = exporter.communicate(timeout=60)
    assert (exporter.returncode, out) == (0, "")
    assert [err.count(words) for words in ("no lmcache server", "the server answers")] == [1, 1]


def test_a_server_that_hangs_is_down(start_server, start_exporter) -> None:
    server = start_server()
    _, scrape = start_exporter(server.port)
    server.process.send_signal(signal.SIGSTOP)
    try:
        assert scrape() == {("lmcache_up", ""): 0}
    finally:
        server.process.send_signal(signal.SIGCONT)
    wait_until(lambda: scrape()["lmcache_up", ""] == 1)


def test_it_begins_before_the_server_does_and_ends_on_an_interrupt(start_server, start_exporter) -> None:
    server = start_server()
    server.end()
    exporter, scrape = start_exporter(server.port)
    assert scrape() == {("lmcache_up", ""): 0}
    exporter.send_signal(signal.SIGINT)
    exporter.communicate(timeout=60)
    assert exporter.returncode == 0


def test_a_server_with_keys_is_asked_with_them(start_server, start_exporter, lmcache, tmp_path: Path) -> None:
    folder = str(tmp_path / "keys")
    assert lmcache("keys", "new", folder).returncode == 0
    assert lmcache("keys", "new", f"{folder}-of-another").returncode == 0
    server = start_server("--keys", folder)
    for keys, up in (((), 0), (("--keys", folder), 1), (("--keys", f"{folder}-of-another"), 0)):
        _, scrape = start_exporter(server.port, *keys)
        assert scrape()["lmcache_up", ""] == up, keys
    refused = lmcache("metrics", "--port", str(server.port), "--keys", f"{folder}/none", "--listen", "0")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)


def test_printed_once_without_a_server_it_is_an_error_that_says_what_to_do(start_server, lmcache) -> None:
    server = start_server()
    server.end()
    once = lmcache("metrics", "--port", str(server.port), "--once")
    assert (once.returncode, once.stdout) == (1, "")
    assert "start one with `lmcache server --port" in once.stderr


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("ninety", "--listen 'ninety' is no address to listen on; write PORT, HOST:PORT or [HOST]:PORT, like 9555"),
        ("99999", "--listen '99999' is no address to listen on"),
        ("", "--listen '' is no address to listen on"),
        ("192.0.2.1:9555", "--listen 192.0.2.1:9555 cannot be had: Cannot assign requested address; give another port"),
    ],
)
def test_an_address_that_cannot_be_had_is_refused(lmcache, listen: str, words: str) -> None:
    refused = lmcache("metrics", "--listen", listen)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"lmcache: {words}")


def test_a_port_that_is_in_use_is_refused(lmcache) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = lmcache("metrics", "--listen", str(port))
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"lmcache: --listen 127.0.0.1:{port} cannot be had: Address already in use; give")


def test_without_its_library_it_says_what_to_install(lmcache, tmp_path: Path) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError('there is none')")
    refused = lmcache("metrics", env={"PYTHONPATH": str(tmp_path)})
    assert refused.returncode == 2
    assert "needs prometheus-client, which cannot be imported: there is none; install" in refused.stderr
    assert "'.[metrics]'" in refused.stderr
