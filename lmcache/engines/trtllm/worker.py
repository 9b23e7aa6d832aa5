"""A worker's half: copies its rank's pages to the cache within a step, and back before or beside it.

Imports neither the engine nor torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmcache.core.client import Client
from lmcache.engines.copying import CopyPlans, Kernels, MakeCopier, NoKernels
from lmcache.engines.storing import Storer
from lmcache.engines.trtllm.describe import Shape
from lmcache.engines.trtllm.loading import Loader, Pages
from lmcache.engines.trtllm.orders import BAD_PAGE, LoadOrder, StepOrders
from lmcache.errors import LoadFailed


class WorkerSide:
    """One rank. The executor's thread calls it; loads of parked requests run on a thread of the loader's."""

    def __init__(
        self,
        client: Client,
        shape: Shape,
        rank: int,
        makers: Mapping[int, MakeCopier],
        kernels: Kernels | None = None,
    ) -> None:
        kernels = kernels or NoKernels()
        geometry = shape.geometry
        self._client = client
        self._kernels = kernels
        self._pages = Pages(client, shape, CopyPlans(geometry, makers))
        self._loader = Loader(Pages(client, shape, CopyPlans(geometry, makers)), kernels)
        self._storer = Storer(
            *(client, geometry, rank, CopyPlans(geometry, makers), kernels), no_block=BAD_PAGE, fleeting=shape.fleeting
        )
        self._loading: dict[int, int] = {}
        self._parked: set[int] = set()
        self._loaded: set[int] = set()
        self._saving: set[int] = set()
        self._prefixes: list[int] = []

    def load(self, orders: Sequence[LoadOrder], *streams: Any) -> None:
        """Do the loads that the step counts on, and begin the others. Called when the step begins.

        Forward passes are submitted to the current stream and `streams`. Raises LoadFailed: the engine counts these
        tokens as computed, so it must not go on.
        """
        parked = [order for order in orders if order.parked]
        for order in parked:
            self._loading[order.request] = self._loading.get(order.request, 0) + 1
        self._loader.load(parked, *streams)
        waited_for = [order for order in orders if not order.parked]
        if waited_for:
            # requests that had these blocks before may still be written by what was submitted for them
            with self._kernels.behind_step(*streams):
                for order in waited_for:
                    self._pages.fill(order)
        self._prefixes.extend(order.reservation for order in waited_for if order.reservation is not None)

    def store(self, orders: StepOrders, *streams: Any) -> None:
        """Store within the step; called when its forward pass is submitted. When it returns, the pages are read."""
        self._storer.forget(orders.ended)
        self._storer.store(orders.stores, orders.namespace, *streams)

    def finished(self, saving: Iterable[int], loading: Iterable[int]) -> tuple[list[int], list[int]]:
        """Requests whose blocks may go, and parked requests that are loaded, of those that the engine has named so far.

        Raises LoadFailed for a parked request that was not loaded: TensorRT-LLM has no other way to be told.
        """
        self._saving.update(saving)
        self._parked.update(loading)
        self._take_ended()
        saved = {request for request in self._saving if request not in self._loading}
        loaded = self._parked & self._loaded
        self._saving -= saved
        self._parked -= loaded
        self._loaded -= loaded | saved
        return sorted(saved), sorted(loaded)

    def finished_prefixes(self) -> list[int]:
        """Reservations that this rank has loaded since the last call. Raises LoadFailed, as `finished` does."""
        self._take_ended()
        prefixes, self._prefixes = self._prefixes, []
        return prefixes

    def _take_ended(self) -> None:
        for order, failure in self._loader.ended():
            self._loading[order.request] -= 1
            if not self._loading[order.request]:
                del self._loading[order.request]
            if failure is not None and order.request not in self._saving:
                raise (
                    failure
                    if isinstance(failure, LoadFailed)
                    else LoadFailed(
                        f"request {order.request} could not be loaded: {failure!r}", remedy="see the log of this worker"
                    )
                )
            if order.reservation is None:
                self._loaded.add(order.request)
            else:
                self._prefixes.append(order.reservation)

    def close(self) -> None:
        """The engine ends."""
        self._loader.close()
        self._client.close()
