"""A real vLLM whose server has a tier: what was stored is hit after a kill, and a tier that fails costs misses only.

Before every request that is to hit, each page of the engine is overwritten, and, but for evictions, the server is a new
one over the same folder: what is right then was in the tier.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from group_scenarios import cached, start
from vllm_stand import Stand, prompt, same_answer

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("llama_stand", "plain")]

CHUNK = ("--chunk-size", "256")
PATIENT = {"timeout_s": "60"}
"""So that a busy machine is not taken for a tier that hangs."""
EXAMPLES = Path(__file__).parents[3] / "examples"
THIRD_PARTY = (
    "--plugin",
    str(EXAMPLES / "lmcache-folder-tier" / "src" / "lmcache_folder_tier" / "tier.py"),
    "--plugin",
    str(EXAMPLES / "lmcache-xz-codec" / "src" / "lmcache_xz_codec" / "codec.py"),
)


@pytest.fixture
def stand(llama_stand: Stand) -> Iterator[Stand]:
    """The shared engine; each test starts its servers."""
    yield llama_stand
    llama_stand.server.kill()
    llama_stand.engine.forget()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "blobs"
    path.mkdir()
    return path


def on_disk(folder: Path, *flags: str, **options: str) -> tuple[str, ...]:
    """Flags of a server with a tier in the folder."""
    query = "&".join(f"{name}={value}" for name, value in {"size_gb": "1", **PATIENT, **options}.items())
    return (*CHUNK, "--l2", f"disk://{folder}?{query}", *flags)


def store(stand: Stand, ids: list[int], max_tokens: int = 8) -> dict[str, Any]:
    """Have a prompt computed, stored, and overwritten in the engine; returns its answer."""
    [answer] = stand.engine.generate(ids, max_tokens=max_tokens)
    stand.server.settle()
    assert stand.engine.call("wipe")
    return answer


def tier(stand: Stand) -> dict[str, Any]:
    [report] = stand.server.quiet()["tiers"]
    return report


def told(stand: Stand, *names: str) -> list[int]:
    """The tier's counters of these names."""
    counters = tier(stand)["counters"]
    return [counters[name] for name in names]


def blobs(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.parent != folder]


@pytest.fixture(params=["disk", "disk, compressed and encrypted", "a third party's tier and codec"])
def flags(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> tuple[str, ...]:
    if request.param == "disk":
        return on_disk(folder)
    if request.param == "a third party's tier and codec":
        return (*CHUNK, *THIRD_PARTY, "--l2", f"folder://{folder}?codec=xz&timeout_s=60")
    key = tmp_path / "key"
    key.write_text("5f" * 32)
    key.chmod(0o600)
    return on_disk(folder, codec="zstd-bf16+aes-gcm", key_file=str(key))


def test_after_a_kill_the_next_request_is_served_from_the_tier_with_the_cold_answer(
    stand: Stand, flags: tuple[str, ...]
) -> None:
    prompts = [prompt(200, 2600), prompt(201, 700)]
    stand.serve(*flags)
    cold = [store(stand, ids) for ids in prompts]
    assert told(stand, "stored", "lost", "errors") == [12, 0, 0]

    stand.serve(*flags)
    assert stand.server.settle()["gauges"]["nodes"] == 0
    warm = [store(stand, ids) for ids in prompts]
    assert cached([*cold, *warm]) == [0, 0, 2560, 512]
    assert all(same_answer(a, b) for a, b in zip(cold, warm, strict=True))
    assert told(stand, "loaded", "stored", "absent", "damaged", "foreign", "errors") == [12, 0, 0, 0, 0, 0]
    assert len(set(cold[0]["tokens"])) > 4, "the model repeats itself, so its answers prove little"


def test_prompts_that_l1_had_no_room_for_come_back_from_the_tier(stand: Stand, folder: Path) -> None:
    # 40 cells, of which two are kept free: as many as one of these prompts takes
    stand.serve(*on_disk(folder, "--l1-size-gb", "0.0391", store="on-evict"))
    prompts = [prompt(seed, 600) for seed in range(210, 240)]
    cold = [store(stand, ids, max_tokens=3) for ids in prompts]
    gauges = stand.server.settle()["gauges"]
    assert (gauges["cells_total"], gauges["nodes"] <= 40) == (40, True)
    stored, lost = told(stand, "stored", "lost")
    assert (stored >= 60 - gauges["nodes"], lost) == (True, 0)

    warm = [store(stand, ids, max_tokens=3) for ids in prompts]
    assert cached(cold) == [0] * 30
    assert cached(warm) == [512] * 30
    assert all(same_answer(a, b) for a, b in zip(cold, warm, strict=True))
    loaded, damaged, errors = told(stand, "loaded", "damaged", "errors")
    assert loaded >= 60 - gauges["nodes"]
    assert (damaged, errors) == (0, 0)


def test_damaged_blobs_are_counted_and_computed_and_stored_anew(stand: Stand, folder: Path) -> None:
    ids = prompt(202, 1300)
    stand.serve(*on_disk(folder))
    cold = store(stand, ids)
    stand.server.kill()
    for path in blobs(folder):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    stand.serve(*on_disk(folder))
    answer = store(stand, ids)
    assert cached([cold, answer]) == [0, 0]
    assert same_answer(cold, answer)
    assert told(stand, "loaded", "damaged", "stored", "errors") == [0, 5, 5, 0]

    stand.serve(*on_disk(folder))
    again = store(stand, ids)
    assert again["cached"] == 1280
    assert same_answer(cold, again)


def unlink_all(folder: Path) -> None:
    for path in blobs(folder):
        path.unlink()


def make_folders_of_all(folder: Path) -> None:
    """Whoever opens one of these blobs to read it is refused by the system, whichever user he is."""
    for path in blobs(folder):
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("harm", [unlink_all, shutil.rmtree, make_folders_of_all])
def test_a_folder_that_is_harmed_under_a_running_server_costs_misses_only(
    stand: Stand, folder: Path, harm: Any
) -> None:
    prompts = [prompt(203, 1300), prompt(204, 600)]
    stand.serve(*on_disk(folder))
    cold = [store(stand, ids) for ids in prompts]
    stand.serve(*on_disk(folder))
    harm(folder)

    answers = [store(stand, ids) for ids in prompts]
    again = [store(stand, ids) for ids in prompts]
    loaded, absent, errors = told(stand, "loaded", "absent", "errors")
    assert cached([*answers, *again]) == [0, 0, 1280, 512]
    assert all(same_answer(a, b) for a, b in zip([*cold, *cold], [*answers, *again], strict=True))
    assert loaded == 0
    assert absent + errors > 0


def test_a_hit_shorter_than_what_is_asked_is_what_the_tier_still_has(stand: Stand, folder: Path) -> None:
    ids = prompt(205, 1300)
    stand.serve(*on_disk(folder))
    store(stand, ids[:600])
    kept = {path.name for path in blobs(folder)}
    cold = store(stand, ids)
    stand.server.kill()
    lost = min(path for path in blobs(folder) if path.name not in kept)
    lost.unlink()

    stand.serve(*on_disk(folder))
    warm = store(stand, ids)
    assert warm["cached"] in {512, 768, 1024}
    assert same_answer(cold, warm)


@pytest.fixture
def gemma(models: Path, tmp_path: Path) -> Iterator[Stand]:
    yield from start(tmp_path, models / "gemma3", num_gpu_blocks_override=51)


def test_a_model_with_windows_loads_from_the_tier_what_its_hit_needs(gemma: Stand, folder: Path) -> None:
    prompts = [prompt(206, 2561), prompt(207, 641)]
    flags = on_disk(folder, "--l1-cell-kb", "128")
    gemma.serve(*flags)
    cold = [store(gemma, ids) for ids in prompts]
    assert told(gemma, "stored", "lost", "errors") == [3 * 12, 0, 0]

    gemma.serve(*flags)
    warm = [store(gemma, ids) for ids in prompts]
    assert cached([*cold, *warm]) == [0, 0, 2560, 512]
    assert all(same_answer(a, b) for a, b in zip(cold, warm, strict=True))
    # ten and two chunks of the full group, and of each window the last two
    assert told(gemma, "loaded", "damaged", "errors") == [10 + 2 + 2 * (2 + 2), 0, 0]
