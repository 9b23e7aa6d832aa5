"""The leak checks themselves, run on small test files in a pytest of their own."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

LEAKS = {
    "thread": ("threading.Thread(target=time.sleep, args=(4,), daemon=True, name='straggler').start()", "straggler"),
    "descriptor": ("os.dup(0)", "/dev/null"),
    "process": ("subprocess.Popen(['sleep', '31.5'])", "sleep 31.5"),
    "orphan": ("subprocess.run([sys.executable, '-c', ORPHAN])", "sleep 32.5"),
    "memfd": ("kept.append(mapping_of_a_memfd())", "/memfd:arena"),
    "name": ("pathlib.Path('/dev/shm', NAME).touch()", "/dev/shm/lmcache-leak-test"),
}
"""For each kind of thing: how a test leaves it behind, and what the report must show."""

PREAMBLE = """
import mmap, os, pathlib, pytest, signal, socket, subprocess, sys, threading, time
import leaks
leaks.PATIENCE_S = 0.3
NAME = f"lmcache-leak-test-{os.getpid()}"
ORPHAN = "import os, subprocess; subprocess.Popen(['sleep', '32.5']); os._exit(0)"
kept = []

def mapping_of_a_memfd():
    memfd = os.memfd_create("arena")
    os.ftruncate(memfd, 4096)
    mapping = mmap.mmap(memfd, 4096)
    os.close(memfd)
    return mapping
"""

CLEANING = """
def test_clean_up():
    pathlib.Path("/dev/shm", NAME).unlink()
    for pid in pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
        os.waitpid(int(pid), 0)
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "_plugins"))
    pytester.makeini("[pytest]\nmarkers =\n    may_leave(reason): leaves things\naddopts = -p no:cacheprovider")
    return pytester


def run(inner: pytest.Pytester, body: str) -> pytest.RunResult:
    inner.makepyfile(PREAMBLE + body)
    return inner.runpytest_subprocess("-p", "leaks", "-p", "no:timeout")


def test_what_a_test_leaves_behind_fails_that_test_and_no_other(inner: pytest.Pytester) -> None:
    leaving = "".join(
        f"def test_leaves_{kind}(): {how}\ndef test_after_{kind}(): pass\n" for kind, (how, _) in LEAKS.items()
    )
    result = run(inner, leaving + CLEANING)

    result.assert_outcomes(passed=2 * len(LEAKS) + 1, errors=len(LEAKS))
    for kind, (_, shown) in LEAKS.items():
        report = result.stdout.str().partition(f"ERROR at teardown of test_leaves_{kind} _")[2].partition("____")[2]
        first_lines = "\n".join(report.splitlines()[:6])
        assert "this test left behind:" in first_lines
        assert shown in first_lines


def test_what_a_module_fixture_keeps_is_the_modules_and_is_missed_at_its_end(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
@pytest.fixture(scope="module")
def pair():
    return socket.socketpair()

def test_first(pair): kept.extend(pair)
def test_second(pair): pass
""",
    )

    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*ERROR at teardown of test_second*", "*.py left behind:", "  descriptor * -> socket:*"]
    )


def test_things_that_go_away_by_themselves_are_waited_for(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
leaks.PATIENCE_S = 60

def test_slow_end():
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    kept.append(subprocess.Popen(["sleep", "0.1"]))
""",
    )

    result.assert_outcomes(passed=1)


def test_an_excuse_needs_a_reason(inner: pytest.Pytester) -> None:
    result = run(
        inner,
        """
@pytest.mark.may_leave("the runtime keeps a pool for the process")
def test_excused(): os.dup(0)

@pytest.mark.may_leave
def test_no_reason(): os.dup(0)
""",
    )

    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*may_leave needs its reason, a string*"])
