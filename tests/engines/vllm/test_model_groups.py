"""The table of architectures is honest: vLLM's own code groups its layers as we do, and vLLM's own models have them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmcache.engines.models.describe import describe
from lmcache.engines.models.running import Running
from lmcache.engines.models.source import read_config
from lmcache.engines.models.table import layers_of
from lmcache.engines.vllm.model_groups import Grouped, ask_vllm, vllm_is_installed
from lmcache.errors import ConfigError

pytestmark = pytest.mark.vllm

PROBE = Path(__file__).with_name("models_probe.py")
CONFIGS = Path(__file__).parents[1] / "models" / "configs"
NAMES = sorted(folder.name for folder in CONFIGS.iterdir())

RUNNINGS = (Running(), Running(8), Running(1, "fp8"), Running(2, "auto", 256))
"""As in the probe."""


@pytest.fixture(scope="module")
def probed() -> dict[str, Any]:
    run = subprocess.run([sys.executable, str(PROBE), str(CONFIGS)], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_vllm_groups_the_layers_as_we_do(probed: dict[str, Any], name: str) -> None:
    compared = 0
    for number, running in enumerate(RUNNINGS):
        try:
            ours = describe(read_config(CONFIGS / name), running)
        except ConfigError:
            assert f"{name} {number}" not in probed["groups"]
            continue
        theirs = msgspec.convert(probed["groups"][f"{name} {number}"], Grouped)
        assert theirs.geometry == ours.geometry, running
        assert theirs.layers == tuple(tuple(layer.name for layer in group) for group in ours.groups), running
        compared += 1
    assert compared >= 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_vllms_own_model_has_the_layers_of_the_table(probed: dict[str, Any], name: str) -> None:
    found = probed["layers"][name]
    assert "failed" not in found, found["failed"]
    assert [layer for layer, _ in found["ours"]] == [layer for layer, _ in found["theirs"]]
    for (layer, ours), (_, theirs) in zip(found["ours"], found["theirs"], strict=True):
        assert ours == theirs, layer


@pytest.mark.parametrize("name", ["granite-4.0-h-tiny", "nemotron-h-8b", "qwen3-next-80b-a3b", "qwen3.5-like"])
def test_vllm_makes_blocks_for_a_state_as_long_as_we_do(probed: dict[str, Any], name: str) -> None:
    # a CPU's kernels take blocks of 128 tokens
    hybrid = layers_of(read_config(CONFIGS / name), Running(block_size=128))

    assert {layer.spec.block_size for layer in hybrid.layers} == {probed["layers"][name]["block_size"]}
    assert probed["layers"][name]["block_size"] > 128


@pytest.mark.timeout(320)
def test_the_command_asks_vllm_unasked_and_says_so() -> None:
    command = [sys.executable, "-m", "lmcache", "geometry", str(CONFIGS / "glm-5.3-flash"), "--json"]
    done = subprocess.run(
        [*command, "--tensor-parallel-size", "8"], check=False, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")

    (found,) = json.loads(done.stdout)["geometries"]
    assert found["via"] == "vllm"
    assert re.fullmatch(
        r"KV groups of vLLM \d+\.\S+ on Hopper GPUs: layers from lmcache's table, sorted by vLLM's own code\.",
        found["basis"],
    )
    # what each group holds is told of the same layers, scratch included
    assert [(group["kind"], group["tokens_per_block"], group["layers"]) for group in found["groups"]] == [
        *[("recurrent", 1024, 9)] * 2,
        *[("recurrent", 1024, 8)] * 2,
        ("full", 1024, 11),
        ("scratch", 0, 11),
    ]
    assert found["groups"][5]["holds"] == ["11 × index keys of the pool that is still being filled (kpool tail)"]
    assert vllm_is_installed()


def test_what_vllm_cannot_sort_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        ask_vllm(tmp_path / "config.json", Running())

    assert str(raised.value) == (
        f"the vLLM that is installed could not sort the layers of {tmp_path}/config.json: "
        f"lmcache.errors.ConfigError: there is no {tmp_path}/config.json; give the config.json of a Hugging Face "
        "model, or its folder; use --via table, which needs no vLLM"
    )
