"""The built site: it builds without a warning, its links lead somewhere, and its tables have everything."""

import html.parser
import importlib
import inspect
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import attrs
import click
import pytest

from lmcache import errors
from lmcache.cli.main import COMMANDS
from lmcache.cli.metric_families import FAMILIES
from lmcache.core import hookspecs, protocol
from lmcache.core.adapter import Validation
from lmcache.core.metrics import GAUGES, Counters
from lmcache.engines.vllm import adapter, settings, wishes
from lmcache.geometry.groups import GroupKind
from lmcache.plugins.manager import PluginManager

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in p.parts)]


class _Page(html.parser.HTMLParser):
    """Ids and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.drawings = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.ids.add(found.get("id") or "")
        self.links += [found[name] or "" for name in ("href", "src") if name in found]
        self.drawings += tag == "svg" and found.get("role") == "img"


@pytest.fixture(scope="session")
def pages(site):
    return {path: _Page(path.read_text()) for path in site.rglob("*.html")}


def test_every_internal_link_leads_somewhere(site, pages):
    broken = []
    for path, page in pages.items():
        for link in page.links:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            file = (path.parent / unquote(target.path)).resolve() if target.path else path
            missing = target.fragment and file in pages and unquote(target.fragment) not in pages[file].ids
            if not file.exists() or missing:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_every_page_can_be_reached_from_the_navigation(site, pages):
    reached = {(site / link).resolve() for link in pages[site / "index.html"].links if urlsplit(link).path == link}
    written = {
        (site / page.relative_to(ROOT / "docs")).with_suffix(".html")
        for page in SOURCES[1:]
        if page.name != "index.md" or page.parent.name != "docs"
    }
    assert written <= reached


def test_links_of_the_readme_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text())
    assert len(links) > 5
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_every_drawing_is_shown(pages):
    drawings = list((ROOT / "docs" / "drawings").glob("*.svg"))
    assert sum(page.drawings for page in pages.values()) == len(drawings) == 4


def _options(command: str) -> set[str]:
    module = importlib.import_module(f"lmcache.cli.{command.replace('-', '_')}")
    found: click.Command = getattr(module, command.replace("-", "_"))
    commands = found.commands.values() if isinstance(found, click.Group) else [found]
    parameters = [parameter for each in commands for parameter in each.params]
    return {option for parameter in parameters for option in parameter.opts if option.startswith("--")}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_its_section_with_all_of_its_options_and_no_others(command, site):
    text = (site / "reference" / "command-line.html").read_text()
    section = text.partition(f'<section id="lmcache-{command}">')[2].partition("</section>")[0]
    written = set(re.findall(r"--[a-z][a-z0-9-]+", re.sub(r"<[^>]+>", "", section)))
    assert _options(command) <= written
    assert written - _options(command) - {"--eviction-policy"} == set()


def test_the_reference_has_every_number(site):
    text = (site / "reference" / "metrics.html").read_text()
    names = [*GAUGES, *(field.name for field in attrs.fields(Counters))]
    assert [name for name in names if f">{name}<" not in text] == []


def test_the_page_on_monitoring_has_every_metric_and_asks_for_no_other(site):
    text = (site / "operations" / "monitoring.html").read_text()
    names = {family.name for family in FAMILIES}
    assert {name for name in names if f">{name}<" not in text} == set()
    page = (ROOT / "docs" / "operations" / "monitoring.md").read_text()
    asked = set(re.findall(r"\blmcache_\w+", page)) - {"lmcache_"}
    assert len(asked) > 15
    assert asked - names == set()


def test_the_configuration_of_prometheus_is_yaml():
    yaml = pytest.importorskip("yaml", reason="comes with what builds the docs")
    page = (ROOT / "docs" / "operations" / "monitoring.md").read_text()
    scraping, alerts = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    (job,) = scraping["scrape_configs"]
    assert job["static_configs"] == [{"targets": [_default("metrics", "listen")]}]
    (group,) = alerts["groups"]
    explained = re.findall(r"(?m)^(Lmcache\w+)\n: ", page)
    assert [rule["alert"] for rule in group["rules"]] == explained
    assert f'up{{job="{job["job_name"]}"}}' in group["rules"][0]["expr"]


def _default(command: str, name: str) -> object:
    module = importlib.import_module(f"lmcache.cli.{command}")
    (found,) = [parameter.default for parameter in getattr(module, command).params if parameter.name == name]
    return found


def test_the_reference_has_every_error(pages, site):
    tree = [value for value in vars(errors).values() if inspect.isclass(value)]
    ids = pages[site / "reference" / "errors.html"].ids
    assert [error.__name__ for error in tree if f"lmcache.errors.{error.__name__}" not in ids] == []


def test_the_reference_has_every_message(pages, site):
    messages = protocol.Request | protocol.Reply
    ids = pages[site / "reference" / "protocol.html"].ids
    assert [m.__name__ for m in messages.__args__ if f"lmcache.core.protocol.{m.__name__}" not in ids] == []


def test_the_reference_has_every_hook(site):
    hooks = [name for name in vars(hookspecs) if name.startswith("lmcache_")]
    text = (site / "reference" / "hooks.html").read_text()
    assert [name for name in hooks if name not in text] == []


def test_the_table_of_engines_says_what_their_adapters_say(site):
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "engines" / "index.html").read_text()))
    for each in PluginManager().adapters():
        plain = each.status.replace("`", "")
        assert f"{plain[:1].upper()}{plain[1:].rstrip('.')}." in text, each.engine
        assert each.supported in text, each.engine
        assert each.validation in text, each.engine


def test_every_engine_has_a_page_that_the_table_of_engines_leads_to():
    """And an engine that only a simulator has stood in for is nowhere said to work."""
    index = (ROOT / "docs" / "engines" / "index.md").read_text()
    front = (ROOT / "docs" / "index.md").read_text()
    pages = {"reference": "../how-it-works.md", "vllm": "../reference/vllm.md"}
    for each in PluginManager().adapters():
        page = pages.get(each.engine, f"{each.engine}.md")
        assert f"]({page}" in index, each.engine
        assert (ROOT / "docs" / "engines" / page).exists(), each.engine
        if each.validation is not Validation.ENGINE:
            assert not re.search(rf"^\* - .*engines/{each.engine}\.md.*\n  - works", front, re.MULTILINE), each.engine


def test_the_reference_has_every_key_of_the_connector_and_no_other(site):
    names = [value for name, value in vars(settings).items() if name.isupper() and isinstance(value, str)]
    keys = {name for name in names if name.startswith("lmcache.")} | set(settings.NOTED)
    assert len(keys) >= 8
    keys |= {wishes.PREFIX + name for name in wishes.NAMES}
    text = (site / "reference" / "vllm.html").read_text()
    assert set(re.findall(r">(lmcache\.[a-z_.]+)<", text)) - {"lmcache.engines.vllm.connector"} == keys


# --------------------------------------------------------------------------------------------- what the words rely on


OTHER_PROGRAMS = {
    "vLLM": {
        "--kv-transfer-config",
        "--tensor-parallel-size",
        "--enable-prefix-caching",
        "--no-enable-prefix-caching",
        "--tool-call-parser",
        "--enable-auto-tool-choice",
        "--reasoning-parser",
        "--mamba-cache-mode",
        "--prefix-cache-retention-interval",
    },
    "SGLang": {
        "--enable-cache-report",
        "--enable-hierarchical-cache",
        "--enable-unified-cache-external-linker",
        "--hicache-mem-layout",
        "--hicache-storage-backend",
        "--hicache-storage-backend-extra-config",
        "--model-path",
        "--page-size",
        "--unified-cache-external-linker-backend",
        "--unified-cache-external-linker-config",
    },
    "docker": {"--network", "--user", "--ipc", "--shm-size", "--cap-add"},
    "pip": {"--upgrade", "--no-deps"},
}
"""Flags of others that the docs write."""


def test_every_flag_in_the_docs_exists():
    ours = set.union(*map(_options, COMMANDS)) | {"--debug", "--version", "--help"}
    known = set.union(ours, *OTHER_PROGRAMS.values())
    # decisions tell of what was refused, too, and a transcript shows a misspelt flag
    pages = [page for page in SOURCES if "decisions" not in page.parts]
    written = {
        (page.name, flag)
        for page in pages
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page.read_text())
        if flag not in known
    }
    assert written == {("errors.md", "--evict-policy")}


def test_the_docs_say_what_the_vllm_connector_serves_and_where_it_is_proved():
    """When it serves less, or is proved on more devices, the pages that say otherwise have to change."""
    index = (ROOT / "docs" / "index.md").read_text()
    assert {*adapter.KINDS.values(), GroupKind.SCRATCH} == set(GroupKind)
    assert "vLLM, every kind of KV group, tensor parallel\n  - works" in index
    assert "for CPU" in adapter.VllmAdapter.status
    assert "vLLM on a GPU\n  - not proved" in index


@pytest.mark.parametrize(("name", "kind"), adapter.KINDS.items())
def test_the_docs_have_the_kind_of_every_spec_class(name, kind):
    rows = (ROOT / "docs" / "kv-groups.md").read_text().splitlines()
    assert [row for row in rows if f"`{name}`" in row and f"| {kind.value.replace('_', ' ')} |" in row] != []


def test_pages_name_no_path_of_anybodys_machine():
    private = re.compile(r"/(home|root|work|tmp|Users|mnt|data)/")
    assert [str(page) for page in SOURCES if private.search(page.read_text())] == []


def test_nobody_is_told_to_install_from_the_index():
    told = re.compile(r"^(\$ )?.*pip install .*\blmcache\b", re.MULTILINE)
    blocks = [
        block for page in SOURCES for block in re.findall(r"```(?:bash|console)\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    assert [block for block in blocks if told.search(block)] == []
