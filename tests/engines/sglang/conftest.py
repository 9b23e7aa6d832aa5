"""The models that real SGLang engines run in these tests."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.register_assert_rewrite("sglang_stand")


@pytest.fixture(scope="session")
def sglang_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny models."""
    folder = tmp_path_factory.mktemp("models")
    maker = Path(__file__).with_name("tiny_models.py")
    made = subprocess.run([sys.executable, str(maker), str(folder)], check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return folder
