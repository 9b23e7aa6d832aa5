"""Weights that are exchanged while an engine runs: from then on they are not those that its namespace names.

Engines tell their caches to forget, as users do, and nothing of the reason. So the calls themselves are watched, in the
process that makes them, which is the worker's own. Imports no engine, nor torch.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any


class Updates:
    """A number that changes with the weights of this process. The same on all ranks, for they go in step."""

    def __init__(self) -> None:
        self.count = 0

    def watch(self, owner: type, names: Iterable[str]) -> list[str]:
        """Count calls of these methods of an engine's class from now on. Returns those that it does not have."""
        missing = []
        for name in names:
            call = getattr(owner, name, None)
            if call is None:
                missing.append(name)
            else:
                setattr(owner, name, self._counted(call))
        return missing

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*arguments: Any, **named: Any) -> Any:
            # before as well: one that fails half way has changed something, too
            self.count += 1
            try:
                return call(*arguments, **named)
            finally:
                self.count += 1

        return counted
