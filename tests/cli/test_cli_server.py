"""`lmcache server`, from its ready line to what it leaves behind: nothing."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from core_stand import PATIENCE_S, PATIENT, wait_until

from lmcache import __version__
from lmcache.cli.options import size_text
from lmcache.core.client import Client, ClientSettings, Engine
from lmcache.core.control import Control, ServerAddress
from lmcache.core.protocol import PROTOCOL, Role
from lmcache.errors import LinkLost
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

ENGINE = Engine({"model": "test"}, Geometry((KVGroup(GroupKind.FULL, 64, (4096,)),)), Role.WORKER)


def memfds_of(pid: int) -> set[str]:
    links = {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    return {link for link in links if link.startswith("/memfd:")}


def unix_sockets() -> str:
    return Path("/proc/net/unix").read_text()


def test_the_ready_line_says_what_was_started(start_server) -> None:
    server = start_server("--chunk-size", "256", "--eviction-policy", "lru")

    assert server.ready_line == (
        f"lmcache server ready on 127.0.0.1:{server.port}: L1 51.0 MiB in 51 cells, policy LRU, chunk size 256 "
        f"tokens, epoch {server.epoch}\n"
    )


def test_the_ready_line_of_an_ipv6_server_has_an_address_that_can_be_read_back(lmcache, start_server) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    server = start_server("--host", "::1")
    ping = lmcache("ping", "--host", "::1", "--port", str(server.port))

    assert server.ready_line.startswith(f"lmcache server ready on [::1]:{server.port}: ")
    assert ServerAddress.parse(f"[::1]:{server.port}") == ServerAddress("::1", server.port)
    assert ping.stdout.startswith(f"[::1]:{server.port} answered in ")


def test_ready_line_and_status_say_the_same_of_size_and_chunk_size_and_no_line_ends_in_blanks(
    lmcache, start_server
) -> None:
    server = start_server()
    shown = lmcache("status", "--port", str(server.port)).stdout

    chunk = "policy prefix-aware, chunk size 256 tokens or what each engine needs"
    assert f": L1 51.0 MiB in 51 cells, {chunk}, epoch " in server.ready_line
    assert re.search(
        rf"(?m)^L1: 0 B of 51\.0 MiB used, (0 B|51\.0 MiB) taken from the host; {chunk}$",
        shown,
    )
    assert [line for line in shown.splitlines() if line != line.rstrip()] == []


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (10 << 20, "10.0 MiB"),
        (100 << 30, "100.0 GiB"),
        (3 << 50, "3072.0 TiB"),
    ],
)
def test_sizes_are_shown_in_the_largest_unit_that_they_fill(size: int, text: str) -> None:
    assert size_text(size) == text


def test_the_commands_that_people_already_type_are_understood(start_server) -> None:
    start_server("--chunk-size", "256", "--separate-object-groups", "--eviction-policy", "LRU")
    server = start_server("--max-workers", "8", "--eviction-policy", "LRU", "--chunk-size", "1024")

    with Control(ServerAddress(port=server.port), PATIENCE_S) as control:
        assert control.status()["chunk_size"] == 1024


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_0_and_nothing_is_left(start_server, number) -> None:
    server = start_server()
    address = ServerAddress(port=server.port)
    with Control(address, PATIENCE_S) as control:
        unix_socket = control.hello().socket
    assert memfds_of(server.process.pid) == {"/memfd:lmcache-l1 (deleted)"}
    assert unix_socket in unix_sockets()

    assert server.end(number) == (0, "", "")

    assert not Path(f"/proc/{server.process.pid}").exists()
    assert unix_socket not in unix_sockets()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.host, address.port))


SIGNALS_ANOTHER_THREAD = """
import signal, threading, time
from lmcache.core.hookspecs import hookimpl

def later():
    time.sleep(0.5)  # by then the loop waits
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

@hookimpl
def lmcache_server_started(address):
    threading.Thread(target=later, daemon=True).start()
"""
"""Nobody can say to which thread of a process the system gives a signal, nor keep it from coming just before a wait."""


def test_a_signal_that_does_not_interrupt_the_loops_wait_ends_it_all_the_same(start_server, tmp_path) -> None:
    plugin = tmp_path / "signals.py"
    plugin.write_text(SIGNALS_ANOTHER_THREAD)
    server = start_server("--plugin", str(plugin))

    out, err = server.process.communicate(timeout=30)

    assert (server.process.returncode, out, err) == (0, "", "")


def test_killed_it_leaves_nothing_either_and_its_port_serves_again(start_server) -> None:
    server = start_server()
    with Control(ServerAddress(port=server.port), PATIENCE_S) as control:
        unix_socket = control.hello().socket

    assert server.end(signal.SIGKILL) == (-signal.SIGKILL, "", "")

    assert unix_socket not in unix_sockets()
    again = start_server("--port", str(server.port))
    assert again.port == server.port
    assert again.epoch != server.epoch


def test_a_store_in_flight_is_let_finish_before_the_server_ends(start_server) -> None:
    server = start_server(launcher=("-c", PATIENT))
    client = Client(ServerAddress(port=server.port), ENGINE, ClientSettings(deadline=10.0))
    client.start(wait=10)
    link = client.link()
    reserved = link.reserve("", b"", bytes(16), group=0, shard=0)

    server.process.send_signal(signal.SIGTERM)
    with Control(ServerAddress(port=server.port), PATIENCE_S) as control:
        assert control.status()["gauges"]["reservations"] == 1
    with contextlib.suppress(LinkLost):  # the server may be gone before its answer has been read
        link.commit(reserved.reservation)
    out, err = server.process.communicate(timeout=30)
    client.close()

    assert (server.process.returncode, out, err) == (0, "", "")


def test_a_second_signal_ends_it_at_once_though_a_store_is_in_flight(start_server) -> None:
    server = start_server("--log-level", "info", launcher=("-c", PATIENT))
    client = Client(ServerAddress(port=server.port), ENGINE, ClientSettings(deadline=10.0))
    client.start(wait=10)
    client.link().reserve("", b"", bytes(16), group=0, shard=0)

    # one after the other, so that the kernel does not merge two equal signals into one
    server.process.send_signal(signal.SIGTERM)
    server.process.send_signal(signal.SIGINT)
    server.process.communicate(timeout=30)
    client.close()

    assert server.process.returncode in {128 + signal.SIGINT, 128 + signal.SIGTERM}


def test_a_named_socket_goes_with_the_server_or_with_the_next_start(start_server, tmp_path) -> None:
    folder = tmp_path / "run"
    server = start_server("--socket-dir", str(folder))
    with Control(ServerAddress(port=server.port), PATIENCE_S) as control:
        assert Path(control.hello().socket).parent == folder
    assert server.end(signal.SIGKILL)[0] == -signal.SIGKILL
    assert list(folder.glob("*.sock")) != []

    assert start_server("--socket-dir", str(folder), "--port", str(server.port)).end() == (0, "", "")

    assert list(folder.iterdir()) == []


def test_ping_says_who_answers(lmcache, start_server) -> None:
    server = start_server()
    spoken = lmcache("ping", "--port", str(server.port))
    figures = json.loads(lmcache("ping", "--port", str(server.port), "--json").stdout)

    assert spoken.returncode == 0
    assert spoken.stdout.startswith(f"127.0.0.1:{server.port} answered in ")
    assert spoken.stdout.endswith(f" ms: lmcache {__version__}, protocol {PROTOCOL}, epoch {server.epoch}\n")
    assert figures.pop("seconds") > 0
    assert figures == {
        "address": f"127.0.0.1:{server.port}",
        "version": __version__,
        "protocol": PROTOCOL,
        "epoch": server.epoch,
    }


def test_status_shows_an_engine_and_its_store_and_wait_idle_waits_for_it(lmcache, start_server) -> None:
    server = start_server("--chunk-size", "128")
    port = str(server.port)
    client = Client(ServerAddress(port=server.port), ENGINE, ClientSettings(deadline=10.0))
    client.start(wait=10)
    link = client.link()
    reserved = link.reserve("", b"", bytes(16) + b"\1" * 16, group=0, shard=0)

    report = json.loads(lmcache("status", "--port", port, "--json").stdout)
    assert report["gauges"]["reservations"] == 1
    assert report["gauges"]["cells_used"] == 2
    assert [(each["role"], each["rank"], each["pid"]) for each in report["clients"]] == [("worker", 0, os.getpid())]
    late = lmcache("wait-idle", "--port", port, "--timeout", "0.1")
    assert late.stderr == (
        f"lmcache: 1 stores are still in flight at 127.0.0.1:{port} after 0.1 s; look for a stopped engine with "
        "lmcache status, or wait longer with --timeout\n"
    )
    assert late.returncode == 1

    link.commit(reserved.reservation)
    idle = lmcache("wait-idle", "--port", port)
    assert (idle.returncode, idle.stdout, idle.stderr) == (0, f"no store is in flight at 127.0.0.1:{port}\n", "")
    shown = lmcache("status", "--port", port).stdout
    client.close()

    assert f"lmcache {__version__} at 127.0.0.1:{port}, pid {server.process.pid}, up " in shown
    assert "policy prefix-aware, chunk size 128 tokens\n" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["worker", "0", str(os.getpid()), "test", "128", link.namespace.hex()] in lines
    assert ["shards_committed", "2"] in [words[:2] for words in lines]


def test_the_console_script_is_the_same_command() -> None:
    script = Path(sys.executable).with_name("lmcache")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, f"lmcache, version {__version__}\n", "")


def test_the_console_script_finds_a_plugin_in_the_folder_where_it_is_typed(tmp_path) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "my_policy.py").write_text("""
from lmcache.core.hookspecs import hookimpl
from lmcache.plugins.eviction.lru import LRU

class MyPolicy(LRU):
    name = "my-policy"

@hookimpl
def lmcache_register_eviction_policies():
    return [MyPolicy]
""")
    script = Path(sys.executable).with_name("lmcache")
    done = subprocess.run(
        [script, "plugins", "--plugin", "my_package.my_policy"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "\nmy_package.my_policy (--plugin)\n    eviction policies: my-policy\n" in done.stdout


def test_plugins_hear_of_start_and_end_and_one_that_raises_hurts_nobody(start_server, tmp_path) -> None:
    heard = tmp_path / "heard"
    (tmp_path / "observer.py").write_text(f"""
from lmcache.core.hookspecs import hookimpl

def hear(what):
    with open({str(heard)!r}, "a") as file:
        print(what, file=file)

@hookimpl
def lmcache_server_started(address):
    hear(address)
    raise RuntimeError("an observer's own trouble")

@hookimpl
def lmcache_server_stopping():
    hear("stopping")
""")
    server = start_server("--plugin", str(tmp_path / "observer.py"))
    with Control(ServerAddress(port=server.port), PATIENCE_S) as control:
        control.ping()
    code, _, err = server.end()

    assert code == 0
    assert heard.read_text() == f"127.0.0.1:{server.port}\nstopping\n"
    assert "lmcache_server_started" in err
    assert "RuntimeError: an observer's own trouble" in err


def test_a_policy_of_a_third_party_is_selected_by_its_name(start_server, tmp_path) -> None:
    (tmp_path / "mine.py").write_text("""
from lmcache.core.hookspecs import hookimpl
from lmcache.core.policy import EvictionPolicy

class Mine(EvictionPolicy):
    name = "my-policy"
    def insert(self, node): pass
    def touch(self, nodes): pass
    def remove(self, node): pass
    def victims(self): return iter(())

@hookimpl
def lmcache_register_eviction_policies():
    return [Mine]
""")
    server = start_server("--plugin", str(tmp_path / "mine.py"), "--eviction-policy", "MY-policy")

    assert ", policy my-policy, " in server.ready_line


def test_a_running_server_has_loaded_neither_engine_nor_numpy_nor_what_is_dear(start_server) -> None:
    server = start_server(launcher=("-X", "importtime", "-m", "lmcache"))
    with Control(ServerAddress(port=server.port), PATIENCE_S) as control:
        control.status()
    _, _, err = server.end()

    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in err.splitlines()}
    assert {"lmcache", "zmq", "msgspec"} <= loaded
    assert loaded.isdisjoint({"torch", "vllm", "sglang", "tensorrt_llm", "numpy", "rich", "prometheus_client"})


@pytest.mark.parametrize("quota", ["team=2", "team=200%", "*=1.5"])
def test_a_quota_that_limits_nothing_is_refused(lmcache, quota: str) -> None:
    done = lmcache("server", "--port", "0", "--l1-size-gb", "1", "--quota", quota)
    assert done.returncode == 2
    assert "is more than L1 has (1 GB): it limits nothing; write --quota" in done.stderr


def test_a_terminal_that_is_closed_ends_the_server_as_any_signal_does(start_server) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup children are born deaf to it
    try:
        server = start_server()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert server.end(signal.SIGHUP)[0] == 0


def test_a_server_that_is_to_outlive_its_terminal_does(start_server) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = start_server()
    finally:
        signal.signal(signal.SIGHUP, before)
    server.process.send_signal(signal.SIGHUP)
    with Control(ServerAddress(port=server.port), PATIENCE_S) as control:
        control.ping()
    assert server.end()[0] == 0


def test_keys_that_others_can_read_are_warned_of(lmcache, start_server, tmp_path: Path) -> None:
    assert lmcache("keys", "new", str(tmp_path / "keys")).returncode == 0
    for mode, warned in ((0o600, 0), (0o640, 1)):
        (tmp_path / "keys" / "server.key").chmod(mode)
        _, _, err = start_server("--keys", str(tmp_path / "keys")).end()
        assert err.count("server.key can be read by others") == warned


def test_an_engine_that_is_refused_is_told_of_in_the_server_s_log_once(start_server) -> None:
    server = start_server("--chunk-size", "100")
    geometry = Geometry((KVGroup(GroupKind.FULL, 128, (4096,)),))
    told: list[Exception] = []
    for _ in range(2):
        engine = Engine({"model": "org/model"}, geometry, Role.WORKER)
        client = Client(ServerAddress(port=server.port), engine, ClientSettings(retry_min=0.01), told.append)
        client.start(0)
        wait_until(lambda: told)
        client.close()
        told.clear()
    _, _, err = server.end()
    assert err.count("WARNING lmcache.server: org/model (worker) is refused: chunk size 100") == 1
