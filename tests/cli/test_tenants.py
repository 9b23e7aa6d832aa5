"""What `lmcache server --quota`, `--guarantee` and `--admission` do from the command line, and what they refuse."""

import json
import re
import struct
import textwrap
from pathlib import Path

import msgspec
import pytest
from core_stand import PATIENCE_S, RawConnection
from tenant_stand import CELL, CELLS, SMALL, ScriptedEngine, tokens

from lmcache.core.control import Control, ServerAddress
from lmcache.core.hints import Hints, Priority
from lmcache.core.protocol import Error, ErrorCode, Placed
from lmcache.errors import Refused

GB = 1 << 30


@pytest.fixture
def start_engine(start_server):
    """A server of 64 cells with these options, and a scripted engine beside it."""
    engines: list[ScriptedEngine] = []

    def start(*options: str) -> ScriptedEngine:
        engines.append(ScriptedEngine(start_server(*SMALL, *options).port))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def status(engine: ScriptedEngine) -> dict[str, object]:
    with Control(ServerAddress("127.0.0.1", engine.port), PATIENCE_S) as control:
        return control.status()


# -------------------------------------------------------------------------------------------------------------- limits


def test_a_quota_is_a_size_or_a_share_and_is_kept(start_engine) -> None:
    engine = start_engine("--quota", "a=25%", "--quota", f"b c={10 * CELL / GB!r}", "--quota", "x=y=12.5%")

    for seed, (tenant, cells) in enumerate((("a", 16), ("b c", 10), ("x=y", 8), ("free", 30))):
        assert len(engine.store(tokens(seed, 30), tenant)) == cells
    assert [engine.hit(tokens(seed, 30)) for seed in range(4)] == [16, 10, 8, 30]
    assert {each["tenant"]: (each["cells"], each["quota_cells"]) for each in status(engine)["tenants"]} == {
        "a": (16, 16), "b c": (10, 10), "x=y": (8, 8),
    }  # fmt: skip

    assert len(engine.store(tokens(9, 3), "a")) == 3
    # its own chunks went, from the end of its prompt
    assert [engine.hit(tokens(seed, 30)) for seed in (0, 1, 2, 3)] == [13, 10, 8, 30]


def test_a_guarantee_is_kept_against_everybody_else(start_engine) -> None:
    engine = start_engine("--guarantee", "paid=25%")
    engine.store(tokens(1, 20), "paid")
    for seed in range(10, 30):
        engine.store(tokens(seed, 10), f"tenant {seed}")

    assert engine.hit(tokens(1, 20)) == 16
    assert engine.cells("paid") == 16
    assert status(engine)["gauges"]["cells_used"] == CELLS


def test_everybody_else_has_a_quota_each(start_engine, lmcache) -> None:
    engine = start_engine("--quota", "*=12.5%", "--quota", "large=50%")
    for seed, tenant in enumerate(("one", "two", "large")):
        engine.store(tokens(seed, 40), tenant)

    assert [engine.cells(tenant) for tenant in ("one", "two", "large")] == [8, 8, 32]
    table = lmcache("status", "--port", str(engine.port)).stdout
    shown = re.search(r"(?ms)^tenant .*?\n\n", table)
    assert shown
    assert [line.split() for line in shown[0].splitlines() if line] == [
        ["tenant", "holds", "quota", "guaranteed"],
        ["large", "128.0", "KiB", "128.0", "KiB", "0", "B"],
        ["one", "32.0", "KiB", "32.0", "KiB", "0", "B"],
        ["two", "32.0", "KiB", "32.0", "KiB", "0", "B"],
    ]


def test_a_full_guarantee_leaves_others_nothing_and_nobody_waits(start_engine) -> None:
    engine = start_engine("--guarantee", "paid=100%")
    engine.store(tokens(1, CELLS), "paid")

    assert engine.store(tokens(2, 4)) == []
    assert engine.hit(tokens(1, CELLS)) >= CELLS // 2
    assert status(engine)["gauges"]["reservations"] == 0


def test_thousands_of_tenants_have_a_quota_each_and_only_those_with_chunks_are_listed(start_engine) -> None:
    engine = start_engine("--quota", "*=5%")
    for number in range(1500):
        assert engine.store(tokens(number, 1), f"tenant {number}") == [Placed.GRANTED]

    report = status(engine)
    assert {each["tenant"] for each in report["tenants"]} == {f"tenant {number}" for number in range(1436, 1500)}
    assert report["counters"]["chunks_evicted"] == 1436


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quota", "a"], "--quota 'a' is no limit of a tenant; write --quota NAME=2.5 (GB) or --quota NAME=25%"),
        (["--quota", "=1"], "--quota '=1' is no limit of a tenant; write"),
        (["--quota", "a="], "--quota 'a=' is no limit of a tenant; write"),
        (["--quota", "a=much"], "--quota 'a=much' is no limit of a tenant; write"),
        (["--quota", "a=0"], "--quota 'a=0' is no limit of a tenant; write"),
        (["--quota", "a=-5%"], "--quota 'a=-5%' is no limit of a tenant; write"),
        (["--quota", "a=nan"], "--quota 'a=nan' is no limit of a tenant; write"),
        (["--guarantee", "a=inf%"], "--guarantee 'a=inf%' is no limit of a tenant; write --guarantee NAME=2.5 (GB)"),
        (["--quota", "a=1e-9"], "--quota a=9.31323e-10 holds no cell of 4 KiB; give the tenant more, or smaller cells"),
        (["--quota", "a=50%", "--quota", "a=1"], "--quota gives tenant a two sizes; give each tenant one"),
        (["--guarantee", "*=5%"], "--guarantee * promises a share of L1 to any number of tenants; name the tenants"),
        (["--guarantee", "a=60%", "--guarantee", "b=50%"], "in all, and L1 has 0.000244141; promise less, or give L1"),
        (["--guarantee", "a=50%", "--quota", "a=25%"], "tenant a is guaranteed 0.00012207 GB, more than its quota of"),
        (["--guarantee", "a=50%", "--quota", "*=25%"], "tenant a is guaranteed 0.00012207 GB, more than its quota of"),
    ],
)
def test_limits_that_make_no_sense_stop_the_start(lmcache, words: list[str], said: str) -> None:
    done = lmcache("server", "--port", "0", *SMALL, *words)
    assert done.returncode != 0
    assert done.stdout == ""
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["x" * 257, "x" * 10_000, "\x1b[31mred", "a\nb", "\0"])
def test_a_name_that_no_terminal_should_show_is_refused_and_the_engine_goes_on(start_engine, name: str) -> None:
    engine = start_engine("--quota", "*=50%")
    with pytest.raises(Refused, match="a tenant's name"):
        engine.store(tokens(1, 2), name)

    assert engine.store(tokens(1, 2), "x" * 256) == [Placed.GRANTED] * 2
    report = status(engine)
    assert [each["tenant"] for each in report["tenants"]] == ["x" * 256]
    assert report["gauges"]["reservations"] == 0


# --------------------------------------------------------------------------------------------------------------- hints


@pytest.mark.parametrize("ttl", [0.0, 5e-324, 30 * 86400.0, 1e18, 1e308])
def test_a_ttl_of_any_length_is_taken_and_the_server_goes_on(start_engine, ttl: float) -> None:
    engine = start_engine()
    assert engine.store(tokens(1, 2), hints=Hints(ttl_s=ttl)) == [Placed.GRANTED] * 2
    served = engine.hit(tokens(1, 2))
    assert served == (0 if ttl < 1 else 2)
    assert engine.store(tokens(2, 2)) == [Placed.GRANTED] * 2
    assert engine.hit(tokens(2, 2)) == 2


@pytest.mark.parametrize(
    "hints", [[-1.0, 0, False], [float("nan")], [float("inf")], ["1h"], [1.0, 7], [1.0, True], [1.0, 0, 1], {}, None, 5]
)
def test_hints_that_make_no_sense_end_that_connection_and_nobody_elses(start_engine, hints: object) -> None:
    engine = start_engine()
    with Control(ServerAddress("127.0.0.1", engine.port), PATIENCE_S) as control:
        liar = RawConnection(control.hello().socket)
    liar.register()
    body = msgspec.msgpack.encode(["Lookup", 7, "t", bytes(16), 5, hints])
    liar.socket.sendall(struct.pack("<I", len(body)) + body)
    reply = liar.receive()
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.MALFORMED
    assert liar.ended()
    liar.close()
    assert engine.store(tokens(1, 2)) == [Placed.GRANTED] * 2
    counters = status(engine)["counters"]
    assert (counters["messages_malformed"], counters["internal_errors"]) == (1, 0)


# --------------------------------------------------------------------------------------------- admission and retention


def test_second_use_stores_what_a_second_request_brings_and_counts_what_it_refused(start_engine, lmcache) -> None:
    engine = start_engine("--admission", "second-use")
    prompt = tokens(1, 3)
    assert engine.hit(prompt) == 0
    assert engine.store(prompt) == [Placed.REFUSED] * 3
    assert engine.store(prompt) == [Placed.REFUSED] * 3, "the same request, for another group, or offered once more"
    assert engine.hit(prompt) == 0  # a second request begins with its lookup
    assert engine.store(prompt) == [Placed.GRANTED] * 3
    assert engine.hit(prompt) == 3

    report = json.loads(lmcache("status", "--json", "--port", str(engine.port)).stdout)
    assert report["counters"]["chunks_refused"] == 6
    assert report["gauges"]["cells_used"] == 3


VOICES = """
    from lmcache.core.admission import AdmissionPolicy, RetentionPolicy
    from lmcache.core.hints import Hints, Priority
    from lmcache.core.hookspecs import hookimpl


    class FirstTwo(AdmissionPolicy):
        name = "first-two"

        def admit(self, offer):
            return min(len(offer.keys), max(0, 2 - offer.depth))


    class Angry(AdmissionPolicy):
        name = "angry"

        def admit(self, offer):
            raise RuntimeError("no")


    class Silly(AdmissionPolicy):
        name = "silly"

        def admit(self, offer):
            return "all of them"


    class Quick(RetentionPolicy):
        name = "quick"

        def advise(self, offer):
            return Hints(priority=Priority.LOW) if offer.tenant == "batch" else Hints()


    class Numbers(RetentionPolicy):
        name = "numbers"

        def advise(self, offer):
            return Hints(priority=1)


    class Words(RetentionPolicy):
        name = "words"

        def advise(self, offer):
            return Hints(ttl_s="an hour") if offer.tenant else Hints(priority="high")


    class Mute(RetentionPolicy):
        name = "mute"

        def advise(self, offer):
            return None


    @hookimpl
    def lmcache_register_admission_policies():
        return [FirstTwo, Angry, Silly]


    @hookimpl
    def lmcache_register_retention_policies():
        return [Quick, Mute, Numbers, Words]
"""


@pytest.fixture
def voices(tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "voices.py"
    path.write_text(textwrap.dedent(VOICES))
    return "--plugin", str(path)


def test_of_several_admissions_the_shortest_counts_and_those_that_fail_have_not_spoken(
    start_server, voices: tuple[str, str]
) -> None:
    names = [word for name in ("angry", "first-two", "silly") for word in ("--admission", name)]
    server = start_server(*SMALL, *voices, *names)
    engine = ScriptedEngine(server.port)
    assert engine.store(tokens(1, 4)) == [Placed.GRANTED] * 2 + [Placed.REFUSED] * 2
    assert engine.store(tokens(2, 4)) == [Placed.GRANTED] * 2 + [Placed.REFUSED] * 2
    assert status(engine)["counters"]["policy_errors"] == 4
    engine.close()
    code, _, log = server.end()
    assert code == 0
    assert log.count("the admission policy angry (") == log.count("the admission policy silly (") == 1
    assert re.search(r"the admission policy silly \(\S*voices\S*\.Silly\) answered 'all of them'; logged once", log)
    assert "first-two" not in log


def test_a_retention_policy_and_the_request_speak_together_and_the_strictest_counts(
    start_engine, voices: tuple[str, str]
) -> None:
    engine = start_engine(*voices, "--retention", "quick", "--retention", "mute")
    engine.store(tokens(1, 10), "batch", hints=Hints(priority=Priority.HIGH))
    engine.store(tokens(2, 10), "chat")
    engine.store(tokens(3, CELLS - 15), "chat")

    assert (engine.hit(tokens(1, 10)), engine.hit(tokens(2, 10))) == (5, 10)
    assert status(engine)["counters"]["policy_errors"] > 0


def test_hints_of_a_plugin_that_are_none_are_counted_and_change_nothing(start_server, voices: tuple[str, str]) -> None:
    server = start_server(*SMALL, *voices, "--retention", "numbers", "--retention", "words")
    engine = ScriptedEngine(server.port)
    for tenant in ("", "somebody"):
        assert engine.store(tokens(1, 4), tenant) in ([Placed.GRANTED] * 4, [Placed.PRESENT] * 4)
    assert engine.hit(tokens(1, 4)) == 4
    counters = status(engine)["counters"]
    assert (counters["policy_errors"], counters["internal_errors"]) == (6, 0)
    engine.close()
    code, _, log = server.end()
    assert code == 0
    assert log.count("the retention policy numbers (") == log.count("the retention policy words (") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--admission", "second-uze"], "known: second-use; did you mean 'second-use'?"),
        (["--retention", "nothing"], "no plugin offers the retention policy 'nothing'"),
    ],
)
def test_an_unknown_voice_stops_the_start(lmcache, words: list[str], said: str) -> None:
    done = lmcache("server", "--port", "0", *SMALL, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
