"""`lmcache pin` and `lmcache unpin`, against a real server that holds what a scripted engine has stored."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner
from core_stand import wait_until
from tenant_stand import CELLS, CHUNK, SMALL, ScriptedEngine, tokens

from lmcache.cli.pin import pin
from lmcache.core.hints import Hints
from lmcache.core.protocol import Placed

Done = subprocess.CompletedProcess[str]


@attrs.define
class Shop:
    """A server, an engine that has stored things there, and the commands that are typed at it."""

    engine: ScriptedEngine
    folder: Path
    run: Callable[..., Done]

    def file(self, content: object) -> str:
        path = self.folder / "tokens.json"
        path.write_text(json.dumps(content))
        return str(path)

    def pin(self, content: object, *options: str, ttl: str = "10m", env: dict[str, str] | None = None) -> Done:
        return self.ask("pin", "--tokens", self.file(content), "--ttl", ttl, *options, env=env)

    def ask(self, *words: str, env: dict[str, str] | None = None) -> Done:
        return self.run(*words, "--port", str(self.engine.port), env=env)

    def pins(self) -> list[dict[str, object]]:
        return json.loads(self.ask("pin", "--list", "--json").stdout)

    def flood(self) -> None:
        """Store twice as much as there is room for."""
        for seed in range(900, 900 + CELLS // 4):
            self.engine.store(tokens(seed, 8))


@pytest.fixture
def shop(lmcache, start_server, tmp_path: Path) -> Iterator[Shop]:
    engine = ScriptedEngine(start_server(*SMALL).port)
    yield Shop(engine, tmp_path, lmcache)
    engine.close()


def failed(done: Done) -> str:
    """What a command that failed has said, as one line."""
    assert (done.returncode, done.stdout) == (1, ""), done
    assert "Traceback" not in done.stderr
    return done.stderr.removesuffix("\n")


# ------------------------------------------------------------------------------------------------------- what it does


def test_a_pinned_prompt_stays_whatever_is_stored_and_one_that_is_not_goes(shop: Shop) -> None:
    kept, other = tokens(1, 5), tokens(2, 5)
    shop.engine.store(kept)
    shop.engine.store(other)
    done = shop.pin(kept)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"pin \d+: 80 of 83 tokens are kept for 10 m\n", done.stdout)

    shop.flood()
    assert (shop.engine.hit(kept), shop.engine.hit(other)) == (5, 0)


def test_after_unpin_it_goes_like_others(shop: Shop) -> None:
    kept = tokens(1, 5)
    shop.engine.store(kept)
    number = str(json.loads(shop.pin(kept, "--json").stdout)["pin"])

    done = shop.ask("unpin", number)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"pin {number} has ended\n", "")
    shop.flood()
    assert shop.engine.hit(kept) == 0


def test_a_pin_ends_by_itself(shop: Shop) -> None:
    kept = tokens(1, 5)
    shop.engine.store(kept)
    shop.pin(kept, ttl="0.5s")
    wait_until(lambda: shop.pins() == [])
    shop.flood()
    assert shop.engine.hit(kept) == 0


def test_a_pin_outlasts_the_ttl_that_the_request_gave(shop: Shop) -> None:
    kept, other = tokens(1, 5), tokens(2, 5)
    shop.engine.store(other, hints=Hints(ttl_s=2.0))
    shop.engine.store(kept, hints=Hints(ttl_s=2.0))
    # in this process: one that has to start first may come too late on a busy machine
    pinned = CliRunner().invoke(pin, ["--tokens", shop.file(kept), "--ttl", "10m", "--port", str(shop.engine.port)])
    assert pinned.exit_code == 0, pinned.output
    # not by a lookup: one that says nothing of a TTL would keep what it hits
    wait_until(lambda: json.loads(shop.ask("status", "--json").stdout)["counters"]["chunks_expired"] == 5)
    assert (shop.engine.hit(kept), shop.engine.hit(other)) == (5, 0)


def test_a_pin_may_last_for_months(shop: Shop) -> None:
    shop.engine.store(tokens(1, 2))
    assert shop.pin(tokens(1, 2), ttl="365d").stdout.endswith(" are kept for 365 d\n")
    # whoever waits for its end does not stumble over the time
    assert shop.engine.store(tokens(2, 2)) == [Placed.GRANTED] * 2
    assert shop.ask("pin", "--list").returncode == 0


def test_what_is_stored_so_far_is_pinned_and_no_more(shop: Shop) -> None:
    shop.engine.store(tokens(1, 3))
    assert json.loads(shop.pin(tokens(1, 9), "--json").stdout)["tokens"] == 3 * CHUNK


# -------------------------------------------------------------------------------------------------- where tokens are


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"tokens": t, "count": len(t), "max_model_len": 99}])
def test_tokens_are_a_list_or_what_an_engine_answers(shop: Shop, wrap: Callable[[list[int]], object]) -> None:
    shop.engine.store(tokens(1, 2))
    assert json.loads(shop.pin(wrap(tokens(1, 2)), "--json").stdout) == {
        "pin": shop.pins()[0]["pin"], "tokens": 2 * CHUNK, "of": 2 * CHUNK + 3,
    }  # fmt: skip


def test_tokens_come_from_standard_input(shop: Shop) -> None:
    shop.engine.store(tokens(1, 2))
    words = ["pin", "--tokens", "-", "--ttl", "90s", "--port", str(shop.engine.port)]
    done = subprocess.run(
        [sys.executable, "-m", "lmcache", *words],
        input=json.dumps(tokens(1, 2)), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert re.fullmatch(r"pin \d+: 32 of 35 tokens are kept for 1.5 m\n", done.stdout)


@pytest.mark.parametrize(
    "content", [{"token": [1]}, "text", [1, "2"], [1, -5], [1, True], [1, 1 << 32], [1.0], 7, None, [[1, 2]]]
)
def test_what_is_no_list_of_token_ids_is_said_to_be_none(content: object, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(content))
    done = CliRunner().invoke(pin, ["--tokens", str(file), "--ttl", "1h", "--port", "1"])
    assert done.exit_code == 1
    assert done.output == f"Error: --tokens {file} holds no list of token ids; write something like [1, 5, 9]\n"


def test_a_file_that_cannot_be_read_is_named(lmcache, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("[1, 2")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe[1]")
    for name in ("text", "bytes", "nothing"):
        said = failed(lmcache("pin", "--tokens", str(tmp_path / name), "--ttl", "1h", "--port", "1"))
        assert said.startswith(f"lmcache: --tokens {tmp_path / name} cannot be read: ")
        assert said.endswith("; give a file with a JSON list")


# -------------------------------------------------------------------------------------------------- whose prompt it is


def test_a_salt_is_given_by_the_environment_and_belongs_to_the_prompt(shop: Shop) -> None:
    shop.engine.store(tokens(1, 2), salt="a secret")
    without = shop.pin(tokens(1, 2))
    wrong = shop.pin(tokens(1, 2), "--salt-env", "MY_SALT", env={"MY_SALT": "another"})
    absent = shop.pin(tokens(1, 2), "--salt-env", "MY_SALT")
    right = shop.pin(tokens(1, 2), "--salt-env", "MY_SALT", env={"MY_SALT": "a secret"})

    nothing = "lmcache: nothing of these 35 tokens is stored; send the prompt to an engine first, with the same salt"
    assert failed(without) == failed(wrong) == nothing
    assert failed(absent) == "lmcache: --salt-env MY_SALT: there is no such variable; export it first"
    assert right.stdout.endswith(": 32 of 35 tokens are kept for 10 m\n")
    assert "a secret" not in right.stdout + right.stderr


def test_of_several_models_one_is_to_be_named(shop: Shop) -> None:
    other = ScriptedEngine(shop.engine.port, "org/other")
    other.store(tokens(1, 2))
    m, o = shop.engine.namespace, other.namespace
    # in the order of their coming
    known = f"{m} (m); {o} (org/other)"

    several = shop.pin(tokens(1, 2))
    unknown = shop.pin(tokens(1, 2), "--model", "org/othr")
    stranger = shop.pin(tokens(1, 2), "--namespace", "zz")
    assert failed(several) == f"lmcache: several namespaces are meant; name one with --model or --namespace: {known}"
    assert failed(unknown) == f"lmcache: no namespace is meant; name one with --model or --namespace: {known}"
    assert failed(stranger) == failed(unknown)
    assert "nothing of these 35 tokens is stored" in failed(shop.pin(tokens(1, 2), "--model", "m"))
    for option in (("--model", "org/other"), ("--namespace", o[:8])):
        assert shop.pin(tokens(1, 2), *option).returncode == 0
    assert {each["namespace"] for each in shop.pins()} == {o}
    other.close()


def test_without_any_engine_it_says_so(lmcache, start_server, tmp_path: Path) -> None:
    server = start_server(*SMALL)
    (tmp_path / "t").write_text("[1]")
    done = lmcache("pin", "--tokens", str(tmp_path / "t"), "--ttl", "1h", "--port", str(server.port))
    assert failed(done) == "lmcache: no engine has registered with this server; start one first"


# ---------------------------------------------------------------------------------------------------------- how much


def test_pins_hold_a_quarter_of_l1_at_most_and_say_what_helps(shop: Shop) -> None:
    quarter = CELLS // 4
    shop.engine.store(tokens(1, quarter))
    shop.engine.store(tokens(2, 1))
    first = json.loads(shop.pin(tokens(1, quarter), "--json").stdout)["pin"]
    assert shop.pin(tokens(1, 4)).returncode == 0, "what is held already takes no more room"

    assert failed(shop.pin(tokens(2, 1))) == (
        f"lmcache: with this prefix of 1 chunks, pins would hold {quarter + 1} cells; {quarter} are allowed, a quarter "
        "of L1; unpin others (lmcache pin --list), pin a shorter prefix, or give L1 more memory"
    )
    assert shop.ask("unpin", str(first)).returncode == 0
    assert shop.pin(tokens(2, 1)).returncode == 0


def test_stores_go_on_beside_pins_and_what_cannot_be_placed_is_not_waited_for(shop: Shop) -> None:
    quarter = CELLS // 4
    shop.engine.store(tokens(1, quarter))
    shop.pin(tokens(1, quarter))
    assert len(shop.engine.store(tokens(2, 100))) == CELLS - quarter
    assert (shop.engine.hit(tokens(1, quarter)), shop.engine.hit(tokens(2, 100))) == (quarter, CELLS // 2)


# ------------------------------------------------------------------------------------------------------------- listing


def test_the_list_and_status_name_every_pin(shop: Shop) -> None:
    assert shop.ask("pin", "--list").stdout == "no pins\n"
    assert shop.ask("pin", "--list", "--json").stdout == "[]\n"
    shop.engine.store(tokens(1, 3))
    shop.engine.store(tokens(2, 2))
    for seed, chunks, ttl in ((1, 3, "2h"), (2, 2, "7d")):
        shop.pin(tokens(seed, chunks), ttl=ttl)

    space = shop.engine.namespace
    lines = shop.ask("pin", "--list").stdout.splitlines()
    assert re.fullmatch(rf"pin \d+: 48 tokens in {space}, ends in 2 h", lines[0])
    assert re.fullmatch(rf"pin \d+: 32 tokens in {space}, ends in 7 d", lines[1])
    report = json.loads(shop.ask("status", "--json").stdout)
    assert [each["tokens"] for each in report["prefix_pins"]] == [48, 32]
    assert (report["gauges"]["prefix_pins"], report["gauges"]["prefix_pin_cells"]) == (2, 5)
    table = shop.ask("status").stdout
    assert re.search(rf"(?m)^pin +tokens +ends in +namespace\n\d+ +48 +2 h +{space}\n\d+ +32 +7 d +{space}$", table)


# ------------------------------------------------------------------------------------------------------- wrong words


@pytest.mark.parametrize(
    "ttl", ["0s", "-1s", "1", "10", "h", "nan s", "nans", "infd", "1w", "", "1e400s", "9" * 400 + "d"]
)
def test_a_ttl_that_is_none_is_refused_with_what_to_write(ttl: str) -> None:
    done = CliRunner().invoke(pin, ["--tokens", "x", "--ttl", ttl])
    assert done.exit_code == 2
    assert f"{ttl!r} is not a span of time; write something like 90s, 10m, 2h or 7d\n" in done.output


def test_a_pin_of_more_than_a_year_is_refused_by_the_server(shop: Shop) -> None:
    shop.engine.store(tokens(1, 1))
    assert "at most 31622400 s (a year)" in failed(shop.pin(tokens(1, 1), ttl="367d"))


@pytest.mark.parametrize("words", [[], ["--ttl", "1h"], ["--tokens", "x"]])
def test_a_pin_without_tokens_or_an_end_is_no_pin(words: list[str]) -> None:
    done = CliRunner().invoke(pin, words)
    assert done.exit_code == 2
    assert "a pin needs --tokens FILE and --ttl TIME; --list shows those that there are\n" in done.output


def test_a_pin_that_is_not_there_cannot_end(shop: Shop) -> None:
    assert failed(shop.ask("unpin", "4711")) == (
        "lmcache: there is no pin 4711, or it has ended; see lmcache pin --list"
    )
    assert shop.ask("unpin", "zero").stderr.splitlines()[-1].endswith("see `lmcache pin --list`")
    assert shop.ask("unpin").returncode == 2


def test_nobody_listens_and_that_is_said(lmcache, tmp_path: Path) -> None:
    (tmp_path / "t").write_text("[1]")
    done = lmcache("pin", "--tokens", str(tmp_path / "t"), "--ttl", "1h", "--port", "1")
    assert failed(done).startswith("lmcache: no lmcache server at 127.0.0.1:1: ")
