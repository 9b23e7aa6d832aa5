"""What goes wrong on the command line is one line on standard error, with a remedy and an exit code."""

import functools
import http.server
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from lmcache import __version__
from lmcache.core.memory import total_memory
from lmcache.core.protocol import PROTOCOL

USAGE = [
    (
        ["sever"],
        "lmcache: there is no command 'sever'; did you mean server?",
    ),
    (
        ["frobnicate"],
        (
            "lmcache: there is no command 'frobnicate'; commands are server, ping, status, metrics, pin, unpin, "
            "wait-idle, keys, plugins, engines, tier, demo, geometry, simulate, bench"
        ),
    ),
    (
        ["server", "--chunksize", "256"],
        "lmcache: `lmcache server` has no option --chunksize; did you mean --chunk-size?",
    ),
    (
        ["server", "--l1-size", "10"],
        "lmcache: `lmcache server` has no option --l1-size; did you mean --l1-size-gb?",
    ),
    (
        ["server", "--xyzzy"],
        "lmcache: `lmcache server` has no option --xyzzy; see `lmcache server --help`",
    ),
    (
        ["--prot", "1"],
        "lmcache: `lmcache` has no option --prot; see `lmcache --help`",
    ),
    (
        ["server", "extra"],
        "lmcache: Got unexpected extra argument (extra); see `lmcache server --help`",
    ),
    (
        ["server", "--l1-size-gb"],
        "lmcache: --l1-size-gb needs a value; see `lmcache server --help`",
    ),
    (
        ["server", "--chunk-size"],
        "lmcache: --chunk-size needs a value; give a number of tokens, like 256",
    ),
    (
        ["server", "--port", "abc"],
        "lmcache: --port: 'abc' is not a whole number; use 1 to 65535, or 0 for any free one",
    ),
    (
        ["status", "--port", "abc"],
        "lmcache: --port: 'abc' is not a whole number; use 1 to 65535",
    ),
    (
        ["ping", "--port", "0"],
        "lmcache: --port: 0 is out of range; use 1 to 65535",
    ),
    (
        ["server", "--max-workers", "100000"],
        (
            "lmcache: --max-workers 100000 is more than 256 threads, and a few keep up with any engine; use 2, or as "
            "many as there are engines that store at once"
        ),
    ),
    (
        ["server", "--l1-size-gb", "10GB"],
        "lmcache: --l1-size-gb: '10GB' is not a number; the flag counts GB (2^30 bytes): write 10",
    ),
    (
        ["server", "--l1-size-gb", "much"],
        (
            "lmcache: --l1-size-gb: 'much' is not a number; the flag counts GB (2^30 bytes): write something like 0.5 "
            "or 100"
        ),
    ),
    (
        ["server", "--l1-size-gb", "0"],
        "lmcache: --l1-size-gb: 0 is not a size; give a positive number of GB",
    ),
    (
        ["server", "--l1-size-gb", "-3"],
        "lmcache: --l1-size-gb: -3 is not a size; give a positive number of GB",
    ),
    (
        ["server", "--l1-size-gb", "inf"],
        "lmcache: --l1-size-gb: inf is not a size; give a positive number of GB",
    ),
    (
        ["server", "--l1-size-gb", "0.0005"],
        "lmcache: --l1-size-gb 0.0005 holds no cell of 1024 KiB; give more memory, or smaller cells with --l1-cell-kb",
    ),
    (
        ["server", "--l1-cell-kb", "5"],
        (
            "lmcache: --l1-cell-kb 5 is not a multiple of the host's memory page, 4 KiB; use 1024 unless every object "
            "is much smaller"
        ),
    ),
    (
        ["server", "--chunk-size", "0"],
        "lmcache: --chunk-size 0 is not positive; give a number of tokens, like 256",
    ),
    (
        ["server", "--chunk-size", "many"],
        "lmcache: --chunk-size: 'many' is not a whole number; give a number of tokens, like 256",
    ),
    (
        ["server", "--max-workers", "0"],
        "lmcache: --max-workers 0 is not positive; use at least 1",
    ),
    (
        ["server", "--port", "70000"],
        "lmcache: --port 70000 is no TCP port; use 1 to 65535, or 0 for any free one",
    ),
    (
        ["server", "--host", "0.0.0.0"],
        (
            "lmcache: --host 0.0.0.0 is not a loopback address: whoever reaches it could read and write the cache; "
            "make keys with `lmcache keys new FOLDER` and give them with --keys FOLDER, or accept that with --insecure"
        ),
    ),
    (
        ["keys", "new", ""],
        "lmcache: folder: '' is no path; write one, or . for the current folder",
    ),
    (
        ["server", "--host", "http://127.0.0.1:5555"],
        (
            "lmcache: --host 'http://127.0.0.1:5555' is not just the name or address of a host; write --host 127.0.0.1 "
            "--port 5555"
        ),
    ),
    (
        ["status", "--host", "http://127.0.0.1/"],
        "lmcache: --host 'http://127.0.0.1/' is not just the name or address of a host; write --host 127.0.0.1",
    ),
    (
        ["ping", "--host", "localhost:6555"],
        (
            "lmcache: --host 'localhost:6555' is not just the name or address of a host; write --host localhost --port "
            "6555"
        ),
    ),
    (
        ["ping", "--host", "[::1]"],
        "lmcache: --host '[::1]' is not just the name or address of a host; write --host ::1",
    ),
    (
        ["ping", "--host", ""],
        "lmcache: --host '' is not just the name or address of a host; write something like --host 127.0.0.1",
    ),
    (
        ["server", "--host", "192.0.2.1", "--insecure", "--l1-size-gb", "0.05"],
        (
            "lmcache: cannot listen on 192.0.2.1:5555: 192.0.2.1 is not an address of this host; give --host one that "
            "`ip address` lists, or 0.0.0.0 for all of them"
        ),
    ),
    (
        ["server", "--host", "no-such-host.invalid", "--insecure", "--l1-size-gb", "0.05"],
        (
            "lmcache: cannot listen on no-such-host.invalid:5555: this host knows no no-such-host.invalid; give --host "
            "one that `ip address` lists, or 0.0.0.0 for all of them"
        ),
    ),
    (
        ["tier", "list", "disk:///tmp"],
        "lmcache: `lmcache tier` has no command 'list'; did you mean ls?",
    ),
    (
        ["keys", "replace"],
        "lmcache: `lmcache keys` has no command 'replace'; it has new",
    ),
    (
        ["wait-idle", "--timeout", "long"],
        "lmcache: --timeout: 'long' is not a number; see `lmcache wait-idle --help`",
    ),
    (
        ["tier", "ls", "disk:///etc/passwd"],
        "lmcache: --l2 disk:///etc/passwd: the folder cannot be opened: Not a directory; name a folder",
    ),
    (
        ["geometry", "model", "--keys", "keys"],
        "lmcache: --keys is for a server that wants them; leave it out, for a model needs none",
    ),
    (
        ["server", "--eviction-policy", "LRUU"],
        (
            "lmcache: no plugin offers the eviction policy 'LRUU'; known: ARC, FIFO, GDSF, LFU, LRU, S3-FIFO, SIEVE, "
            "SLRU, W-TinyLFU, prefix-aware; did you mean 'LRU'? use a known one, or add "
            "the plugin that offers it with --plugin"
        ),
    ),
    (
        ["server", "--plugin", "no_such_plugin"],
        (
            "lmcache: --plugin no_such_plugin is no importable module, no installed distribution with lmcache plugins "
            "and no .py file; install it, go to the folder that holds it, or give the path of a .py file"
        ),
    ),
    (
        ["wait-idle", "--timeout", "-1"],
        "lmcache: --timeout: -1.0 is not in the range x>=0; see `lmcache wait-idle --help`",
    ),
    (
        ["wait-idle", "--timeout", "nan"],
        "lmcache: --timeout: nan is not in the range x>=0; see `lmcache wait-idle --help`",
    ),
    (
        ["server", "--l2-deadline-s", "nan"],
        "lmcache: --l2-deadline-s: nan is not in the range 0.01<=x<=3600; see `lmcache server --help`",
    ),
]


@pytest.mark.parametrize(("arguments", "line"), USAGE, ids=[" ".join(arguments) for arguments, _ in USAGE])
def test_a_wrong_request_is_one_line_and_exit_code_2(
    lmcache: Callable[..., subprocess.CompletedProcess[str]], arguments: list[str], line: str
) -> None:
    done = lmcache(*arguments)

    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{line}\n")


@pytest.mark.parametrize("group", ["tier", "keys"])
def test_a_group_of_commands_without_one_of_them_prints_its_help(lmcache, group: str) -> None:
    done = lmcache(group)
    help_of_it = lmcache(group, "--help")

    assert (done.returncode, done.stdout, done.stderr) == (2, "", help_of_it.stdout)
    assert "\nCommands:\n" in help_of_it.stdout


def test_more_memory_than_there_is_names_both_figures_and_a_size_that_fits(lmcache) -> None:
    done = lmcache("server", "--port", "0", "--l1-size-gb", "100000")

    total = total_memory()
    gib = total.bytes / 2**30
    assert done.stderr == (
        f"lmcache: --l1-size-gb 100000 is more than {total.source}, {gib:.1f} GB; use at most {gib * 0.8:.1f}, or "
        "give the host (container) more memory\n"
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_a_port_that_is_taken_is_named(lmcache, start_server) -> None:
    port = start_server().port
    done = lmcache("server", "--port", str(port), "--l1-size-gb", "0.05")

    assert done.stderr == (
        f"lmcache: cannot listen on 127.0.0.1:{port}: Address already in use; stop what uses the port, or choose "
        "another with --port\n"
    )
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize("command", ["ping", "status", "wait-idle"])
def test_nothing_listening_is_said_at_once(lmcache, command: str) -> None:
    with socket.socket() as unused:  # bound, so that nobody else takes the port, but not listening
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        done = lmcache(command, "--port", str(port))

    assert done.stderr == (
        f"lmcache: no lmcache server at 127.0.0.1:{port}: Connection refused; start one with `lmcache server --port "
        f"{port}`, or give --host and --port of one\n"
    )
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("command", ["ping", "status", "wait-idle"])
def test_a_host_that_nobody_knows_is_named(lmcache, command: str) -> None:
    done = lmcache(command, "--host", "no-such-host.invalid")

    assert done.stderr == (
        "lmcache: this host knows no 'no-such-host.invalid'; give a name that it knows, or an address\n"
    )
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("command", ["ping", "status", "wait-idle"])
def test_a_host_elsewhere_has_a_server_only_if_it_was_told_to(lmcache, command: str) -> None:
    host = "192.0.2.1"
    done = lmcache(command, "--host", host)

    fact, _, remedy = done.stderr.rpartition(f" at {host}:5555: ")[2].partition("; ")
    assert done.stderr.startswith(f"lmcache: no lmcache server answers at {host}:5555: ")
    assert fact
    assert remedy == (
        "unless it is started with --host and --keys, a server answers on its own host only: type the command there, "
        "without --host\n"
    )
    assert (done.returncode, done.stdout) == (1, "")


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port where somebody listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def http_port() -> Iterator[int]:
    """A port where an HTTP server listens."""

    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.05))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("command", ["ping", "status"])
@pytest.mark.parametrize("other", ["silent_port", "http_port"])
def test_a_port_that_speaks_something_else_is_recognized(lmcache, request, other: str, command: str) -> None:
    port = request.getfixturevalue(other)
    done = lmcache(command, "--port", str(port))

    assert done.stderr == (
        f"lmcache: what listens at 127.0.0.1:{port} did not answer as an lmcache server within 2 s; it is another "
        "program (choose another --port), or a server that has been stopped\n"
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_another_program_that_speaks_zeromq_is_recognized(lmcache) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        thread = threading.Thread(target=lambda: router.send_multipart([router.recv_multipart()[0], b"pong"]))
        thread.start()
        done = lmcache("ping", "--port", str(port))
        thread.join()

    assert done.stderr == (
        f"lmcache: what listens at 127.0.0.1:{port} is no lmcache server: it sent 4 bytes that are no message of "
        f"protocol {PROTOCOL}: Expected `array`, got `int`; it is another program; choose another --port\n"
    )
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("command", ["ping", "status", "wait-idle"])
def test_a_server_of_another_protocol_version_is_refused_with_both_versions(lmcache, start_server, command) -> None:
    newer = (
        "import sys, lmcache.core.protocol as p; p.PROTOCOL += 1; from lmcache.cli.main import main; sys.exit(main())"
    )
    port = start_server(launcher=("-c", newer)).port
    done = lmcache(command, "--port", str(port))

    assert done.stderr == (
        f"lmcache: the client (lmcache {__version__}) speaks protocol {PROTOCOL}, this server (lmcache "
        f"{__version__}) speaks {PROTOCOL + 1}; install the same lmcache version on both sides\n"
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_a_traceback_is_shown_only_when_asked_for(lmcache) -> None:
    plain = lmcache("server", "--host", "0.0.0.0")
    debug = lmcache("--debug", "server", "--host", "0.0.0.0")

    assert debug.returncode == plain.returncode == 2
    assert debug.stderr.startswith("Traceback (most recent call last):\n")
    assert debug.stderr.endswith(plain.stderr)


def test_a_bug_is_one_line_too_and_says_how_to_report_it(tmp_path) -> None:
    script = """
import sys
from lmcache.cli import main
import lmcache.cli.plugins
def broken(**_): raise ZeroDivisionError("a bug")
lmcache.cli.plugins.plugins.callback = broken
sys.exit(main.main(["plugins"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)

    assert done.stderr == (
        "lmcache: internal error: ZeroDivisionError: a bug; run `lmcache --debug …` and report the traceback\n"
    )
    assert done.returncode == 1


def test_a_reader_that_has_had_enough_is_no_error(tmp_path) -> None:
    line = f"{sys.executable} -m lmcache plugins --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=60)

    assert re.fullmatch("(0|141)\n", done.stdout)
    assert done.stderr == ""


def test_output_that_has_no_room_is_no_fault_of_ours(lmcache) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lmcache", "engines"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == (
        "lmcache: standard output takes no more: no space is left there; give it room, or another place\n"
    )
