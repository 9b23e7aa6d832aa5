"""The pages about redis and object stores tell the truth: every URL on them opens, every option is on them."""

import json
import re
from pathlib import Path

import pytest
from s3_stand import object_store_runtime  # noqa: F401 - a fixture

from lmcache.plugins.manager import PluginManager

pytest.importorskip("redis", reason="redis-py is not installed (extra lmcache[redis])")
pytestmark = pytest.mark.usefixtures("object_store_runtime")

DOCS = Path(__file__).parents[3] / "docs" / "tiers"
PAGES = {"redis": DOCS / "redis.md", "object-store": DOCS / "object-store.md"}
URLS = [url for page in PAGES.values() for url in re.findall(r'--l2 "([^"]+)"', page.read_text())]
ACCOUNT = {"private_key": "", "private_key_id": "", "client_email": "", "disable_oauth": True}


def test_there_are_urls() -> None:
    assert len(URLS) >= 7


@pytest.mark.parametrize("url", URLS)
def test_a_documented_url_opens(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"_env=(\w+)", url):
        monkeypatch.setenv(name, "value")
    for name in re.findall(r"_file=/etc/lmcache/([\w.-]+)", url):
        (tmp_path / name).write_text(json.dumps(ACCOUNT))

    opened = PluginManager().open_tier(url.replace("/etc/lmcache", str(tmp_path)))

    assert str(opened.settings.location).startswith(url.partition(":")[0])
    opened.blobs.tier.close()


@pytest.mark.parametrize(
    ("page", "scheme"), [("redis", "rediss"), ("object-store", "s3"), ("object-store", "gs"), ("object-store", "az")]
)
def test_a_page_shows_the_options_of_its_tier(page: str, scheme: str) -> None:
    assert f"```{{tier-options}} {scheme}\n```" in PAGES[page].read_text()
