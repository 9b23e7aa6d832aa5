"""Recording: what is written and what never is, that it is bounded and private, and that no disk hurts a request."""

import json
import logging
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_stand import CELL, CHUNK, FACTS, GEOMETRY, SETTINGS, RunningServer, prompt, wait_until

from lmcache.core.client import Client, Engine
from lmcache.core.index import Namespace
from lmcache.core.keys import ChainHasher, NamespaceDigest, chain_root, tenant_of
from lmcache.core.link import Link
from lmcache.core.protocol import Found, Lookup, Reserve, Reserved, Role
from lmcache.core.recording import PAUSE_SECONDS, Recorder, hash_ids, recording
from lmcache.errors import ConfigError

ABOUT = {"policy": "LRU", "cells": 64, "cell_bytes": CELL}
SPACE = Namespace(NamespaceDigest(b"n" * 16), dict(FACTS), GEOMETRY, CHUNK, CELL)
HASHES = b"".join(prompt(1, 3))


def lookup(hashes: bytes = HASHES, hit: int = 0) -> tuple[Namespace, Lookup, Found]:
    return SPACE, Lookup(1, "ann", hashes, 3 * CHUNK), Found(1, 0, hit)


def store(group: int = 0, shard: int = 0, parent: bytes = b"", hashes: bytes = HASHES) -> Any:
    return SPACE, Reserve(2, "ann", parent, hashes, group, shard), Reserved(2, 1, b"", b"", 0)


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recording.jsonl"


@pytest.fixture
def record(path: Path) -> Iterator[Callable[..., Recorder]]:
    """Make recorders; they are closed at the end."""
    made: list[Recorder] = []

    def make(limit: int = 1 << 20) -> Recorder:
        made.append(Recorder(str(path), limit, ABOUT))
        return made[-1]

    yield make
    for recorder in made:
        recorder.close()


# ------------------------------------------------------------------------------------------------------ what is written


def test_lookups_and_stores_are_written_with_what_is_needed_to_read_them(path) -> None:
    with recording(str(path), 1 << 20, ABOUT) as recorder:
        assert recorder
        recorder.observe(*lookup(hit=2 * CHUNK))
        recorder.observe(*store(parent=HASHES[:16], hashes=HASHES[16:]))

    begun, space, looked_up, stored = events(path)
    ids = hash_ids(HASHES)
    assert (begun["event"], begun["format"], begun["part"], begun["policy"]) == ("recording", 1, 1, "LRU")
    assert (space["event"], space["namespace"], space["digest"]) == ("namespace", 0, (b"n" * 16).hex())
    assert (space["model"], space["chunk_size"]) == ("m", CHUNK)
    assert abs(looked_up.pop("timestamp") - stored.pop("timestamp")) < 60_000
    assert looked_up == {
        "event": "lookup",
        "input_length": 3 * CHUNK + 1,
        "output_length": 0,
        "hash_ids": ids,
        "namespace": 0,
        "tenant": "ann",
        "hit_length": 2 * CHUNK,
    }
    assert stored == {
        "event": "store",
        "input_length": 0,
        "output_length": 0,
        "hash_ids": ids[1:],
        "namespace": 0,
        "tenant": "ann",
        "parent": ids[0],
        "groups": [0],
    }


def test_what_a_worker_offers_of_several_groups_is_one_line_and_other_shards_are_none(path) -> None:
    with recording(str(path), 1 << 20, ABOUT) as recorder:
        assert recorder
        for group in (0, 2):
            recorder.observe(*store(group))
            recorder.observe(*store(group, shard=1))
        recorder.observe(*lookup())
        recorder.observe(*store(0))

    assert [(event["event"], event.get("groups")) for event in events(path)[2:]] == [
        ("store", [0, 2]),
        ("lookup", None),
        ("store", [0]),
    ]


def test_neither_tokens_nor_salts_nor_whole_hashes_are_written(path) -> None:
    tokens = [123456, 234567, 345678, 456789] * CHUNK
    hashes = ChainHasher(chain_root({"salt": "open sesame"}), CHUNK).extend_to(tokens)
    with recording(str(path), 1 << 20, ABOUT) as recorder:
        assert recorder
        recorder.observe(SPACE, Lookup(1, tenant_of("open sesame"), hashes, 99), Found(1, 0, 0))

    text = path.read_text()
    assert tenant_of("open sesame") in text
    assert str(hash_ids(hashes)[0]) in text
    for secret in ("sesame", "123456", "456789", hashes[:16].hex()):
        assert secret not in text


# ---------------------------------------------------------------------------------------------------- where, how much


def test_the_file_is_for_its_owner_only(path, record) -> None:
    old = os.umask(0)
    try:
        recorder = record(2000)
        for number in range(20):
            recorder.observe(*lookup(b"".join(prompt(number, 3))))
        recorder.close()
    finally:
        os.umask(old)
    parts = [path, Path(f"{path}.1")]
    assert [stat.S_IMODE(part.stat().st_mode) for part in parts] == [0o600, 0o600]


def test_two_parts_take_what_is_allowed_and_each_can_be_read_alone(path, record) -> None:
    recorder = record(8000)
    for number in range(200):
        recorder.observe(*lookup(b"".join(prompt(number, 3))))
    recorder.close()

    older, newer = Path(f"{path}.1"), path
    assert sorted(path.parent.iterdir()) == [newer, older]
    assert max(newer.stat().st_size, older.stat().st_size) <= 4000
    for part in (older, newer):
        assert [event["event"] for event in events(part)[:3]] == ["recording", "namespace", "lookup"]
    first, second = events(older)[0], events(newer)[0]
    assert first["recording"] == second["recording"]
    assert second["part"] == first["part"] + 1 > 2
    # no event is missing between the parts, nor at the end
    ids = [event["hash_ids"] for part in (older, newer) for event in events(part)[2:]]
    assert ids == [hash_ids(b"".join(prompt(number, 3))) for number in range(200 - len(ids), 200)]
    assert recorder.lost == 0


def test_a_server_goes_on_with_what_another_began(path) -> None:
    for number in range(2):
        with recording(str(path), 1 << 20, ABOUT) as recorder:
            assert recorder
            recorder.observe(*lookup(b"".join(prompt(number, 1))))

    assert [event["event"] for event in events(path)] == ["recording", "namespace", "lookup"] * 2
    assert len({event["recording"] for event in events(path)[::3]}) == 1


# ------------------------------------------------------------------------------------------------------------ refusals


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        Recorder(str(path), 1 << 20, ABOUT)
    return str(error.value).replace(str(path), "FILE")


def test_a_folder_that_is_not_there_is_refused(tmp_path) -> None:
    assert refusal(tmp_path / "none" / "file") == (
        "--record FILE cannot be written: No such file or directory; name a file in a folder of the server's user, on "
        "a disk with room"
    )


def test_another_file_is_never_written_to(path) -> None:
    path.write_text("dear diary\n")
    assert refusal(path) == (
        "--record FILE is there already, and is no recording of this lmcache; name another file, or take that one away"
    )
    assert path.read_text() == "dear diary\n"


def test_links_pipes_and_folders_are_refused(path, tmp_path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    assert refusal(path).startswith("--record FILE cannot be written: it is a symbolic link; ")
    assert refusal(tmp_path / "pipe").startswith("--record FILE cannot be written: it is not a plain file; ")
    assert refusal(tmp_path).startswith("--record FILE cannot be written: Is a directory; ")
    assert not (tmp_path / "elsewhere").exists()


def test_two_servers_cannot_record_to_one_file(path, record) -> None:
    record()
    assert refusal(path).startswith("--record FILE cannot be written: another server records to it; ")


# ----------------------------------------------------------------------------------------------------- what goes wrong


def limit_files(size: int) -> None:
    """Let no file of this process grow beyond `size` bytes: to a writer, that is a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def link(record) -> Iterator[tuple[RunningServer, Link]]:
    """A worker of a server that records."""
    server = RunningServer(recorder=record())
    client = Client(server.address, Engine(FACTS, GEOMETRY, Role.WORKER), SETTINGS)
    client.start(wait=30)
    yield server, client.link()
    client.close()
    server.stop()


def test_a_full_disk_costs_the_recording_and_no_request(path, link, caplog) -> None:
    server, worker = link
    worker.lookup("", HASHES, 99).wait()
    wait_until(lambda: path.stat().st_size)
    whole = path.stat().st_size
    try:
        with caplog.at_level(logging.WARNING):
            limit_files(whole + 40)
            for turn in (1, 2):
                for _ in range(5):
                    assert worker.lookup("", HASHES, 99).wait().tokens == 0
                wait_until(lambda turn=turn: server.counter("records_lost") == 5 * turn)
    finally:
        limit_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} cannot be written: [Errno 27] File too large; counted as records_lost from now on"
    ]
    # not even a part of what the disk did not take is left, and once there is room again, recording goes on
    assert path.stat().st_size == whole
    worker.lookup("", HASHES, 99).wait()
    wait_until(lambda: path.stat().st_size > whole)
    assert [event["event"] for event in events(path)] == ["recording", "namespace", "lookup"] * 2
    assert server.counter("internal_errors") == 0


def test_a_recorder_that_raises_is_logged_once_and_hurts_no_request(link, monkeypatch, caplog) -> None:
    server, worker = link

    def fail(*_: object) -> None:
        raise RuntimeError("no pencil")

    monkeypatch.setattr(server.server.service._recorder, "observe", fail)
    for _ in range(3):
        assert worker.lookup("", HASHES, 99).wait().tokens == 0
    assert worker.reserve("", b"", HASHES, 0, 0).reservation

    assert server.counter("records_lost") == 4
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "Lookup could not be recorded; logged once"
    ]


def test_a_disk_that_hangs_loses_what_comes_meanwhile_and_holds_up_nobody(record, monkeypatch) -> None:
    monkeypatch.setattr(
        "lmcache.core.recording.CLOSE_SECONDS", 60.0
    )  # what waits is much, and is to be written in the end
    recorder = record()
    stuck = threading.Event()
    monkeypatch.setattr(recorder._file, "flush", lambda: stuck.wait(60))
    large = b"".join(prompt(1, 65536))
    for _ in range(60):
        recorder.observe(*lookup(large))

    # 32 MB of hashes may wait, and a megabyte comes with each lookup
    assert 20 <= recorder.lost <= 28
    stuck.set()


def test_a_part_that_is_taken_away_is_begun_anew(path, record) -> None:
    recorder = record(2000)
    recorder.observe(*lookup())
    wait_until(path.exists)
    path.unlink()
    for number in range(10):
        recorder.observe(*lookup(b"".join(prompt(number, 3))))
    wait_until(lambda: path.exists() and path.stat().st_size, f"{PAUSE_SECONDS} s later it is there again")
    recorder.close()
    assert recorder.lost == 0
    assert events(path)[0]["event"] == "recording"
