"""Writes down what is begun, waited for and finished on a device, and in which order. Imports no torch."""

import contextlib
from collections.abc import Iterator
from typing import Any

from lmcache.engines.copy import Copier


class DeviceOrder:
    """An engine's device that has streams, and does at once what is submitted to it: `Kernels`."""

    memory_node = -1

    def __init__(self) -> None:
        self.seen: list[str] = []

    def settle(self) -> None:
        self.seen.append("wait for the whole device")

    def mark(self, *streams: Any) -> str:
        return "current" + "".join(f" and {stream}" for stream in streams)

    def reached(self, mark: str) -> None:
        self.seen.append(f"wait for {mark}")

    @contextlib.contextmanager
    def behind_step(self, *streams: Any) -> Iterator[None]:
        self.seen.append(f"behind {self.mark(*streams)}")
        yield
        self.seen.append("beside no more")

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        yield

    def maker(self, pages: Any) -> Any:
        """Makes copiers that can overlap."""
        return lambda layout, cell: _Copier(self.seen, Copier(pages, layout, cell))


class _Copier:
    def __init__(self, seen: list[str], copier: Copier) -> None:
        self._seen, self._copier = seen, copier

    def store(self, *arguments: Any) -> None:
        raise AssertionError("one object after another, each waited for")

    load = store

    def begin_store(self, *arguments: Any) -> None:
        self._seen.append("store")
        self._copier.store(*arguments)

    def begin_load(self, *arguments: Any) -> None:
        self._seen.append("load")
        self._copier.load(*arguments)

    def finish(self) -> None:
        self._seen.append("finish")
