"""`lmcache metrics` beside real servers: a scrape says what `lmcache status` says, whatever becomes of the server."""

import json
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
from core_stand import PATIENCE_S, wait_until
from prometheus_client import Metric
from prometheus_client.openmetrics import parser as open_metrics
from prometheus_client.parser import text_string_to_metric_families
from tenant_stand import SMALL, ScriptedEngine, tokens

from lmcache.cli.metric_families import FAMILIES, gauge_name, metrics_of
from lmcache.core.control import Control, ServerAddress
from lmcache.core.metrics import GAUGES, Counters, TierCounters

AWAY = {("lmcache_up",): 0}
"""All that is told of a server that does not answer."""

QUOTED = 'b "c"\\'
"""A tenant's name with every mark that the format has to escape."""

Series = dict[tuple[str, ...], float]
"""Name and values of the labels, in the order of the labels' names → value."""


def series_of(families: Iterator[Metric]) -> Series:
    samples = [sample for family in families for sample in family.samples]
    found = {(each.name, *(each.labels[label] for label in sorted(each.labels))): each.value for each in samples}
    assert len(found) == len(samples), "a series is there twice"
    return found


def scraped(text: str) -> Series:
    return series_of(text_string_to_metric_families(text))


def scrape(exporter) -> Series:
    status, content_type, text = exporter.get()
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return scraped(text)


def told_by(report: dict[str, Any]) -> Series:
    """What a scrape has to have of a report; written without the table that the exporter reads."""
    (tier,) = report["tiers"]
    (namespace,) = report["namespaces"]
    url, model = tier["tier"], namespace["facts"]["model"]
    return {
        ("lmcache_up",): 1,
        ("lmcache_server_info", report["address"], report["epoch"], report["eviction_policy"], report["version"]): 1,
        ("lmcache_uptime_seconds",): report["uptime_s"],
        ("lmcache_l1_bytes",): report["l1_bytes"],
        ("lmcache_cell_bytes",): report["cell_bytes"],
        **{(f"lmcache_{name}_total",): value for name, value in report["counters"].items()},
        **{(gauge_name(name),): value for name, value in report["gauges"].items()},
        **{(f"lmcache_tier_{name}_total", url): value for name, value in tier["counters"].items()},
        ("lmcache_tier_evicted_total", url): tier["evicted"],
        ("lmcache_tier_usable", url): 1,
        ("lmcache_tier_writable", url): 1,
        ("lmcache_tier_in_flight", url): 0,
        ("lmcache_tier_blobs", url): tier["blobs"],
        ("lmcache_tier_bytes", url): tier["bytes"],
        ("lmcache_tier_limit_bytes", url): tier["limit_bytes"],
        **{("lmcache_tenant_cells", each["tenant"]): each["cells"] for each in report["tenants"]},
        **{
            ("lmcache_tenant_quota_cells", each["tenant"]): each["quota_cells"]
            for each in report["tenants"]
            if each["quota_cells"] is not None
        },
        **{("lmcache_tenant_guaranteed_cells", each["tenant"]): each["guaranteed_cells"] for each in report["tenants"]},
        ("lmcache_model_clients", model, "worker"): 1,
        ("lmcache_namespace_chunks", namespace["digest"], model): namespace["chunks"],
    }


def without_uptime(series: Series) -> Series:
    return {name: value for name, value in series.items() if name != ("lmcache_uptime_seconds",)}


@pytest.fixture
def port(start_server, tmp_path: Path) -> Iterator[int]:
    """Of a server with a disk and three tenants with limits, whose engine has stored and looked up."""
    limits = ("--quota", "a=25%", "--quota", f"{QUOTED}=12.5%", "--guarantee", "paid=25%")
    port = start_server(*SMALL, *limits, "--l2", f"disk://{tmp_path}?size_gb=0.1").port
    engine = ScriptedEngine(port)
    for seed, tenant in enumerate(("a", QUOTED, "paid", "")):
        engine.store(tokens(seed, 10), tenant)
    assert engine.hit(tokens(0, 10)) == 10
    with Control(ServerAddress("127.0.0.1", port), PATIENCE_S) as control:
        control.wait_idle(PATIENCE_S)
    yield port
    engine.close()


# --------------------------------------------------------------------------------------------------------- what is told


def test_a_scrape_says_what_status_says_and_nothing_else(lmcache, start_metrics, port: int) -> None:
    found = scrape(start_metrics("--port", str(port)))
    report = json.loads(lmcache("status", "--json", "--port", str(port)).stdout)

    assert without_uptime(found) == without_uptime(told_by(report))
    assert 0 < found["lmcache_uptime_seconds",] <= report["uptime_s"]
    assert found["lmcache_tenant_cells", "a"] == found["lmcache_tenant_cells", "paid"] == 10
    assert found["lmcache_tenant_quota_cells", QUOTED] == found["lmcache_tenant_cells", QUOTED] == 8
    assert ("lmcache_tenant_quota_cells", "paid") not in found
    assert found["lmcache_cells_used",] == found["lmcache_nodes",] == 38
    assert found["lmcache_tokens_hit_total",] == 160
    assert [value for (name, *_), value in found.items() if name == "lmcache_tier_stored_total"] == [38]


def test_every_number_of_the_table_is_there_with_its_sentence(start_metrics, port: int) -> None:
    _, _, text = start_metrics("--port", str(port)).get()
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}

    for prefix, table in (("", Counters), ("tier_", TierCounters)):
        for field in attrs.fields(table):
            name = f"lmcache_{prefix}{field.name}"
            assert f"\n# HELP {name}_total {field.metadata['sentence']}\n" in text
            assert kinds[name] == "counter"
    for name, (_, sentence) in GAUGES.items():
        assert f"\n# HELP {gauge_name(name)} {sentence}\n" in text
        assert kinds[gauge_name(name)] == "gauge"


def test_who_asks_for_openmetrics_gets_the_same_in_that_format(start_metrics, port: int) -> None:
    exporter = start_metrics("--port", str(port))
    status, content_type, text = exporter.get(Accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5")

    assert (status, content_type) == (200, "application/openmetrics-text; version=1.0.0; charset=utf-8")
    told = series_of(open_metrics.text_string_to_metric_families(text))
    assert without_uptime(told) == without_uptime(scrape(exporter))


def test_names_say_what_grows_and_no_two_families_have_the_same() -> None:
    names = [family.name for family in FAMILIES]

    assert len(set(names)) == len(names)
    assert all(re.fullmatch("lmcache_[a-z0-9_]+", name) for name in names)
    assert {each.name for each in FAMILIES if each.kind == "counter"} == {n for n in names if n.endswith("_total")}
    assert all(family.sentence for family in FAMILIES)


TIER = {
    "usable": False,
    "writable": False,
    "in_flight": 3,
    "blobs": None,
    "bytes": None,
    "limit_bytes": None,
    "evicted": 0,
    "counters": attrs.asdict(TierCounters()),
}


def test_two_tiers_of_one_url_are_two_and_what_a_tier_does_not_know_is_absent() -> None:
    urls = ("redis://here:6379", "disk:///a", "redis://here:6379")
    found = series_of(metrics_of({"tiers": [{"tier": url, **TIER} for url in urls]}))

    names = {("redis://here:6379",), ("disk:///a",), ("redis://here:6379#2",)}
    for name in ("usable", "in_flight", "evicted_total", "stored_total"):
        assert {tuple(labels) for family, *labels in found if family == f"lmcache_tier_{name}"} == names
    assert not any(name[0].endswith(("_blobs", "_bytes")) for name in found)


def test_a_client_whose_namespace_is_not_told_counts_all_the_same() -> None:
    peers = [{"role": "peer", "namespace": "00"}] * 2
    found = series_of(metrics_of({"clients": peers, "namespaces": []}))

    assert found == {("lmcache_up",): 1, ("lmcache_model_clients", "", "peer"): 2}


def test_other_paths_are_told_where_metrics_are(start_metrics) -> None:
    exporter = start_metrics("--port", "1")

    for path in ("/", "/metric", "/metrics/more"):
        assert exporter.get(path) == (404, "text/plain; charset=utf-8", "metrics are at /metrics\n")
    assert exporter.get("/metrics?name=x")[0] == 200
    assert exporter.end()[0] == 0


# ---------------------------------------------------------------------------------------------- when the server is away


def test_a_server_may_come_go_and_come_again(start_server, start_metrics) -> None:
    with socket.socket() as unused:  # bound, so that nobody else takes the port, but not listening
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        exporter = start_metrics("--port", port)
        assert scrape(exporter) == scrape(exporter) == AWAY

    epochs = []
    for _ in range(2):
        server = start_server("--port", port)
        found = scrape(exporter)
        assert found["lmcache_up",] == 1
        epochs += [epoch for name, *labels in found if name == "lmcache_server_info" for epoch in labels[1:2]]
        assert epochs[-1] == server.epoch
        server.end(signal.SIGKILL)
        assert scrape(exporter) == AWAY

    assert len(set(epochs)) == 2
    code, out, log = exporter.end()
    assert (code, out) == (0, "")
    # each change once, however many scrapes
    assert re.findall("refused|answers again", log) == ["refused", "answers again"] * 2 + ["refused"]
    assert f"WARNING lmcache.metrics: no lmcache server at 127.0.0.1:{port}: Connection refused; start one with" in log


def test_a_hung_server_costs_each_of_many_scrapes_its_deadline_and_no_more(start_server, start_metrics) -> None:
    server = start_server()
    exporter = start_metrics("--port", str(server.port))
    with ThreadPoolExecutor(8) as scrapers:
        server.process.send_signal(signal.SIGSTOP)
        try:
            assert list(scrapers.map(lambda _: scrape(exporter), range(8))) == [AWAY] * 8
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert {found["lmcache_up",] for found in scrapers.map(lambda _: scrape(exporter), range(32))} == {1}
    code, out, log = exporter.end()
    assert (code, out) == (0, "")
    assert "did not answer as an lmcache server within 2 s" in log
    assert "Traceback" not in log


# ----------------------------------------------------------------------------------------------------------------- keys


def test_keys_are_those_of_status(lmcache, start_server, start_metrics, tmp_path: Path) -> None:
    keys, others = str(tmp_path / "keys"), str(tmp_path / "others")
    for folder in (keys, others):
        assert lmcache("keys", "new", folder).returncode == 0
    port = str(start_server("--keys", keys, "--bulk-port", "0").port)

    let_in = start_metrics("--port", port, "--keys", keys)
    assert scrape(let_in)["lmcache_up",] == 1
    for options, why in (
        ((), "give its client.key with --keys"),
        (("--keys", others), "use client.key of the folder whose server.key the server uses"),
    ):
        turned_away = start_metrics("--port", port, *options)
        assert scrape(turned_away) == AWAY
        assert why in turned_away.end()[2]
        once = lmcache("metrics", "--once", "--port", port, *options)
        assert (once.returncode, once.stdout) == (1, "")
        assert once.stderr == lmcache("status", "--port", port, *options).stderr
    assert let_in.end() == (0, "", "")


# ----------------------------------------------------------------------------------------------------------------- once


def test_once_prints_what_a_scrape_gets_and_ends(lmcache, start_metrics, port: int) -> None:
    done = lmcache("metrics", "--once", "--port", str(port))

    assert (done.returncode, done.stderr) == (0, "")
    assert without_uptime(scraped(done.stdout)) == without_uptime(scrape(start_metrics("--port", str(port))))


def test_once_without_a_server_prints_nothing_and_fails_as_status_does(lmcache) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        done = lmcache("metrics", "--once", "--port", port)
        status = lmcache("status", "--port", port)

    assert (done.returncode, done.stdout, done.stderr) == (1, "", status.stderr)
    assert done.stderr.startswith(f"lmcache: no lmcache server at 127.0.0.1:{port}: Connection refused; start one")


# -------------------------------------------------------------------------------------------------------- start and end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_though_scrapes_are_under_way(start_server, start_metrics, number) -> None:
    server = start_server()
    exporter = start_metrics("--port", str(server.port))
    server.process.send_signal(signal.SIGSTOP)
    waiting = threading.Thread(target=_hang_up_is_fine, args=(exporter.get,))
    waiting.start()
    try:
        with socket.create_connection((exporter.host, exporter.port)):  # and says nothing
            # its own listener, that connection and the scrape's, and the scrape's to the server
            wait_until(lambda: len(_sockets_of(exporter.process.pid)) >= 4)
            assert exporter.end(number) == (0, "", "")
    finally:
        server.process.send_signal(signal.SIGCONT)
        waiting.join()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((exporter.host, exporter.port))


def _hang_up_is_fine(get: Callable[[], object]) -> None:
    with pytest.raises((ConnectionError, OSError)):
        get()


def _sockets_of(pid: int) -> list[str]:
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except FileNotFoundError:
            continue
    return [link for link in links if link.startswith("socket:")]


def test_it_listens_on_loopback_unless_a_host_is_named(start_metrics) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    here = start_metrics("--port", "1")
    named = start_metrics("--port", "1", "--listen", "[::1]:0")

    assert here.ready_line == (
        f"lmcache metrics ready on http://127.0.0.1:{here.port}/metrics: the server at 127.0.0.1:1\n"
    )
    assert named.ready_line.startswith(f"lmcache metrics ready on http://[::1]:{named.port}/metrics: ")
    assert scrape(here) == scrape(named) == AWAY


def test_a_port_that_is_taken_is_named(lmcache, start_metrics) -> None:
    port = start_metrics("--port", "1").port
    done = lmcache("metrics", "--listen", str(port))

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"lmcache: cannot listen on 127.0.0.1:{port}: Address already in use; stop what uses the port, or choose "
        "another with --listen\n"
    )


IS_NOT = "is not [HOST:]PORT; write something like 9555, 127.0.0.1:9555 or [::1]:9555; 0 is any free port"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        *((["--listen", text], f"--listen: {text!r} {IS_NOT}") for text in ("", "here", "h:", "::1:9555", "1.2.3.4")),
        *(
            (["--listen", text], f"--listen: {text!r} {IS_NOT}")
            for text in ("65536", "-1", "http://h:1", "h:1/x", ":1")
        ),
        (["--listen"], "--listen needs a value; see `lmcache metrics --help`"),
        (
            ["--listen", "192.0.2.1:0"],
            (
                "cannot listen on 192.0.2.1:0: 192.0.2.1 is not an address of this host; give --listen one that `ip "
                "address` lists, or 0.0.0.0 for all of them"
            ),
        ),
        (
            ["--listen", "no-such-host.invalid:0"],
            (
                "cannot listen on no-such-host.invalid:0: this host knows no no-such-host.invalid; give --listen one "
                "that `ip address` lists, or 0.0.0.0 for all of them"
            ),
        ),
        (["--once", "--listen", "0"], "--once prints, and --listen serves; leave one of them out"),
        (["--host", "[::1]"], "--host '[::1]' is not just the name or address of a host; write --host ::1"),
        (
            ["--keys", "no-such-folder"],
            (
                "the keys in no-such-folder cannot be read: No such file or directory; make keys with `lmcache keys "
                "new FOLDER`, and give the folder or one of its files"
            ),
        ),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(lmcache, words: list[str], said: str) -> None:
    done = lmcache("metrics", *words)

    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"lmcache: {said}\n")


@pytest.mark.parametrize("words", [[], ["--once"]])
def test_without_prometheus_client_one_line_says_what_to_install(lmcache, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "prometheus_client.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'prometheus_client'\")\n"
    )
    done = lmcache("metrics", *words, env={"PYTHONPATH": str(tmp_path)})

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "lmcache: lmcache metrics needs prometheus-client, which cannot be imported: No module named "
        "'prometheus_client'; install this lmcache with its extra `metrics`: in its checkout, "
        "pip install '.[metrics]'\n"
    )
