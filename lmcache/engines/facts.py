"""Facts of a namespace that are too long to be told in clear: digests that any process comes to. For any engine."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of a model's configuration, less what only tells where it was read and by which library."""
    content = {
        key: value
        for key, value in config.items()
        if key not in ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")
    }
    return digest([json.dumps(content, sort_keys=True, default=_plain)])


def digest(parts: Iterable[str]) -> str:
    """Digest of texts, whatever is in them; no two lists of texts are taken for each other."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part.encode())
    return state.hexdigest()[:32]


def _plain(value: object) -> str:
    """What JSON does not know, as text; never an address in memory, which differs from process to process."""
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
