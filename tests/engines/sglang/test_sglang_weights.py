"""What SGLang's weights are known by, without SGLang."""

import enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weights_folders import begins_later, safetensors

from lmcache.engines.sglang import identity
from lmcache.engines.sglang.identity import read_model, run_identity, weights_identity


class LoadFormat(enum.StrEnum):
    """As SGLang's."""

    AUTO = "auto"
    RDMA = "rdma"


@pytest.fixture(autouse=True)
def started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process began after all files were written, as an engine's does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "process_beginning", begins_later)


@pytest.mark.parametrize("load_format", ["auto", LoadFormat.AUTO, "safetensors", "sharded_state"])
def test_weights_that_sglang_reads_from_the_models_folder_are_known_by_it(tmp_path: Path, load_format: Any) -> None:
    assert identity_of(tmp_path, load_format).startswith("files ")


@pytest.mark.parametrize("load_format", ["dummy", "remote", "remote_instance", LoadFormat.RDMA, "of tomorrow"])
def test_weights_from_elsewhere_are_this_runs_own(
    tmp_path: Path, load_format: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert identity_of(tmp_path, load_format) == f"run {run_identity()}"
    assert "set lmcache.weights_id" in caplog.text


def identity_of(folder: Path, load_format: Any) -> str:
    model = folder / "model"
    model.mkdir()
    safetensors(model / "model.safetensors", {"w": b"same" * 5000})
    args = SimpleNamespace(model_path=str(model), load_format=load_format)
    return weights_identity(read_model(args, "0.5.23", None), "")
