"""What a demonstration of an engine is: the main job, once cold and once served from the cache.

`lmcache demo --engine NAME` imports `lmcache.engines.NAME.demo`, starts a server with `L1_GB` gigabytes, and calls
`run(address, on_progress)`, which yields a `DemoRow` for each thing that it shows.
"""

from collections.abc import Callable, Iterator
from typing import Protocol

import attrs

Progress = Callable[[str], None]
"""Hears what is done next."""


@attrs.frozen
class DemoRow:
    """One prompt, asked twice."""

    model: str
    prompt_tokens: int
    cold_s: float
    """Seconds to the first token, nothing cached."""
    cold_computed: int
    """Tokens that the engine computed, generated ones included."""
    served_s: float
    """Seconds to the first token after the engine has dropped its own cache."""
    served_computed: int
    hit_tokens: int
    """Tokens of the prompt that came from the server."""
    expected_hit_tokens: int
    """What must come from the server, by the geometry's rules."""
    same: bool
    """Whether both answers are equal: tokens, and logits as far as the engine is exact."""

    @property
    def good(self) -> bool:
        """Whether the cache did its job."""
        return self.same and self.hit_tokens == self.expected_hit_tokens


class Demo(Protocol):
    """A module `lmcache.engines.NAME.demo`."""

    L1_GB: float
    """L1 of the server that it wants, in GB."""

    def run(self, address: str, on_progress: Progress) -> Iterator[DemoRow]:
        """Run the main job against the server at `address`."""
