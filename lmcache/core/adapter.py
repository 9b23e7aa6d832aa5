"""What an engine adapter is, as far as everybody but its engine is concerned."""

import abc
from typing import ClassVar


class EngineAdapter(abc.ABC):
    """One engine's way into the cache. Subclass it, return the class from `lmcache_register_engine_adapters`.

    The class itself imports no engine; `module` does, in the engine's own processes. The guide to writing the rest is
    the docstring of `lmcache.engines`.
    """

    engine: ClassVar[str]
    """The engine's name as people write it: `vllm`."""
    module: ClassVar[str]
    """Dotted name of the module that the engine loads."""
    status: ClassVar[str]
    """One sentence: what has been proved, and on what. Shown by `lmcache plugins` and in the docs."""
