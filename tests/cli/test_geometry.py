"""`lmcache geometry`: a model explained before anybody starts it, and running engines by what they registered."""

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache.engines.reference.engine import Engine
from lmcache.engines.reference.shapes import GEOMETRIES

CONFIGS = Path(__file__).parents[1] / "engines" / "models" / "configs"

TABLE = ("--via", "table")

GLM = """\
glm-5.3 (GlmMoeDsaForCausalLM), 78 layers, 8 ranks, KV dtype auto
KV groups of vLLM 0.32 on Hopper GPUs: layers from lmcache's table, sorted by lmcache's copy of its
rules.

group  kind  tokens/block  window  layers  bytes/token  bytes/block: a rank  all ranks
0      full            64              78      100,152            6,409,728  6,409,728

group 0: 78 × index keys in FP8 with scales, 132 bytes each; 78 × latent vectors, 1,152 bytes each.
Ranks hold the same bytes, which are stored once

chunk sizes: multiples of 64 (64, 128, 192, 256…); without --chunk-size a server takes 256

                 bytes/token           of full
chunk size            stored         attention  tokens per GB   of 1,000     of 5,040      of 32,000
       256           100,152              100%          9,984  768 (77%)  4,864 (97%)  32,000 (100%)
     1,024           100,152              100%         10,240     0 (0%)  4,096 (81%)   31,744 (99%)

recommended: leave --chunk-size out, which gives 256: only whole chunks are stored, so of a prompt
of 5,040 tokens 256 keeps 97% and 1,024 keeps 81%.
"""


def explained(lmcache: Any, *arguments: str) -> dict[str, Any]:
    done = lmcache("geometry", *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def complaint(lmcache: Any, *arguments: str) -> str:
    done = lmcache("geometry", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return str(done.stderr.removeprefix("lmcache: ").removesuffix("\n"))


def test_glm_5_3_is_explained_as_its_recipe_says(lmcache) -> None:
    done = lmcache("geometry", str(CONFIGS / "glm-5.3"), "--tensor-parallel-size", "8", *TABLE)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == GLM


@pytest.mark.parametrize("name", ["deepseek-v4-like", "glm-5.3-flash"])
def test_a_model_of_many_groups_fits_100_columns(lmcache, name: str) -> None:
    done = lmcache("geometry", str(CONFIGS / name), *TABLE)

    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_json_has_the_same_facts(lmcache) -> None:
    found = explained(lmcache, str(CONFIGS / "glm-5.3"), "--tensor-parallel-size", "8", *TABLE)
    (glm,) = found["geometries"]
    (group,) = glm["groups"]

    assert (glm["model"], glm["architecture"]) == ("glm-5.3", "GlmMoeDsaForCausalLM")
    assert (glm["engine"], glm["via"], glm["ranks"]) == ("vllm 0.32", "table", 8)
    assert group.pop("names")[:2] == ["model.layers.0.self_attn.indexer.k_cache", "model.layers.0.self_attn.attn"]
    assert group == {
        "number": 0,
        "kind": "full",
        "cached": True,
        "skipped": None,
        "holds": ["78 × index keys in FP8 with scales, 132 bytes each", "78 × latent vectors, 1,152 bytes each"],
        "layers": 78,
        "tokens_per_block": 64,
        "window": 0,
        "shards": 1,
        "bytes_per_token": 100152,
        "block_bytes": {"rank": 6409728, "all": 6409728},
    }
    assert glm["chunk_size"] == {"multiple": 64, "default": 256, "allowed": [64, 128, 192, 256], "registered": None}
    assert [sizes["chunk_size"] for sizes in glm["chunk_sizes"]] == [256, 1024]
    assert [sizes["prompts"][1] for sizes in glm["chunk_sizes"]] == [
        {"prompt_tokens": 5040, "cached": 4864, "hit": 4864, "share": 0.9651},
        {"prompt_tokens": 5040, "cached": 4096, "hit": 4096, "share": 0.8127},
    ]
    assert glm["recommendation"]["chunk_size"] == 256


def test_what_is_not_cached_is_shown_with_its_reason(lmcache) -> None:
    flash = lmcache("geometry", str(CONFIGS / "glm-5.3-flash"), "--tensor-parallel-size", "8", *TABLE).stdout
    v41 = lmcache("geometry", str(CONFIGS / "deepseek-v4.1-like"), *TABLE).stdout

    assert "5      not cached                            11\n" in flash
    assert (
        "group 5: 11 × index keys of the pool that is still being filled (kpool tail). Not cached: a ring\n"
        "that belongs to one request; no hit needs it\n"
    ) in flash
    assert (
        "groups 0–3: 7 × latent vectors, 584 bytes each. Not cached: vLLM computes the last 128 tokens of\n"
        "every hit anew instead (bounded replay)\n"
    ) in v41


def test_chunk_sizes_and_prompts_are_those_asked_for(lmcache) -> None:
    asked = ("--chunk-size", "512", "--chunk-size", "128", "--prompt-tokens", "1024", "--prompt-tokens", "100")
    (glm,) = explained(lmcache, str(CONFIGS / "glm-5.3"), *asked, *TABLE)["geometries"]

    assert [
        (sizes["chunk_size"], prompt["prompt_tokens"], prompt["cached"], prompt["hit"])
        for sizes in glm["chunk_sizes"]
        for prompt in sizes["prompts"]
        # of a prompt of whole chunks one token is left to compute, and so the block that it is in
    ] == [(512, 1024, 1024, 960), (512, 100, 0, 0), (128, 1024, 1024, 960), (128, 100, 0, 0)]


def test_dtype_and_block_size_reach_the_engine(lmcache) -> None:
    running = ("--kv-dtype", "fp8", "--block-size", "128")
    (llama,) = explained(lmcache, str(CONFIGS / "llama-3-8b" / "config.json"), *running, *TABLE)["geometries"]

    assert (llama["groups"][0]["tokens_per_block"], llama["groups"][0]["bytes_per_token"]) == (128, 65536)


def test_windows_and_states_store_less_than_full_attention(lmcache) -> None:
    def shares(name: str, *asked: str) -> list[tuple[int, int, float]]:
        (found,) = explained(lmcache, str(CONFIGS / name), *asked, *TABLE)["geometries"]
        return [
            (size["chunk_size"], size["bytes_per_token"], round(size["share_of_full"], 4))
            for size in found["chunk_sizes"]
        ]

    # of 24 layers 12 keep the last 128 tokens of each chunk: half of 256, an eighth of 1,024
    assert shares("gpt-oss-20b") == [(256, 36864, 0.75), (1024, 27648, 0.5625)]
    # 36 states of 1,097,728 bytes for each chunk, beside 12 layers of 2,048 bytes a token
    assert shares("qwen3-next-80b-a3b", "--chunk-size", "544", "--chunk-size", "2176") == [
        (544, pytest.approx(24576 + 36 * 1097728 / 544), pytest.approx(0.989, abs=0.001)),
        (2176, pytest.approx(24576 + 36 * 1097728 / 2176), pytest.approx(0.435, abs=0.001)),
    ]
    assert shares("llama-3-8b") == [(256, 131072, 1), (1024, 131072, 1)]


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_chunk_size_that_does_not_fit_is_refused_with_those_that_do(lmcache) -> None:
    assert complaint(lmcache, str(CONFIGS / "glm-5.3"), "--chunk-size", "100", *TABLE) == (
        "chunk size 100 is not a multiple of 64, the tokens per block of KV group 0 of glm-5.3; use 64, 128, 256…"
    )
    assert complaint(lmcache, str(CONFIGS / "qwen3-next-80b-a3b"), "--chunk-size", "256", "--json", *TABLE) == (
        "chunk size 256 is not a multiple of 544, the tokens per block of KV group 0 of qwen3-next-80b-a3b; "
        "use 544, 1088, 1632…"
    )
    assert complaint(lmcache, str(CONFIGS / "glm-5.3"), "--chunk-size", "0", *TABLE).startswith(
        "chunk size 0 is not a positive number of tokens; use 64,"
    )


def test_files_that_are_no_config_are_refused(lmcache, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    remedy = "give the config.json of a Hugging Face model, or its folder"

    assert complaint(lmcache, str(tmp_path / "none")) == f"there is no {tmp_path}/none; {remedy}"
    assert complaint(lmcache, str(tmp_path / "broken.json")).startswith(f"{tmp_path}/broken.json is not JSON: ")
    assert complaint(lmcache, str(tmp_path)) == f"{tmp_path}/config.json names no architectures; {remedy}"


def test_an_unknown_architecture_is_refused_with_the_way_that_always_works(lmcache, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    text = complaint(lmcache, str(tmp_path), *TABLE)

    assert text.startswith(f"NoSuchForCausalLM of {tmp_path}/config.json is not among the architectures that are known")
    assert text.endswith("; start the engine with the connector and ask the server about it: lmcache geometry --server")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("--tensor-parallel-size", "3"),
            "--tensor-parallel-size 3 does not divide the 64 attention heads of glm-5.3;",
        ),
        (("--tensor-parallel-size", "0"), "--tensor-parallel-size 0 is no number of ranks; 1 to 4096"),
        (("--tensor-parallel-size", "two"), "--tensor-parallel-size: 'two' is not a whole number; give a number of"),
        (("--block-size", "16"), "--block-size 16 is not a multiple of 64, which the model's attention kernels take;"),
        (("--block-size", "0"), "--block-size: 0 is out of range; give a number of tokens, like 64"),
        (("--kv-dtype", "int3"), "--kv-dtype int3 is unknown; use auto, bfloat16, float16, float32, fp8,"),
        (("--prompt-tokens", "0"), "--prompt-tokens 0 is no length of a prompt; use 1 to"),
        (("--via", "magic"), "--via: 'magic' is not one of"),
        (
            ("--via", "table", "--server", "127.0.0.1:1"),
            "give either a model or --server; for a model: its config.json",
        ),
    ],
)
def test_wishes_that_cannot_be_are_refused(lmcache, arguments: tuple[str, ...], text: str) -> None:
    via = () if "--via" in arguments else TABLE
    assert complaint(lmcache, str(CONFIGS / "glm-5.3"), *arguments, *via).startswith(text)


def test_neither_a_model_nor_a_server_is_refused(lmcache) -> None:
    assert complaint(lmcache) == "give either a model or --server; for a model: its config.json or its folder"


def test_vllm_is_asked_only_where_there_is_one(lmcache, tmp_path: Path) -> None:
    # an interpreter that sees no vLLM, wherever this test runs
    blind = tmp_path / "sitecustomize.py"
    blind.write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'vllm' else find(name, package)\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    auto = lmcache("geometry", str(CONFIGS / "llama-3-8b"), env=env)
    insisted = lmcache("geometry", str(CONFIGS / "llama-3-8b"), "--via", "vllm", env=env)

    assert "sorted by lmcache's copy of its\nrules (vLLM is not installed here).\n" in auto.stdout
    assert (insisted.returncode, insisted.stderr) == (
        2,
        "lmcache: --via vllm: no vLLM is installed here; use --via table, which needs none\n",
    )


def test_a_vllm_that_fails_is_named_and_our_rules_stand_in(lmcache, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('this vLLM is broken')")
    env = {"PYTHONPATH": str(tmp_path)}
    auto = lmcache("geometry", str(CONFIGS / "llama-3-8b"), "--json", env=env)
    insisted = lmcache("geometry", str(CONFIGS / "llama-3-8b"), "--via", "vllm", env=env)

    (llama,) = json.loads(auto.stdout)["geometries"]
    assert llama["via"] == "table"
    assert "sorted by lmcache's copy of its rules, as the vLLM that is installed could not sort" in llama["basis"]
    assert insisted.returncode == 2
    assert "ImportError: this vLLM is broken; use --via table, which needs no vLLM\n" in insisted.stderr


# ---------------------------------------------------------------------------------------------------- a running server


def test_engines_of_a_running_server_are_explained_as_they_registered(lmcache, start_server) -> None:
    server = start_server()
    address = f"127.0.0.1:{server.port}"
    with Engine(GEOMETRIES["gptoss"], server=address), Engine(GEOMETRIES["glm53_flash"], server=address):
        found = explained(lmcache, "--server", address)
        spoken = lmcache("geometry", "--server", f"tcp://{address}")

    by_model = {each["model"]: each for each in found["geometries"]}
    assert set(by_model) == {"reference/gptoss", "reference/glm53_flash"}
    gptoss, flash = by_model["reference/gptoss"], by_model["reference/glm53_flash"]
    # two layers each: keys and values, 4 heads of 16, in float32
    assert [
        (g["kind"], g["tokens_per_block"], g["window"], g["block_bytes"]["rank"], g["holds"]) for g in gptoss["groups"]
    ] == [
        ("sliding_window", 32, 24, 2 * 32 * 512, ["2 × pages of 16,384 bytes"]),
        ("full", 64, 0, 2 * 64 * 512, ["2 × pages of 32,768 bytes"]),
    ]
    assert gptoss["chunk_size"]["registered"] == 256
    assert [sizes["chunk_size"] for sizes in gptoss["chunk_sizes"]] == [256]
    assert [(g["kind"], g["cached"], g["skipped"]) for g in flash["groups"]] == [
        ("full", True, None),
        ("scratch", False, "belongs to one request; no hit needs it"),
    ]
    assert spoken.returncode == 0
    assert "KV groups as the engine registered them at 127.0.0.1:" in spoken.stdout
    assert max(map(len, spoken.stdout.splitlines())) <= 100


def test_a_server_that_wants_keys_is_given_them(lmcache, start_server, tmp_path: Path) -> None:
    keys = str(tmp_path / "keys")
    lmcache("keys", "new", keys)
    address = f"127.0.0.1:{start_server('--keys', keys, '--bulk-port', '0').port}"
    without, let_in = lmcache("geometry", "--server", address), lmcache("geometry", "--server", address, "--keys", keys)

    assert "give its client.key with --keys" in without.stderr
    assert let_in.stderr == (
        f"lmcache: no engine has registered at {address}; start an engine with the connector, then ask\n"
    )


def test_a_server_without_engines_and_no_server_are_said(lmcache, start_server) -> None:
    server = start_server()
    address = f"127.0.0.1:{server.port}"

    assert complaint(lmcache, "--server", address) == (
        f"no engine has registered at {address}; start an engine with the connector, then ask"
    )
    assert complaint(lmcache, "--server", "here:there:1").startswith("'here:there:1' is no server address; write HOST")
    server.end()
    gone = lmcache("geometry", "--server", address)
    assert gone.returncode == 1
    assert gone.stderr.startswith(f"lmcache: no lmcache server at {address}: ")
    assert gone.stderr.endswith(f"; start one with `lmcache server --port {server.port}`, or give --server of one\n")


def test_how_a_model_would_be_run_is_no_question_to_a_server(lmcache) -> None:
    for option, value in (("--tensor-parallel-size", "8"), ("--kv-dtype", "fp8"), ("--block-size", "64")):
        assert complaint(lmcache, "--server", "127.0.0.1:1", option, value) == (
            f"{option} is for a model; leave it out with --server, whose engines have decided it"
        )
