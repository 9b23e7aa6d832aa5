"""README and docs tell the truth: their commands and programs are run, their transcripts compared.

How a code block is written says what happens to it here:

    bash      a command to type. `lmcache …` is run for real; `vllm serve …` is parsed; the rest is in `EXCUSED`
    console   commands after `$`, and what they print, compared word for word; numbers may differ
    python    run in a new namespace; what a `text` block right below it says is what must be printed

Two things are changed before a command is run: large sizes become small, and ports become free ones.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from lmcache.core.memory import total_memory
from lmcache.engines.vllm.settings import read_settings

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "lmcache-fifo-policy"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
GIB = 1 << 30

EXCUSED = {
    "make": "would set up an environment of its own, or run this very test; that the target exists is checked",
    "pip": "installs from a package index into the reader's environment",
    "docker": "needs a container engine, and an image of the reader's",
    "python -m venv": "makes an environment in the reader's folder; CI does so through make",
    "cache-env/bin/python": "is in the environment that the command above makes",
    ".venv/bin/python": "is in the environment that make makes",
    "python -m sglang.launch_server": "starts an engine; tests/engines/sglang/test_sglang_http.py does",
}
"""Commands that are shown and not run, by how they begin, and why."""


@attrs.frozen
class Block:
    """A code block."""

    page: Path
    line: int
    language: str
    text: str
    output: str
    """Of a `text` block that follows with nothing between; empty without one."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@attrs.frozen
class Command:
    """One command of a block, its continued lines joined."""

    block: Block
    text: str
    expected: str = ""
    """What a transcript says that it prints."""

    def __str__(self) -> str:
        return f"{self.block} {self.text[:40]}"

    @property
    def words(self) -> list[str]:
        """As a shell splits them, without leading assignments of variables."""
        words = shlex.split(self.text)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        return words


def _blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence = re.fullmatch(r"(```+)([\w{}-]*).*", lines[number])
        number += 1
        if not fence:
            continue
        start = number
        while lines[number].rstrip() != fence[1]:
            number += 1
        text = "\n".join(lines[start:number])
        number += 1
        yield Block(page, start, fence[2], text, _text_block(lines, number))


def _text_block(lines: list[str], number: int) -> str:
    while number < len(lines) and not lines[number].strip():
        number += 1
    if number == len(lines) or lines[number] != "```text":
        return ""
    return "\n".join(lines[number + 1 : lines.index("```", number)])


def _commands(block: Block) -> Iterator[Command]:
    text = block.text.replace("\\\n", " ")
    if block.language == "bash":
        yield from (Command(block, line.strip()) for line in text.splitlines() if line.strip() and line[0] != "#")
        return
    for part in re.split(r"(?m)^\$ ", text)[1:]:
        command, _, expected = part.partition("\n")
        yield Command(block, command, expected)


BLOCKS = [block for page in PAGES for block in _blocks(page)]
COMMANDS = [command for block in BLOCKS if block.language in {"bash", "console"} for command in _commands(block)]
SERVERS = [command for command in COMMANDS if command.words[:2] == ["lmcache", "server"] and not command.expected]
EXPORTERS = [c for c in COMMANDS if c.words[:2] == ["lmcache", "metrics"] and "--once" not in c.words]
OTHERS = [c for c in COMMANDS if c.words[0] == "lmcache" and c not in SERVERS and c not in EXPORTERS]
VLLM = [command for command in COMMANDS if command.words[:2] == ["vllm", "serve"]]
PYTHON = [block for block in BLOCKS if block.language == "python" and not block.text.startswith("def lmcache_")]


def _named(items: list[object]) -> list[object]:
    return [pytest.param(item, id=str(item)) for item in items]


# ------------------------------------------------------------------------------------------------------ what is there


def test_blocks_of_every_kind_are_found():
    assert {"bash", "console", "python", "text"} <= {block.language for block in BLOCKS}
    assert len(SERVERS) >= 8
    assert len(VLLM) >= 7
    assert len(PYTHON) >= 7


def test_every_block_says_what_language_it_is():
    assert [str(block) for block in BLOCKS if not block.language] == []


def test_every_command_is_run_or_excused_aloud():
    covered = [*SERVERS, *EXPORTERS, *OTHERS, *VLLM]
    unknown = [
        str(command)
        for command in COMMANDS
        if command not in covered
        and not any(command.text == start or command.text.startswith(f"{start} ") for start in EXCUSED)
        and command.words[:2] != ["python", "-c"]
    ]
    assert unknown == []


def test_every_make_target_that_is_shown_exists():
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    text = "\n".join(page.read_text() for page in PAGES)
    shown = {word for words in re.findall(r"(?:`|\$ |^)make ([a-z-]+)", text, re.MULTILINE) for word in words.split()}
    assert {"demo", "test", "check", "demo-vllm", "docs"} <= shown
    assert shown <= targets


# ----------------------------------------------------------------------------------------------------- lmcache server


def _server_arguments(command: Command) -> list[str]:
    """The command's own, with a small size and a free port."""
    arguments = _scaled_quotas(command.words[2:])
    for option, value in (("--l1-size-gb", "0.125"), ("--port", "0")):
        if option in arguments:
            arguments[arguments.index(option) + 1] = value
        else:
            arguments += [option, value]
    return arguments


def _scaled_quotas(arguments: list[str]) -> list[str]:
    """Quotas in GB as what they are of the L1 that is written, which becomes a small one."""
    if "--l1-size-gb" not in arguments:
        return arguments
    percent = 100 / float(arguments[arguments.index("--l1-size-gb") + 1])
    quotas = {place + 1 for place, word in enumerate(arguments) if word == "--quota"}
    return [
        re.sub(r"=([\d.]+)$", lambda size: f"={float(size[1]) * percent:g}%", word) if place in quotas else word
        for place, word in enumerate(arguments)
    ]


def _write_files(folder: Path, page: Path) -> None:
    """Make the files that a page shows: Python blocks that begin with their own path."""
    for block in PYTHON:
        path = re.match(r"# (\S+\.py)\n", block.text)
        if block.page == page and path:
            file = folder / path[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)


@pytest.mark.parametrize("command", _named(SERVERS))
def test_a_server_command_starts_answers_and_ends_well(command, start_server, tmp_path):
    _write_files(tmp_path, command.block.page)
    folder = EXAMPLE if "lmcache_fifo_policy" in command.text else tmp_path
    paths = os.pathsep.join([str(tmp_path), str(EXAMPLE / "src")])
    server = start_server(*_server_arguments(command), folder=folder, PYTHONPATH=paths)
    ping = subprocess.run(
        [sys.executable, "-m", "lmcache", "ping", "--port", server.address.split(":")[1]], check=False
    )
    assert ping.returncode == 0
    code, log = server.end()
    assert code == 0, log
    assert "Traceback" not in log


LARGE = sorted({size for command in SERVERS for size in re.findall(r"--l1-size-gb (\S+)", command.text)}, key=float)


@pytest.mark.parametrize("size", LARGE)
def test_the_size_that_is_written_is_taken_or_refused_with_what_to_ask_for(size, start_server):
    if float(size) * GIB <= total_memory().bytes:
        assert start_server("--port", "0", "--l1-size-gb", size).end()[0] == 0
        return
    refused = _run(["lmcache", "server", "--port", "0", "--l1-size-gb", size])
    assert refused.returncode == 1
    assert re.fullmatch(
        rf"lmcache: --l1-size-gb {size} is more than the .*, [\d.]+ GB; use at most [\d.]+, or "
        r"give the host \(container\) more memory\n",
        refused.stderr,
    )


# ---------------------------------------------------------------------------------------------------- lmcache metrics


@pytest.mark.parametrize("command", _named(EXPORTERS))
def test_an_exporter_serves_and_ends_well(command, start, server):
    assert not {"--port", "--listen"} & set(command.words), "ports of such commands are put in here"
    exporter = start("metrics", *command.words[2:], "--port", server.split(":")[1], "--listen", "0")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(exporter.address) as answer:
        assert b"\nlmcache_up 1.0\n" in answer.read()
    assert exporter.end() == (0, "")


# ------------------------------------------------------------------------------------------------------ other commands


def _run(words: list[str], timeout: float = 170) -> subprocess.CompletedProcess[str]:
    program = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "lmcache"]
    return subprocess.run(
        [*program, *words[1:]],
        cwd=ROOT,
        # a warning of ours would be an error; vLLM's own are its own
        env=os.environ if "vllm" in words else {**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


TALKING = ("ping", "status", "metrics", "wait-idle")
"""Commands that ask a server."""


@pytest.mark.parametrize("command", _named([command for command in OTHERS if not command.expected]))
def test_a_command_does_its_work(command, server):
    words = command.words
    if words[1] in TALKING:
        assert "--port" not in words, "ports of such commands are put in here"
        words += ["--port", server.split(":")[1]]
    done = _run(words)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr


@pytest.mark.parametrize("command", _named([c for c in COMMANDS if c.words[:2] == ["python", "-c"]]))
def test_a_python_command_does_its_work(command):
    done = _run(command.words)
    assert done.returncode == 0, done.stderr


TRANSCRIPTS = [command for command in COMMANDS if command.expected and command.words[0] == "lmcache"]
REAL_ENGINE = [command for command in TRANSCRIPTS if "vllm" in command.words]


def _plain(text: str) -> str:
    """What must not differ: words and marks. Numbers and space depend on the day and the machine."""
    text = re.sub(r"the container's limit \(\S+\)", "the host's memory", text)
    return " ".join(re.sub(r"\d+(\.\d+)?", "0", re.sub(r"\b[0-9a-f]{16}\b", "0", text)).split())


@pytest.mark.parametrize("command", _named([c for c in TRANSCRIPTS if c not in REAL_ENGINE]))
def test_a_transcript_says_what_is_printed(command):
    done = _run(command.words)
    assert _plain(done.stdout + done.stderr) == _plain(command.expected)
    assert "Traceback" not in done.stderr


@pytest.mark.vllm
@pytest.mark.parametrize("command", _named(REAL_ENGINE))
def test_a_transcript_of_a_real_engine_says_what_is_printed(command):
    done = _run(command.words, timeout=800)
    assert done.returncode == 0, done.stderr
    # the engine's own warnings come on standard error, before the verdict
    verdict = done.stderr.strip().splitlines()[-1]
    assert _plain(done.stdout + verdict) == _plain(command.expected)


def test_make_demo_prints_what_the_readme_shows():
    (shown,) = [command.expected for command in COMMANDS if command.text == "make demo" and command.expected]
    set_up, command, printed = shown.split("\n", 2)
    assert (set_up, command) == ("setting up .venv with python3", ".venv/bin/lmcache demo")
    assert (
        f'@echo "{set_up.replace(".venv", "$(VENV)").replace("python3", "$(PYTHON)")}"'
        in (ROOT / "Makefile").read_text()
    )
    done = _run(["lmcache", "demo"])
    assert done.returncode == 0, done.stderr
    assert _plain(done.stdout + done.stderr) == _plain(printed)


# ---------------------------------------------------------------------------------------------------------- vllm serve


def _transfer_config(command: Command) -> dict[str, object]:
    words = command.words
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize("command", _named(VLLM))
def test_an_engine_command_has_settings_that_the_connector_takes(command):
    config = _transfer_config(command)
    extra = config.pop("kv_connector_extra_config", {})
    assert config.pop("kv_connector") == "LMCacheMPConnector"
    assert config.pop("kv_role") in {"kv_both", "kv_producer", "kv_consumer"}
    assert config.pop("kv_connector_module_path", "lmcache.engines.vllm.connector") == "lmcache.engines.vllm.connector"
    assert config == {}
    settings = read_settings(extra)
    assert settings.notes == ()


@pytest.mark.parametrize("page", _named(sorted({command.block.page.relative_to(ROOT) for command in VLLM})))
def test_a_port_in_an_engine_command_is_that_of_a_server_on_the_page(page):
    here = [command for command in COMMANDS if command.block.page == ROOT / page]
    served = {word for c in here if c in SERVERS for word in re.findall(r"--port (\d+)", c.text)} | {"5555"}
    extras = [_transfer_config(command).get("kv_connector_extra_config", {}) for command in here if command in VLLM]
    asked = {str(extra["lmcache.mp.port"]) for extra in extras if "lmcache.mp.port" in extra}
    # the reference of keys shows a port without a server
    assert asked <= served or str(page) == "docs/reference/vllm.md"


PARSE = """
import json, sys
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(prog="vllm")
ServeSubcommand().subparser_init(parser.add_subparsers())
for words in json.loads(sys.argv[1]):
    print(parser.parse_args(words).kv_transfer_config.kv_connector)
"""


@pytest.mark.vllm
def test_a_real_vllm_takes_every_engine_command():
    parsed = subprocess.run(
        [sys.executable, "-c", PARSE, json.dumps([command.words[1:] for command in VLLM])],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert parsed.returncode == 0, parsed.stderr
    assert parsed.stdout.split().count("LMCacheMPConnector") == len(VLLM)


# -------------------------------------------------------------------------------------------------------------- python


@pytest.mark.parametrize("block", _named(PYTHON))
def test_a_program_runs_and_prints_what_it_should(block, server, monkeypatch):
    for example in sorted(ROOT.glob("examples/*/src")):
        monkeypatch.syspath_prepend(example)
    if "tensorrt_llm" in block.text:
        pytest.importorskip("tensorrt_llm", reason="needs TensorRT-LLM, which there is for GPUs only")
    program = compile(block.text.replace("127.0.0.1:5555", server), str(block), "exec")
    for _ in range(2):  # the second time, the server has everything already
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(program, {"__name__": "snippet"})
        assert printed.getvalue().strip() == block.output.strip()
