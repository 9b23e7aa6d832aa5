"""How the Python interpreter behaves for a while: its cyclic garbage collector, its lock."""

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Only reference counts free memory inside the block.

    For what keeps very many objects and makes no cycles that it leaves: a full collection takes 0.3 s at a million
    chunks, and finds nothing.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def lock_handed_over_after(seconds: float) -> Iterator[None]:
    """Inside the block a thread that runs Python gives others their turn after so long, and not after 5 ms.

    For many threads that do little between waits: what one of them has waited for should not wait for another.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
