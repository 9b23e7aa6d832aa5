"""Whole requests on a server whose tier is bad: each answer is the cold one, and the counters say what happened.

A prompt is stored in the tier by one server. Another one, whose L1 is empty, has the tier go bad under it, and is asked
for that prompt, for one that nobody knows, and for both once more, which L1 has by then. Then the tier is good again.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import bad_tiers
import pytest
from bad_tiers import BadTier, opened
from core_stand import PATIENCE_S, wait_until
from redis_stand import needs_redis
from reference_stand import RunningServer, assert_same, prompt, start

from lmcache.core.control import Control, ServerAddress
from lmcache.engines.reference.engine import Engine
from lmcache.engines.reference.requests import Output
from lmcache.engines.reference.shapes import GEOMETRIES

CHUNK = 64
BLOBS = 4
TOKENS = BLOBS * CHUNK + 1
OLD, NEW, LATER = 1, 2, 3
SOME = -1
"""In the table below: one or more."""
ANY = -2
"""In the table below: none or more."""
COUNTED = ("searches", "stored", "loaded", "absent", "damaged", "foreign", "lost", "errors", "timeouts")
HELD = ("tickets", "reservations", "cells_reserved", "pinned_nodes")


@attrs.frozen
class Fault:
    """A way in which a tier is bad."""

    kind: type[BadTier]
    counts: Mapping[str, int]
    """What the tier's counters say while it is bad, after the prompt that it has and the one that nobody knows; those
    that are not named say 0."""
    mood: str | int = "good"
    """Of an object store."""
    serves: int = 0
    """Blobs of the old prompt that it serves all the same."""
    lasts: bool = True
    """Whether it has the old prompt when it is good again, from before or since."""
    options: Mapping[str, str] = {}
    marks: tuple[pytest.MarkDecorator, ...] = ()

    def __str__(self) -> str:
        mood = "" if self.mood == "good" else f" {self.mood}"
        return f"{self.kind.__name__}{mood}"


QUICK = {"timeout_s": "0.5"}
"""For tiers that do not answer. A busy machine may be so late that a call counts as one that hangs, as well."""
RECOMPUTED = {"searches": 2, "stored": 2 * BLOBS}

FAULTS = [
    Fault(bad_tiers.FlippedFiles, {**RECOMPUTED, "damaged": BLOBS}),
    Fault(bad_tiers.FlippedHeaders, {**RECOMPUTED, "damaged": BLOBS}),
    Fault(bad_tiers.TruncatedFiles, {**RECOMPUTED, "damaged": BLOBS}),
    Fault(bad_tiers.EmptyFiles, {**RECOMPUTED, "absent": BLOBS}),
    Fault(bad_tiers.RenamedFiles, {**RECOMPUTED, "damaged": BLOBS}),
    Fault(bad_tiers.ForeignFiles, {**RECOMPUTED, "damaged": BLOBS}),
    Fault(bad_tiers.UnlinkedFiles, {**RECOMPUTED, "absent": BLOBS}),
    Fault(bad_tiers.FullFileSystem, {"searches": 2, "loaded": BLOBS, "stored": BLOBS}, serves=BLOBS, lasts=False),
    Fault(
        bad_tiers.ReadOnlyFileSystem,
        {"searches": 2, "loaded": BLOBS, "lost": SOME, "errors": SOME},
        serves=BLOBS,
    ),
    Fault(
        bad_tiers.FrozenFileSystem,
        {"searches": 2, "loaded": BLOBS, "timeouts": SOME},
        serves=BLOBS,
        options={"timeout_s": "2"},
    ),
    *(
        attrs.evolve(fault, marks=(needs_redis,))
        for fault in (
            Fault(bad_tiers.KilledRedis, {"searches": SOME, "errors": SOME, "lost": SOME}, lasts=False),
            Fault(
                bad_tiers.PausedRedis,
                {"searches": SOME, "errors": SOME, "lost": SOME, "timeouts": ANY},
                options=QUICK,
            ),
            Fault(bad_tiers.RestartedRedis, RECOMPUTED),
            Fault(bad_tiers.FlushedRedis, RECOMPUTED),
            Fault(bad_tiers.ForeignRedis, {**RECOMPUTED, "foreign": BLOBS}),
            Fault(bad_tiers.OtherTypesInRedis, RECOMPUTED),
            Fault(bad_tiers.FullRedis, {"searches": 2, "loaded": BLOBS, "errors": SOME, "lost": SOME}, serves=BLOBS),
        )
    ),
    *(
        Fault(bad_tiers.ObjectStore, {"searches": SOME, "errors": SOME, "lost": SOME}, status)
        for status in (400, 403, 500)
    ),
    Fault(
        bad_tiers.ObjectStore,
        {"searches": SOME, "errors": SOME, "lost": SOME, "timeouts": ANY},
        "never",
        options=QUICK,
    ),
    # these two take what they are given, once they are not left alone any more
    Fault(
        bad_tiers.ObjectStore,
        {"searches": SOME, "errors": SOME, "stored": ANY, "lost": ANY, "timeouts": ANY},
        "slow",
        options=QUICK,
    ),
    Fault(bad_tiers.ObjectStore, {"searches": SOME, "errors": SOME, "stored": ANY, "lost": ANY}, "short"),
    Fault(bad_tiers.ObjectStore, {**RECOMPUTED, "foreign": BLOBS}, "other"),
]


class Site:
    """A server at a time over one tier, and an engine beside it. Knows every prompt's cold answer."""

    def __init__(self, tier: BadTier) -> None:
        self.tier = tier
        self.server: RunningServer | None = None
        self._alone = Engine(GEOMETRIES["llama"])
        self._cold: dict[int, Output] = {}

    def serve(self, *flags: str, **options: str) -> Engine:
        """Put a new server in place of the last one, which is killed; returns an engine of its."""
        self.close()
        self.server = start("--chunk-size", str(CHUNK), "--l2", self.tier.url(**options), *flags)
        # the engine's own deadline is not what is tried: a busy machine must not come near it
        return Engine(GEOMETRIES["llama"], server=self.server.address, deadline=20.0)

    def ask(self, engine: Engine, seed: int) -> int:
        """Have a prompt answered, which must be the cold answer; returns how many of its blobs were hit."""
        engine.drop_prefix_cache()
        [answer] = engine.generate([prompt(TOKENS, seed)])
        assert_same(self.cold(seed), answer)
        assert answer.load_failures == 0
        return answer.hit_tokens // CHUNK

    def cold(self, seed: int) -> Output:
        """What an engine without a server answers."""
        if seed not in self._cold:
            [self._cold[seed]] = self._alone.generate([prompt(TOKENS, seed)])
        return self._cold[seed]

    def status(self) -> dict[str, Any]:
        assert self.server
        with Control(ServerAddress.parse(self.server.address), PATIENCE_S) as control:
            return control.status()

    def counters(self) -> dict[str, float]:
        """The tier's."""
        [tier] = self.status()["tiers"]
        counters: dict[str, float] = tier["counters"]
        return counters

    def settle(self) -> None:
        assert self.server
        self.server.wait_idle()

    def close(self) -> None:
        """Kill the server."""
        if self.server:
            self.server.kill()
        self.server = None


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    fault: Fault = request.param
    with opened(fault.kind, tmp_path, fault.mood) as tier, contextlib.closing(Site(tier)) as site:
        yield site


@pytest.mark.parametrize(
    ("site", "fault"),
    [pytest.param(fault, fault, id=str(fault), marks=fault.marks) for fault in FAULTS],
    indirect=["site"],
)
def test_a_bad_tier_costs_misses_and_says_which(site: Site, fault: Fault) -> None:
    with site.serve(timeout_s="60") as engine:
        assert site.ask(engine, OLD) == 0
        site.settle()
        assert site.counters()["stored"] == BLOBS

    with site.serve(**fault.options) as engine:
        site.tier.harm()
        assert [site.ask(engine, seed) for seed in (OLD, NEW)] == [fault.serves, 0]
        searches = site.counters()["searches"]
        assert [site.ask(engine, seed) for seed in (OLD, NEW)] == [BLOBS, BLOBS], "not from L1"
        assert site.counters()["searches"] == searches, "the tier was asked for what L1 has"
        with contextlib.suppress(AssertionError):  # the comparison below says more
            wait_until(lambda: says(site.counters(), fault.counts), str(fault))
        assert said(site.counters(), fault.counts) == {**dict.fromkeys(COUNTED, 0), **fault.counts}
        gauges = site.status()["gauges"]
        assert {name: gauges[name] for name in HELD} == dict.fromkeys(HELD, 0)

        site.tier.heal()
        newest = stored_again(site, engine)
        assert site.status()["gauges"]["tier_calls"] == 0

    with site.serve(timeout_s="60") as engine:
        assert site.ask(engine, newest) == BLOBS
        assert site.ask(engine, OLD) == (BLOBS if fault.lasts else 0)
        assert site.counters()["loaded"] == (2 if fault.lasts else 1) * BLOBS


def says(counters: Mapping[str, float], expected: Mapping[str, int]) -> bool:
    """Whether the tier's counters of blobs and calls are these, and the others 0."""
    return said(counters, expected) == {**dict.fromkeys(COUNTED, 0), **expected}


def said(counters: Mapping[str, float], expected: Mapping[str, int]) -> dict[str, float]:
    """What the tier's counters say, SOME or ANY in place of a number where no more is expected."""
    kinds = {SOME: 1, ANY: 0}
    return {
        name: expected[name] if counters[name] >= kinds.get(expected.get(name, 0), math.inf) else counters[name]
        for name in COUNTED
    }


def stored_again(site: Site, engine: Engine) -> int:
    """Ask for new prompts until the tier, which is good again and may still be left alone, has taken a whole one."""
    for seed in itertools.count(LATER):
        lost = site.counters()["lost"]
        assert site.ask(engine, seed) == 0
        site.settle()
        if site.counters()["lost"] == lost:
            return seed
    raise AssertionError("never reached")


def test_while_a_lookup_waits_for_a_tier_that_never_answers_l1_serves_and_the_answer_comes_in_the_end(
    tmp_path: Path,
) -> None:
    with opened(bad_tiers.ObjectStore, tmp_path, "never") as tier, contextlib.closing(Site(tier)) as site:
        patient = {"timeout_s": "3600", "retries": "0"}
        with site.serve("--l2-deadline-s", "3600", **patient) as engine:
            site.ask(engine, OLD)
            site.settle()
            tier.harm()
            engine.drop_prefix_cache()
            waiting = engine.add(prompt(TOKENS, NEW))
            assert [site.ask(engine, OLD) for _ in range(20)] == [BLOBS] * 20
            with pytest.raises(KeyError):
                engine.take(waiting)
            assert site.status()["gauges"]["tier_calls"] == 1

            tier.heal()
            while engine.busy:
                engine.step()
            assert_same(site.cold(NEW), engine.take(waiting))


def test_a_lookup_is_answered_at_its_deadline_while_the_tier_still_hangs(tmp_path: Path) -> None:
    with (
        opened(bad_tiers.ObjectStore, tmp_path, "never") as tier,
        contextlib.closing(Site(tier)) as site,
        site.serve("--l2-deadline-s", "0.3", timeout_s="3600", retries="0") as engine,
    ):
        tier.harm()
        assert site.ask(engine, NEW) == 0
        status = site.status()
        assert status["gauges"]["tier_calls"] > 0
        assert status["tiers"][0]["counters"]["errors"] == status["tiers"][0]["counters"]["timeouts"] == 0
        assert {name: status["gauges"][name] for name in HELD} == dict.fromkeys(HELD, 0)


def test_a_disk_at_its_limit_keeps_to_it_and_serves_what_it_has(tmp_path: Path) -> None:
    blobs = 10
    folder = tmp_path / "blobs"
    folder.mkdir()
    limit = blobs * 132 << 10  # 128 KiB each, and a header
    tier = bad_tiers.Folder(folder, str(limit / 2**30))
    with contextlib.closing(Site(tier)) as site:
        with site.serve(threads="1") as engine:
            for seed in range(OLD, OLD + 6):
                assert site.ask(engine, seed) == 0
                site.settle()
                assert tier.taken() <= limit
            [report] = site.status()["tiers"]
            assert (report["counters"]["stored"], report["evicted"], report["blobs"]) == (
                6 * BLOBS,
                6 * BLOBS - blobs,
                blobs,
            )
            assert (report["counters"]["lost"], report["counters"]["errors"]) == (0, 0)

        with site.serve() as engine:
            # of an older prompt it is the beginning that is still there
            assert [site.ask(engine, OLD + number) for number in (5, 4, 3)] == [BLOBS, BLOBS, blobs - 2 * BLOBS]
            assert tier.taken() <= limit
