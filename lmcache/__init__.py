"""An engine-agnostic KV-cache server for LLM inference, made of plugins.

The packages import one way: `cli` → `engines`, `plugins` → `core` → `geometry`. Importing `lmcache` does no work and
pulls in nothing; see `docs/` for what each package is for.
"""

__version__ = "0.1.0"
