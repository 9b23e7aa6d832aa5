"""A worker's half: copies its rank's pages to the cache within a step, and back on a thread.

Imports neither vLLM nor torch.
"""

from collections.abc import Iterable, Mapping, Sequence

from lmcache.core.client import Client
from lmcache.engines.copying import CopyPlans, Kernels, MakeCopier, NoKernels
from lmcache.engines.storing import StoreOrder, Storer
from lmcache.engines.vllm.loading import Loader
from lmcache.engines.vllm.orders import NULL_BLOCK, LoadOrder
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
    ) -> None:
        kernels = kernels or NoKernels()
        self._client = client
        self._loader = Loader(client, geometry, CopyPlans(geometry, makers), kernels)
        self._storer = Storer(client, geometry, rank, CopyPlans(geometry, makers), kernels, no_block=NULL_BLOCK)

    def load(self, orders: Iterable[LoadOrder]) -> None:
        """Begin loads; called after the step's forward pass was submitted."""
        self._loader.load(orders)

    def store(self, orders: Sequence[StoreOrder], namespace: bytes) -> None:
        """Store within the step; called when its forward pass is done."""
        self._storer.store(orders, namespace)

    def outcomes(self, ended: Iterable[str]) -> tuple[set[str], set[str]]:
        """Loads that have ended since the last call, and the failed ones among them. `ended` requests are forgotten."""
        self._storer.forget(ended)
        return self._loader.outcomes()

    def close(self) -> None:
        """The engine ends."""
        self._loader.close()
        self._client.close()
