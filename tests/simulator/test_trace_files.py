"""Trace files: what is read from them, and what is said of damaged ones."""

import json
from pathlib import Path

import pytest

from lmcache.core.recording import FORMAT
from lmcache.simulator.reading import TraceError, read_trace

GOOD = '{"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [4, 5]}\n'
BEGUN = {
    "event": "recording",
    "format": FORMAT,
    "recording": "ab",
    "part": 1,
    "policy": "LRU",
    "cells": 256,
    "cell_bytes": 4096,
}
SPACE = {
    "event": "namespace",
    "namespace": 0,
    "digest": "aa",
    "chunk_size": 16,
    "geometry": {"groups": [{"kind": "full", "tokens_per_block": 16, "page_bytes": [4096]}]},
}
LOOKUP = {"event": "lookup", "namespace": 0, "tenant": "", "input_length": 17, "hit_length": 16, "hash_ids": [1]}
STORE = {"event": "store", "namespace": 0, "tenant": "", "parent": None, "groups": [0], "hash_ids": [1]}


def recorded(*events: dict[str, object]) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


@pytest.fixture
def refusal(tmp_path: Path):
    """What is said of a file of the given text, without its path."""

    def refused(text: str | bytes) -> str:
        path = tmp_path / "trace.jsonl"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(TraceError) as error:
            read_trace(path)
        return str(error.value).replace(str(path), "FILE")

    return refused


def test_a_public_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + "\n" + GOOD.replace("[4, 5]", "[4, 6]").replace("1000", "1024"))
    trace = read_trace(path)

    assert (trace.requests, trace.chunks_asked, len(trace.stored()), trace.sized) == (2, 4, 3, False)
    assert trace.tokens_with_everything_kept() == 512
    assert trace.tokens_asked == 4 * 512


def test_a_whole_last_line_without_its_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD.strip())
    assert read_trace(path).requests == 1


def test_a_trace_of_whole_chunks_only_and_of_another_chunk_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD.replace("1000", "33"))
    trace = read_trace(path, chunk_size=16, bytes_per_token=10)
    assert (trace.cell_bytes, trace.sized, trace.tokens_asked) == (160, True, 32)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            '{"input_length": 1000, "hash_ids": [4, 5}\n',
            "FILE, line 2: JSON is malformed: expected ',' or ']' (byte 40)",
        ),
        ('{"input_length": 1000, "hash_', "FILE, line 2: Input data was truncated"),
        ('{"input_length": 1000}\n', "FILE, line 2: there is no field `hash_ids`"),
        (
            '{"input_length": 1000, "hash_ids": [4, "x"]}',
            "FILE, line 2: Expected `int`, got `str` - at `$.hash_ids[1]`",
        ),
        ("[1, 2]\n", "FILE, line 2: Expected `object`, got `array`"),
        ("\x00\x00\x00\x00", "FILE, line 2: JSON is malformed: invalid character (byte 0)"),
        ('{"input_length": 1000, "hash_ids": [-4, 5]}', "FILE, line 2: id -4 is negative"),
        ('{"event": "party"}', "FILE, line 2: an event 'party' is none that this lmcache knows"),
    ],
)
def test_a_damaged_line_is_named_with_its_fault(refusal, text, fault) -> None:
    assert refusal(GOOD + text) == f"{fault}; repair or delete the line"


def test_bytes_that_are_no_text_are_refused(refusal) -> None:
    assert refusal(b'{"event": "\xff\xfe"}').startswith("FILE, line 1: ")


def test_ids_that_do_not_fit_the_length_point_at_the_chunk_size(refusal) -> None:
    assert refusal(GOOD + GOOD.replace("1000", "5000")) == (
        "FILE, line 2: 2 hash_ids for 5000 tokens, which are 10 chunks of 512; say with --chunk-size how many tokens "
        "an id stands for"
    )


def test_an_id_that_stands_for_two_prefixes_is_refused(refusal) -> None:
    assert refusal(GOOD + GOOD.replace("[4, 5]", "[7, 5]")) == (
        "FILE, line 2: id 5 follows another chunk here than before; give each prefix an id of its own: an id stands "
        "for a chunk and all chunks before it"
    )


@pytest.mark.parametrize("text", ["", "\n\n", recorded(BEGUN, SPACE), recorded(BEGUN, SPACE, STORE)])
def test_a_trace_without_requests_is_refused(refusal, text) -> None:
    assert refusal(text) == (
        "FILE has no request in it; a server that records writes one down when an engine asks it; a public trace has a "
        "JSON object a line, each with input_length and hash_ids"
    )


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as error:
        read_trace(tmp_path)
    assert str(error.value) == f"{tmp_path} is a folder; name a trace in it, a file with a JSON object a line"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as error:
        read_trace(tmp_path / "none")
    assert str(error.value) == (
        f"{tmp_path}/none cannot be read: No such file or directory; name a trace, or a recording of lmcache server "
        "--record"
    )


def test_a_recording_says_how_large_its_chunks_are(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    path.write_text(recorded(BEGUN, SPACE, LOOKUP, STORE, LOOKUP))
    trace = read_trace(path, chunk_size=512, bytes_per_token=3)

    assert (trace.cell_bytes, trace.sized, trace.requests, trace.chunks_asked) == (4096, True, 2, 2)
    assert trace.recorded
    assert (trace.recorded.policy, trace.recorded.l1_bytes) == ("LRU", 256 * 4096)
    assert (trace.recorded.tokens_hit, trace.recorded.tokens_asked) == (32, 32)
    assert trace.tokens_with_everything_kept() == 16


def test_of_a_recording_the_part_before_is_read_first(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    Path(f"{path}.1").write_text(recorded(BEGUN, SPACE, LOOKUP, STORE))
    path.write_text(recorded({**BEGUN, "part": 2}, SPACE, LOOKUP))

    assert read_trace(path).tokens_with_everything_kept() == 16


@pytest.mark.parametrize("other", [{"recording": "cd"}, {"part": 7}])
def test_another_recordings_part_is_left_alone(tmp_path: Path, other) -> None:
    path = tmp_path / "recording"
    Path(f"{path}.1").write_text(recorded({**BEGUN, **other}, SPACE, LOOKUP, STORE))
    path.write_text(recorded({**BEGUN, "part": 2}, SPACE, LOOKUP))

    assert read_trace(path).requests == 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            recorded({**BEGUN, "format": 9}),
            f"FILE, line 1: a recording of format 9; this lmcache reads {FORMAT}; use the lmcache that wrote it",
        ),
        (
            recorded(BEGUN, LOOKUP),
            "FILE, line 2: namespace 0 has not been described; name the recording from its beginning",
        ),
        (
            recorded(BEGUN, SPACE, {**STORE, "groups": [1]}),
            "FILE, line 3: groups [1] are not among the cached ones of namespace 0; repair or delete the line",
        ),
        (
            GOOD + recorded(BEGUN),
            "FILE, line 2: a recording within another trace; keep them in files of their own",
        ),
        (
            recorded(BEGUN) + GOOD,
            "FILE, line 2: a request of another trace within a recording; keep them in files of their own",
        ),
    ],
)
def test_a_damaged_recording_is_refused(refusal, text, fault) -> None:
    assert refusal(text) == fault


def test_a_damaged_geometry_is_refused(refusal) -> None:
    broken = {**SPACE, "geometry": {"groups": [{"kind": "full", "tokens_per_block": 0, "page_bytes": [1]}]}}
    assert refusal(recorded(BEGUN, broken)).startswith("FILE, line 2: KV group (full, unnamed) has 0 tokens per block")
    assert refusal(recorded(BEGUN, {**SPACE, "chunk_size": 17})).startswith("FILE, line 2: chunk size 17 is not a mult")
    assert "`$.digest`" in refusal(recorded(BEGUN, {**SPACE, "digest": "xy"}))
