"""Real pools of SGLang in every layout, through both doors: what is stored of a page comes back, byte for byte."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang_stand import ENVIRONMENT, HERE, server_at

pytestmark = pytest.mark.sglang

HOST = [
    *(
        f"hicache {kind} {layout}"
        for kind in ("mha", "mla")
        for layout in ("layer_first", "page_first", "page_first_direct")
    ),
    "hicache mha page_head",
    "hicache mha shm",
]


@pytest.fixture(scope="module")
def outcomes(sglang_models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of each case."""
    server = server_at(tmp_path_factory.mktemp("pools"))
    server.start()
    try:
        probe = subprocess.run(
            [sys.executable, str(HERE / "pools_probe.py"), str(server.port), str(sglang_models / "llama")],
            env=os.environ | ENVIRONMENT,
            check=False,
            capture_output=True,
            text=True,
        )
        report = server.quiet()
    finally:
        server.kill()
    assert probe.returncode == 0, probe.stderr[-6000:]
    assert {each["chunk_size"] for each in report["namespaces"]} == {16}
    return {each["case"]: each["outcome"] for each in map(json.loads, probe.stdout.splitlines())}


@pytest.mark.parametrize("case", HOST)
def test_pages_of_host_memory_come_back_in_every_layout_and_no_others_are_touched(
    outcomes: dict[str, Any], case: str
) -> None:
    assert outcomes[case] == {
        "exists": [0, 3],
        "set": [[True] * 3, [True] * 2, [True] * 5],
        "got": [True] * 5 + [False],
        "middle": [True, True],
        "same": [True] * 6,
        "untouched": [True, True],
        "cleared": 0,
    }


def test_a_prefix_can_be_restored_only_where_the_trailing_pool_has_its_last_pages(outcomes: dict[str, Any]) -> None:
    assert outcomes["hicache trailing"] == {
        "set": {"swa": [True, True]},
        "restorable": [[], [4], [4], [4], [4, 5, 6]],
        "longest": [4, 4, 4, 6],
        "got": {"swa": [True, True]},
        "same": [True, True],
        "not by its name": True,
    }


@pytest.mark.parametrize("case", ["linker mha", "linker mla", "linker staged"])
def test_pages_of_device_pools_come_back_and_what_is_no_page_is_refused(outcomes: dict[str, Any], case: str) -> None:
    assert outcomes[case] == {
        "lookups": [[], [4], [2]],
        "stored": [True, True],
        "loaded": [True, False, False],
        "same": True,
        "untouched": True,
        "layers": [-1, True],
    }


def test_a_window_s_pages_decide_which_lengths_can_be_restored(outcomes: dict[str, Any]) -> None:
    assert outcomes["linker window"] == {
        "stored": [True, True],
        "lookups": [[[4], []], [[6], [5], []]],
        "every": [4, 5, 6],
        "loaded": True,
        "same full": True,
        "same window": True,
    }


def test_a_state_can_be_restored_at_its_own_page_only(outcomes: dict[str, Any]) -> None:
    assert outcomes["linker states"] == {"stored": [True, True], "lookup": [3], "loaded": True, "same": True}


def test_a_pool_that_nobody_knows_is_refused_by_name(outcomes: dict[str, Any]) -> None:
    refused = outcomes["linker unknown"]["refused"]
    assert refused.startswith(
        "ConfigError: SGLang keeps its kv pool in MHATokenToKVPoolOfTomorrow, unknown to the linker;"
    )


def test_after_an_update_of_the_weights_no_thread_is_given_the_old_weights_store(outcomes: dict[str, Any]) -> None:
    assert outcomes["hicache updates"] == {"second waits": True, "both get the new one": True, "found of the old": 0}


def test_every_call_that_changes_weights_is_watched(outcomes: dict[str, Any]) -> None:
    assert outcomes["watched"] == {"calls": [True] * 6}
