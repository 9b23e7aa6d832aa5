"""Tiers behind a real server: what comes back after it was killed, evicted, damaged; what a tier that fails costs."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_stand import CELL, CHUNK, GEOMETRY, PATIENCE_S, ServerProcess, prompt, wait_until
from tier_stand import TinyEngine, joined

from lmcache.core.control import Control
from lmcache.core.hints import Hints
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

BLOB = 4096 + CELL
"""Bytes of one chunk of `GEOMETRY` in a tier."""

HYBRID = Geometry(
    (
        KVGroup(GroupKind.FULL, CHUNK, (CELL, 100), shards=2),
        KVGroup(GroupKind.SLIDING_WINDOW, CHUNK // 2, (1000, 1000), window=CHUNK + 3, shards=1),
        KVGroup(GroupKind.SCRATCH, 0, ()),
    ),
    ranks=2,
)
"""Two ranks with bytes of their own in one group and the same bytes in another."""


class Site:
    """A server over a folder, and an engine; the server may be killed and started again."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        geometry: Geometry = GEOMETRY,
        store: str = "write-through",
        size_gb: float = 1,
    ) -> None:
        self.folder = folder
        self._options = ("--l2", f"disk://{folder}?size_gb={size_gb:.15f}&store={store}", *options)
        self.server = ServerProcess(0, *self._options)
        self.engine = TinyEngine(self.server.address, geometry)

    def restart(self) -> None:
        self.server.kill()
        port = self.server.port
        self.server.close()
        self.server = ServerProcess(port, *self._options)
        epoch = self.server.epoch
        wait_until(lambda: self.engine.link().epoch == epoch)
        for rank in range(self.engine.geometry.ranks):
            wait_until(lambda rank=rank: self._epoch_of(rank) == epoch)

    def _epoch_of(self, rank: int) -> str:
        try:
            return self.engine.worker(rank).epoch
        except ConnectionError:
            return ""

    def settle(self) -> None:
        with Control(self.server.address, PATIENCE_S) as control:
            control.wait_idle()

    def tier(self) -> dict[str, Any]:
        [tier] = self.server.status()["tiers"]
        return tier

    def close(self) -> None:
        self.engine.close()
        self.server.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tier"
    path.mkdir()
    return path


@pytest.fixture
def site(folder: Path) -> Iterator[Site]:
    site = Site(folder)
    yield site
    site.close()


def test_what_was_stored_is_hit_after_the_server_was_killed(site: Site) -> None:
    hashes = prompt(1, 20)
    assert site.engine.store(hashes) == 20
    site.settle()
    assert (site.tier()["counters"]["stored"], site.tier()["blobs"]) == (20, 20)

    site.restart()
    assert site.server.status()["gauges"]["nodes"] == 0
    assert site.engine.hit(hashes) == 20
    counters = site.tier()["counters"]
    assert (counters["loaded"], counters["stored"], counters["damaged"]) == (20, 0, 0)
    assert site.engine.hit(hashes) == 20  # from L1, now
    assert site.tier()["counters"]["searches"] == 1


def test_status_shows_each_tier_and_whether_it_works(site: Site) -> None:
    site.engine.store(prompt(1, 3))
    site.settle()
    command = [sys.executable, "-m", "lmcache", "status", "--port", str(site.server.port)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("disk://")]
    assert row == [f"disk://{site.folder}", "yes", "24.0", "KiB", "3", "0", "0", "0", "0", "0"]


def test_every_group_and_rank_of_a_hybrid_comes_back(folder: Path) -> None:
    site = Site(folder, geometry=HYBRID)
    try:
        hashes = prompt(1, 6)
        site.engine.store(hashes)
        site.settle()
        site.restart()

        assert site.engine.hit(hashes) == 6
        # a window needs the last two chunks only: two shards of six chunks, and one of two
        assert site.tier()["counters"]["loaded"] == 2 * 6 + 2
        assert site.engine.hit(hashes[:3]) == 3
        assert site.tier()["counters"]["loaded"] == 2 * 6 + 2 + 2
    finally:
        site.close()


def test_a_full_tier_keeps_the_beginning_that_prompts_share_while_any_of_them_is_stored(folder: Path) -> None:
    site = Site(folder, size_gb=30 * BLOB / 2**30)
    try:
        shared = prompt(1, 10)
        for number in range(8):  # ten chunks each, of which the tier holds three times as many
            site.engine.store([*shared, *prompt(10 + number, 10)])
            site.settle()
        assert site.tier()["evicted"] > 40
        site.restart()
        # whoever comes with the beginning, and the last prompt as a whole
        assert site.engine.hit(shared) == 10
        assert site.engine.hit([*shared, *prompt(17, 10)]) == 20
        assert site.engine.hit([*shared, *prompt(10, 10)]) == 10
    finally:
        site.close()


def test_a_tier_keeps_what_lies_in_l1_as_long_as_what_it_is_read_for(folder: Path) -> None:
    site = Site(folder, size_gb=24 * BLOB / 2**30)
    try:
        whole, other = prompt(1, 12), prompt(2, 12)
        for hashes in (whole, other):
            site.engine.store(hashes)
            site.settle()
        site.restart()
        assert site.engine.hit(whole[:6]) == 6
        assert site.engine.hit(other) == 12
        assert site.engine.hit(whole) == 12  # six of them from L1
        site.settle()
        site.engine.store(prompt(3, 12))
        site.settle()
        site.restart()
        assert site.engine.hit(whole) == 12
        assert site.engine.hit(other) == 0
    finally:
        site.close()


def test_a_hit_is_put_together_from_l1_and_the_tier(site: Site) -> None:
    hashes = prompt(1, 12)
    site.engine.store(hashes)
    site.settle()
    site.restart()
    assert site.engine.hit(hashes[:5]) == 5

    assert site.engine.hit(hashes) == 12
    assert site.tier()["counters"]["loaded"] == 12


def test_prompts_that_fill_l1_many_times_over_all_come_back(folder: Path) -> None:
    site = Site(folder, "--l1-size-gb", str(64 * CELL / (1 << 30)))
    try:
        prompts = [prompt(number, 20) for number in range(12)]
        for hashes in prompts:
            assert site.engine.store(hashes) == 20
            site.settle()  # what is evicted before it was written is lost
        assert site.tier()["counters"]["stored"] == 12 * 20

        for _ in range(2):
            for hashes in prompts:
                assert site.engine.hit(hashes) == 20
        gauges = site.server.status()["gauges"]
        assert (gauges["tickets"], gauges["reservations"], gauges["pinned_nodes"]) == (0, 0, 0)
        assert site.tier()["counters"]["stored"] == 12 * 20, "what came from the tier was written to it again"
    finally:
        site.close()


def test_a_tier_that_is_written_on_eviction_gets_what_leaves_l1_before_it_leaves(folder: Path) -> None:
    site = Site(folder, "--l1-size-gb", str(100 * CELL / (1 << 30)), store="on-evict")
    try:
        site.engine.store(prompt(0, 50))
        site.settle()
        assert site.tier()["counters"]["stored"] == 0
        for number in range(1, 10):
            # placed as far as there is room for it at once: free, or evictable because the tier has it
            wait_until(lambda number=number: site.engine.store(prompt(number, 50)) == 50)
        site.settle()
        assert site.server.status()["counters"]["chunks_evicted"] >= 8 * 50
        assert site.tier()["counters"]["stored"] >= 8 * 50

        assert [site.engine.hit(prompt(number, 50)) for number in range(10)] == [50] * 10
    finally:
        site.close()


def test_l1_with_too_little_room_for_a_hit_gives_a_shorter_one(folder: Path) -> None:
    large = Site(folder)
    hashes = prompt(1, 40)
    large.engine.store(hashes)
    large.settle()
    large.close()

    small = Site(folder, "--l1-size-gb", str(32 * CELL / (1 << 30)))
    try:
        assert small.engine.hit(hashes) == 16  # half of L1 is the most that one engine may hold
        assert small.server.status()["gauges"]["reservations"] == 0
    finally:
        small.close()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "another's", "gone"])
def test_a_blob_that_is_damaged_ends_the_hit_before_it_and_is_stored_again(
    site: Site, folder: Path, damage: str
) -> None:
    hashes = prompt(1, 10)
    site.engine.store(hashes)
    site.settle()
    files = {path.name: path for path in folder.rglob("*") if len(path.name) == 40}
    assert len(files) == 10
    site.restart()
    victim = files[site_key(site, hashes[6])]
    other = files[site_key(site, hashes[2])].read_bytes()
    whole = victim.read_bytes()
    match damage:
        case "flipped":
            victim.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
        case "truncated":
            victim.write_bytes(whole[:-1])
        case "another's":
            victim.write_bytes(other)
        case "gone":
            victim.unlink()

    assert site.engine.hit(hashes) == 6
    counters = site.tier()["counters"]
    assert (counters["damaged"], counters["absent"]) == ((0, 1) if damage == "gone" else (1, 0))
    site.engine.store(hashes)
    site.settle()
    assert victim.read_bytes() == whole
    site.restart()
    assert site.engine.hit(hashes) == 10


def site_key(site: Site, chain_hash: bytes) -> str:
    """The name of the file in which the folder keeps a chunk: its header names the chunk's hash."""
    for path in site.folder.rglob("*"):
        if len(path.name) == 40 and path.read_bytes()[52:68] == chain_hash:
            return path.name
    raise AssertionError(f"no file holds {chain_hash!r}")


def test_chunks_that_expire_are_never_written_to_a_tier(site: Site) -> None:
    site.engine.store(prompt(1, 4), hints=Hints(ttl_s=300.0))
    site.engine.store(prompt(2, 4))
    site.settle()

    assert site.tier()["counters"]["stored"] == 4
    site.restart()
    assert (site.engine.hit(prompt(1, 4)), site.engine.hit(prompt(2, 4))) == (0, 4)


def test_two_lookups_at_once_fetch_what_both_need_once(site: Site) -> None:
    hashes = prompt(1, 30)
    site.engine.store(hashes)
    site.settle()
    site.restart()
    link = site.engine.link()
    pending = [link.lookup("", joined(hashes), 30 * CHUNK) for _ in range(4)]
    found = [each.wait() for each in pending]

    assert [each.tokens for each in found] == [30 * CHUNK] * 4
    assert site.tier()["counters"]["loaded"] == 30
    for each in found:
        link.drop(each.ticket)


def test_an_engine_that_dies_while_it_is_looked_for_its_prompt_leaves_nothing_behind(site: Site) -> None:
    hashes = prompt(1, 30)
    site.engine.store(hashes)
    site.settle()
    site.restart()
    site.engine.link().lookup("", joined(hashes), 30 * CHUNK)
    site.engine.close()

    def nothing_held() -> bool:
        status = site.server.status()
        gauges = status["gauges"]
        return gauges["tier_calls"] == gauges["reservations"] == gauges["tickets"] == gauges["clients"] == 0

    wait_until(nothing_held)
    site.engine = TinyEngine(site.server.address, GEOMETRY)
    assert site.engine.hit(hashes) == 30


SLOW_TIER = """
import time
from lmcache.core.hookspecs import hookimpl
from lmcache.core.tier import StorageTier

class Slow(StorageTier):
    scheme = "slow"
    options = {"how": "what it does to calls"}

    def __init__(self, location):
        self.how = location.options["how"]

    def call(self):
        if self.how == "hangs":
            time.sleep(1e9)
        raise OSError(5, "the device is on fire")

    def store(self, key, parts, deadline):
        self.call()

    def load(self, key, into, deadline):
        return self.call()

    def contains(self, keys, deadline):
        return self.call()

    def delete(self, keys, deadline):
        self.call()

    def keys(self):
        return iter(())

@hookimpl
def lmcache_register_storage_tiers():
    return [Slow]
"""


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_tier_that_hangs_or_fails_costs_misses_only_and_is_left_alone(tmp_path: Path, how: str) -> None:
    plugin = tmp_path / "slow.py"
    plugin.write_text(SLOW_TIER)
    server = ServerProcess(
        *(0, "--plugin", str(plugin), "--l2", f"slow:///?how={how}&timeout_s=0.2&threads=2", "--l2-deadline-s", "1")
    )
    engine = TinyEngine(server.address, GEOMETRY)
    try:
        assert engine.store(prompt(1, 5)) == 5
        assert engine.hit(prompt(1, 5)) == 5
        for number in range(2, 8):
            assert engine.hit(prompt(number, 5)) == 0
        [tier] = wait_until(lambda: [t for t in server.status()["tiers"] if not t["usable"]])
        assert tier["counters"]["timeouts" if how == "hangs" else "errors"] >= 1
        assert engine.hit(prompt(9, 5)) == 0
        assert engine.hit(prompt(1, 5)) == 5
        assert server.status()["gauges"]["reservations"] == 0
    finally:
        engine.close()
        server.signal(signal.SIGTERM)
        assert server.process.wait(30) == 0, "a tier that hangs kept the server from ending"
        server.close()


def test_what_waits_to_be_written_when_the_server_is_told_to_stop_is_written(site: Site) -> None:
    site.engine.store(prompt(1, 50))
    site.server.signal(signal.SIGTERM)
    assert site.server.process.wait(30) == 0
    site.restart()

    assert site.engine.hit(prompt(1, 50)) == 50


def test_what_is_computed_sooner_than_read_is_left_in_the_tier(site: Site) -> None:
    warm, hashes = prompt(1, 20), prompt(2, 20)
    for each in (warm, hashes):
        site.engine.store(each)
    site.settle()
    site.restart()
    link = site.engine.link()

    def tokens(prefill_speed: float) -> int:
        found = link.lookup("", joined(hashes), 20 * CHUNK, prefill_speed=prefill_speed).wait()
        if found.ticket:
            link.drop(found.ticket)
        return found.tokens

    # nobody has read from the tier yet: how fast it is has to be found out
    assert site.engine.hit(warm) == 20
    assert tokens(1e15) == 0
    assert site.server.status()["counters"]["promotions_declined"] == 1
    assert tokens(1e-3) == 20 * CHUNK


def test_a_lookup_that_was_asked_for_again_is_recorded_with_what_it_hit(folder: Path, tmp_path: Path) -> None:
    record = tmp_path / "recording.jsonl"
    site = Site(folder, "--record", str(record))
    try:
        site.engine.store(prompt(1, 5))
        site.settle()
        site.restart()
        assert site.engine.hit(prompt(1, 5)) == 5
        site.server.signal(signal.SIGTERM)
        assert site.server.process.wait(30) == 0
    finally:
        site.close()
    events = [json.loads(line) for line in record.read_text().splitlines()]

    assert [each["hit_length"] for each in events if each["event"] == "lookup"] == [5 * CHUNK]
