"""`lmcache simulate` as users have it: tables, JSON, plots, and what it says when it is asked for wrongly."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAD = "traces/mooncake_conversation_head.jsonl"


@pytest.fixture
def simulate(lmcache, monkeypatch):
    """Run `lmcache simulate ARGUMENTS` in the checkout's folder."""
    monkeypatch.chdir(ROOT)
    return lambda *arguments, **how: lmcache("simulate", *arguments, **how)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A trace in which who goes by the last use hits once, and who knows the future three times."""
    path = tmp_path / "small.jsonl"
    prompts = ([1, 2], [3, 4], [1, 2], [5, 6], [3, 4], [1, 2])
    path.write_text("".join(f'{{"input_length": 1024, "hash_ids": {prompt}}}\n' for prompt in prompts))
    return str(path)


def test_a_table_has_a_row_for_each_capacity_and_the_optimum_beside_the_policies(simulate) -> None:
    done = simulate(HEAD, "--policy", "lru", "--capacity", "5%", "--capacity", "3000")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"{HEAD}: 750 requests for 20,520 chunks of 512 tokens, 16,840 of them distinct\n"
        "hit ratio, in % of the tokens asked for; with room for everything 17.93; eviction exact\n"
        "\n"
        "capacity  chunks   LRU    opt\n"
        "      5%     842  3.65  14.49\n"
        "    3000   3,000  6.07  17.93\n"
    )


def test_sizes_in_bytes_are_shown_where_they_are_known(simulate, small) -> None:
    done = simulate(small, "--policy", "LRU", "--capacity", "0.25GB", "--bytes-per-token", "131072")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "capacity    GB  chunks    LRU    opt",
        "  0.25GB  0.25       4  16.67  50.00",
    ]


def test_watermark_eviction_is_for_the_policies_not_for_the_optimum(simulate) -> None:
    done = simulate(HEAD, "--policy", "LRU", "--capacity", "40%", "--eviction", "watermark")

    assert "eviction in batches of 20% at 80% full\n" in done.stdout
    lru, opt = map(float, done.stdout.splitlines()[-1].split()[-2:])
    assert lru < 13.82
    assert opt == 17.93


def test_json_has_every_figure_of_every_trace(simulate, small) -> None:
    done = simulate(
        small, HEAD, "--policy", "opt", "--policy", "LRU", "--capacity", "50%", "--capacity", "100%", "--json"
    )

    first, second = json.loads(done.stdout)["traces"]
    assert second["trace"] == HEAD
    assert {key: first[key] for key in first if key != "results"} == {
        "trace": small,
        "requests": 6,
        "chunks_asked": 12,
        "chunks_distinct": 6,
        "tokens_asked": 12 * 512,
        "hit_ratio_with_everything_kept": 0.5,
        "eviction": "exact",
        "recorded": None,
    }
    assert [(r["capacity"], r["policy"], r["cells"], r["tokens_hit"]) for r in first["results"]] == [
        ("50%", "LRU", 3, 512),
        ("50%", "opt", 3, 2560),
        ("100%", "LRU", 6, 3072),
        ("100%", "opt", 6, 3072),
    ]


def test_without_flags_all_policies_are_replayed_at_six_capacities(simulate, lmcache, tmp_path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"input_length": 512, "hash_ids": [{n % 250}]}}\n' for n in range(500)))
    known = [name for plugin in json.loads(lmcache("plugins", "--json").stdout) for name in plugin["policies"]]
    results = json.loads(simulate(str(path), "--json").stdout)["traces"][0]["results"]

    assert list(dict.fromkeys(r["capacity"] for r in results)) == ["1%", "2%", "5%", "10%", "20%", "40%"]
    assert sorted({r["policy"] for r in results}) == sorted([*known, "opt"])
    assert len(results) == 6 * (len(known) + 1)


def test_usual_capacities_that_are_too_small_for_a_tiny_recording_are_left_out_and_named(simulate, small) -> None:
    done = simulate(small, "--policy", "LRU")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-3:] == [
        "capacity  chunks   LRU    opt",
        "     40%       2  0.00  33.33",
        "left out: 1%, 2%, 5%, 10%, 20%, which are less than the two chunks that a server needs",
    ]
    assert [r["capacity"] for r in json.loads(simulate(small, "--json").stdout)["traces"][0]["results"]][:1] == ["40%"]


def test_of_a_recording_that_is_too_small_for_any_usual_capacity_all_is_kept(simulate, tmp_path) -> None:
    path = tmp_path / "tiny.jsonl"
    path.write_text('{"input_length": 1536, "hash_ids": [1, 2, 3]}\n' * 2)
    done = simulate(str(path), "--policy", "LRU")

    assert done.stdout.splitlines()[-3:] == [
        "capacity  chunks    LRU    opt",
        "    100%       3  16.67  50.00",
        "left out: 1%, 2%, 5%, 10%, 20%, 40%, which are less than the two chunks that a server needs",
    ]


def test_a_third_partys_policy_is_replayed_through_the_same_door_as_at_the_server(simulate, small, tmp_path) -> None:
    plugin = tmp_path / "oldest.py"
    plugin.write_text(
        "from lmcache.core.hookspecs import hookimpl\n"
        "from lmcache.plugins.eviction.lru import LRU\n"
        "class Oldest(LRU):\n"
        "    name = 'oldest-first'\n"
        "    def touch(self, nodes):\n"
        "        pass\n"
        "@hookimpl\n"
        "def lmcache_register_eviction_policies():\n"
        "    return [Oldest]\n"
    )
    done = simulate(small, "--plugin", str(plugin), "--policy", "Oldest-First", "--capacity", "4", "--json")

    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["traces"][0]["results"]
    # the first prompt goes first, however often it is asked for
    assert [(r["policy"], r["tokens_hit"] // 512) for r in results] == [("oldest-first", 4), ("opt", 6)]


def test_a_policy_that_fails_says_so_below_the_table(simulate, small, tmp_path) -> None:
    plugin = tmp_path / "clueless.py"
    plugin.write_text(
        "from lmcache.core.hookspecs import hookimpl\n"
        "from lmcache.plugins.eviction.lru import LRU\n"
        "class Clueless(LRU):\n"
        "    name = 'clueless'\n"
        "    def victims(self):\n"
        "        raise RuntimeError('no idea')\n"
        "@hookimpl\n"
        "def lmcache_register_eviction_policies():\n"
        "    return [Clueless]\n"
    )
    done = simulate(small, "--plugin", str(plugin), "--policy", "clueless", "--capacity", "4")

    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == ("clueless failed in 3 calls, in which the cache went by the last use")


def test_progress_is_shown_to_people_and_not_to_programs(simulate, small) -> None:
    assert simulate(small).stderr == ""
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache", "simulate", HEAD, "--policy", "LRU"],
        stdout=subprocess.DEVNULL,
        stderr=writer,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(writer)
    shown = b""
    try:
        while data := os.read(reader, 4096):
            shown += data
    except OSError:
        pass  # how a terminal says that nobody writes to it any more
    os.close(reader)
    assert process.wait(60) == 0
    assert b"mooncake_conversation_head.jsonl" in shown
    assert b"%" in shown


# --------------------------------------------------------------------------------------------------------------- plots


def test_a_plot_is_drawn(simulate, small, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs the extra lmcache[plot]")
    picture = tmp_path / "picture.png"
    done = simulate(small, HEAD, "--policy", "LRU", "--capacity", "50%", "--capacity", "100%", "--plot", str(picture))

    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    vector = tmp_path / "picture.svg"
    assert simulate(small, "--capacity", "50%", "--plot", str(vector)).returncode == 0
    assert "opt (knows the future)" in vector.read_text()


def test_without_matplotlib_one_line_says_what_to_install_before_anything_is_replayed(
    simulate, small, tmp_path
) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(\"No module named 'matplotlib'\")\n")
    done = simulate(small, "--plot", "x.png", env={"PYTHONPATH": str(tmp_path)})

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "lmcache: --plot needs Matplotlib, which cannot be imported: No module named 'matplotlib'; install "
        "this lmcache with its extra `plot`: in its checkout, pip install '.[plot]'\n"
    )


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_replayed(simulate, small, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="--plot needs the extra lmcache[plot]")
    nowhere, unknown = tmp_path / "none" / "x.png", tmp_path / "x.txt"

    assert simulate(small, "--plot", str(nowhere)).stderr == (
        f"lmcache: --plot {nowhere} cannot be written; name a file in a folder that is yours\n"
    )
    assert simulate(small, "--plot", str(unknown)).stderr.startswith(
        f"lmcache: --plot {unknown} has no ending that tells a format; use one of "
    )


# -------------------------------------------------------------------------------------------------------------- errors


def test_an_unknown_policy_lists_those_that_there_are(simulate, small) -> None:
    done = simulate(small, "--policy", "LRUU")

    assert (done.returncode, done.stdout) == (2, "")
    assert "LRUU" in done.stderr
    assert "LRU" in done.stderr.replace("LRUU", "")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--capacity", "lots"], "--capacity 'lots' is no size; write a share of all distinct chunks like 2%, "),
        (["--capacity", "8GB"], "--capacity 8GB is in bytes, and SMALL does not say how large its chunks are; give "),
        (["--capacity", "1"], "--capacity 1 is 1 chunks of SMALL, and a server needs room for 2; give more\n"),
        (["--bytes-per-token", "0"], "--bytes-per-token: 0 is out of range; give a number of bytes, like 131072\n"),
        (["--chunk-size", "x"], "--chunk-size: 'x' is not a whole number; give a number of tokens, like 512\n"),
        (["--chunk-size", "16"], "SMALL, line 1: 2 hash_ids for 1024 tokens, which are 64 chunks of 16; say with "),
        (["nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file or directory; name a trace, or a recording "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(simulate, small, arguments, said) -> None:
    done = simulate(small, *arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.replace(small, "SMALL").startswith(f"lmcache: {said}")
    assert done.stderr.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------- recording


def test_a_server_does_not_start_where_it_cannot_record(lmcache, tmp_path) -> None:
    done = lmcache("server", "--port", "0", "--record", str(tmp_path / "none" / "file"))

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"lmcache: --record {tmp_path}/none/file cannot be written: No such file or directory; name a file in a folder "
        "of the server's user, on a disk with room\n"
    )


def test_a_bound_for_a_recording_that_nobody_asked_for_is_refused(lmcache) -> None:
    done = lmcache("server", "--port", "0", "--record-mb", "64")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "lmcache: --record-mb 64 bounds a recording, and no --record asks for one; add --record FILE, or leave "
        "--record-mb out\n"
    )


def test_a_server_that_was_asked_nothing_leaves_an_empty_recording(lmcache, start_server, tmp_path) -> None:
    file = tmp_path / "recording"
    server = start_server("--record", str(file), "--record-mb", "1")
    assert server.end()[0] == 0

    assert file.stat().st_size == 0
    assert lmcache("simulate", str(file)).stderr == (
        f"lmcache: {file} has no request in it; a server that records writes one down when an engine asks it; a public "
        "trace has a JSON object a line, each with input_length and hash_ids\n"
    )
