"""A worker's half: copies its rank's pages to the cache within a step, and back on a thread.

Imports neither vLLM nor torch.
"""

from collections.abc import Iterable, Mapping, Sequence

from lmcache.core.client import Client
from lmcache.engines.copying import CopyPlans, Kernels, MakeCopier, NoKernels
from lmcache.engines.storing import StoreOrder, Storer
from lmcache.engines.vllm.loading import Loader
from lmcache.engines.vllm.orders import NULL_BLOCK, LoadOrder
from lmcache.engines.weight_updates import Updates
from lmcache.geometry.groups import Geometry


class WorkerSide:
    """One rank. vLLM's worker thread calls it; the loads run on the loader's thread."""

    def __init__(
        self,
        client: Client,
        geometry: Geometry,
        rank: int,
        makers: Mapping[int, MakeCopier],
        kernels: Kernels | None = None,
        updates: Updates | None = None,
        *,
        lost: Iterable[str] = (),
    ) -> None:
        """`updates` counts what has become of the weights in this process; None where they stay what they are.

        `lost` are requests whose loads were begun into pages that are no more.
        """
        kernels = kernels or NoKernels()
        self._client = client
        self._updates = updates or Updates()
        self._before = self._updates.count  # of another engine's weights, earlier in this process
        self._known = 0
        self._begun: dict[str, int] = {}
        self._lost = set(lost)
        self._loader = Loader(client, geometry, CopyPlans(geometry, makers), kernels)
        self._storer = Storer(client, geometry, rank, CopyPlans(geometry, makers), kernels, no_block=NULL_BLOCK)

    def load(self, orders: Iterable[LoadOrder], updates: int = 0) -> None:
        """Begin loads; called after the step's forward pass was submitted. `updates` is as in `StepOrders`."""
        orders = list(orders)
        self._known = updates
        self._begun.update((order.request, updates) for order in orders)
        self._loader.load(orders)

    def store(self, orders: Sequence[StoreOrder], namespace: bytes, updates: int = 0) -> None:
        """Store within the step; called when its forward pass is done. `updates` is as in `StepOrders`."""
        if updates == self._updated:
            self._storer.store(orders, namespace)

    def outcomes(self, ended: Iterable[str]) -> tuple[set[str], set[str]]:
        """Loads that have ended since the last call, and the failed ones among them. `ended` requests are forgotten."""
        self._storer.forget(ended)
        done, failed = self._loader.outcomes()
        done, failed, self._lost = done | self._lost, failed | self._lost, set()
        # what was found, or begun to be loaded, before the weights changed is KV of other weights than the model's
        return done, failed | {request for request in done if self._begun.pop(request, 0) != self._updated}

    def news(self) -> int | None:
        """How many updates of the weights there have been, where that is not what the scheduler knows."""
        return self._updated if self._updated != self._known else None

    @property
    def _updated(self) -> int:
        return self._updates.count - self._before

    @property
    def unfinished(self) -> set[str]:
        """Requests that vLLM has still to be told of what became of their loads."""
        return set(self._begun) | self._lost

    def close(self) -> None:
        """The engine ends."""
        self._loader.close()
        self._client.close()
