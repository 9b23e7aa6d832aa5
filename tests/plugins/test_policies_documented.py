"""docs/policies.md tells the truth: every policy is there, with its paper, and the figures are what replays give."""

import inspect
import os
import re
from pathlib import Path

import pytest

from lmcache.plugins.manager import PluginManager
from lmcache.simulator.capacity import fit_capacities, parse_capacity
from lmcache.simulator.reading import read_trace
from lmcache.simulator.replay import replay

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "policies.md").read_text()
PLUGINS = PluginManager()
TRACES = os.environ.get("LMCACHE_TRACES")


def tables():
    """Hit ratios in the page: trace, capacity, policy and percentage, from transcripts and tables of whole traces."""
    for line in PAGE.splitlines():
        if found := re.match(r"traces/(\S+): ", line) or re.match(r"\| (mooncake_\S+\.jsonl) \|", line):
            trace = found[1]
        if re.match(r"capacity +chunks", line):
            names = line.split()[2:]
        elif line.startswith("| mooncake"):
            names = [cell.strip() for cell in line.split("|")[2:-1]]
        elif found := re.match(r" +(\d+%) +[\d,]+ +(.*)", line):
            yield from ((trace, found[1], *pair) for pair in zip(names, found[2].split(), strict=True))
        elif found := re.match(r"\| (\d+%) \| (.*) \|", line):
            cells = [cell.strip(" *") for cell in found[2].split("|")]
            yield from ((trace, found[1], *pair) for pair in zip(names, cells, strict=True))


FIGURES = list(tables())


def hit_ratio(path, capacity, policy):
    trace = read_trace(path)
    (fitted,) = fit_capacities([parse_capacity(capacity)], trace)
    return f"{100 * replay(trace, fitted, PLUGINS.make_policy(policy)).hit_ratio:.2f}"


@pytest.mark.parametrize("name", PLUGINS.policies())
def test_a_policy_has_a_paragraph_with_the_paper_that_its_class_names(name):
    paragraph = next(part for part in PAGE.split("\n\n") if part.startswith(f"**{name}** "))
    assert "Choose it" in paragraph
    years = set(re.findall(r"\b(?:19|20)\d\d\b", paragraph))
    assert years
    assert years & set(
        re.findall(r"\b(?:19|20)\d\d\b", inspect.getsource(inspect.getmodule(PLUGINS.find_policy(name))))
    )


def test_every_policy_has_figures():
    assert {policy for _, _, policy, _ in FIGURES} - {"opt"} == set(PLUGINS.policies())


@pytest.mark.parametrize("policy", ["LRU", "S3-FIFO", "W-TinyLFU", "prefix-aware"])
def test_the_figures_of_the_traces_that_come_along_are_what_a_replay_gives(policy):
    heads = {trace: (capacity, text) for trace, capacity, name, text in FIGURES if name == policy and "_head" in trace}
    assert len(heads) == 2
    for trace, (capacity, text) in heads.items():
        assert hit_ratio(ROOT / "traces" / trace, capacity, policy) == text, trace


@pytest.mark.skipif(not TRACES, reason="LMCACHE_TRACES names no folder with the whole traces")
@pytest.mark.parametrize(("trace", "capacity", "policy", "text"), [each for each in FIGURES if "_head" not in each[0]])
def test_the_figures_of_the_whole_traces_are_what_a_replay_gives(trace, capacity, policy, text):
    if policy == "opt" or text == "–":
        pytest.skip("the optimum has tests of its own")
    assert hit_ratio(Path(TRACES) / trace, capacity, policy) == text


def test_the_guide_holds_the_whole_example_from_the_class_to_the_published_wheel():
    guide, example = ROOT / "docs" / "guides" / "write-a-policy.md", ROOT / "examples" / "lmcache-fifo-policy"
    text = guide.read_text()
    shown = {(guide.parent / path).resolve() for path in re.findall(r"```\{literalinclude\} (\S+)", text)}
    written = {path for path in example.rglob("*") if path.suffix in {".py", ".toml"} and path.stat().st_size > 0}
    assert shown == {path for path in written if path.name != "__init__.py"}
    assert ":lines:" not in text
    headings = re.findall(r"(?m)^## (.*)", text)
    assert headings == ["What a policy decides", "The class", "Try it", "Measure it", "Publish it", "Test it"]
    assert "pip wheel" in text


def test_the_page_says_which_policy_to_choose_when():
    table = next(part for part in PAGE.split("\n\n") if part.startswith("| your traffic | policy |"))
    assert [name for name in PLUGINS.policies() if not re.search(rf"\b{name}\b", table)] == []
