"""The connector against vLLM's own spec classes, views and factory: what an engine on CPU cannot show."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

PROBE = Path(__file__).with_name("spec_probe.py")
CHECKS = re.findall(r"^    (\w+),$", PROBE.read_text().partition("CHECKS = (")[2], re.MULTILINE)


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    run = subprocess.run([sys.executable, str(PROBE)], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("check", CHECKS)
def test_on_vllms_own_classes(results: dict[str, str], check: str) -> None:
    assert results[check] == "ok", results[check]


def test_no_check_is_left_out(results: dict[str, str]) -> None:
    assert list(results) == CHECKS
