"""A scripted engine for tests of the command line: stores prompts of tokens on a real server, and looks them up."""

import attrs
from core_stand import PATIENCE_S, wait_until

from lmcache.core.client import Client, ClientSettings, Engine, ServerAddress
from lmcache.core.control import Control
from lmcache.core.hints import NO_HINTS, Hints
from lmcache.core.keys import ChainHasher, chain_root
from lmcache.core.protocol import Placed, Role
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

CHUNK = 16
CELLS = 64
CELL = 4096
SMALL = (
    *("--eviction-policy", "lru", "--chunk-size", str(CHUNK)),
    *("--l1-cell-kb", "4", "--l1-size-gb", repr(CELLS * CELL / (1 << 30))),
)
"""Options of a server of 64 cells that evicts what was used longest ago; a chunk takes one cell."""
GEOMETRY = Geometry((KVGroup(GroupKind.FULL, CHUNK, (CELL,)),))


def tokens(seed: int, chunks: int) -> list[int]:
    """A prompt of so many whole chunks, and a few tokens more."""
    return [seed * 10_000 + number for number in range(chunks * CHUNK + 3)]


@attrs.define
class ScriptedEngine:
    """The worker of one model."""

    port: int
    model: str = "m"
    _client: Client = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        me = Engine({"model": self.model}, GEOMETRY, Role.WORKER)
        self._client = Client(ServerAddress("127.0.0.1", self.port), me, ClientSettings(deadline=30.0))
        self._client.start(wait=30.0)
        # until then a store finds less room than there will be
        wait_until(lambda: self._gauges()["cells_backed"] == self._gauges()["cells_total"])

    @property
    def namespace(self) -> str:
        return self._client.link().namespace.hex()

    def store(self, prompt: list[int], tenant: str = "", salt: str = "", hints: Hints = NO_HINTS) -> list[Placed]:
        """What became of each chunk."""
        link = self._client.link()
        reserved = link.reserve(tenant, b"", _hashes(prompt, salt), 0, 0, hints)
        if reserved.reservation:
            link.commit(reserved.reservation)
        return [Placed(each) for each in reserved.placed]

    def hit(self, prompt: list[int], salt: str = "") -> int:
        """Whole chunks that a lookup hits."""
        link = self._client.link()
        found = link.lookup("", _hashes(prompt, salt), len(prompt) - 1).wait()
        if found.ticket:
            link.drop(found.ticket)
        return found.tokens // CHUNK

    def cells(self, tenant: str) -> int:
        """Cells that the server counts for a tenant with limits."""
        with Control(ServerAddress("127.0.0.1", self.port), PATIENCE_S) as control:
            tenants = {each["tenant"]: each["cells"] for each in control.status()["tenants"]}
        return tenants.get(tenant, 0)

    def close(self) -> None:
        self._client.close()

    def _gauges(self) -> dict[str, int]:
        with Control(ServerAddress("127.0.0.1", self.port), PATIENCE_S) as control:
            return control.status()["gauges"]


def _hashes(prompt: list[int], salt: str) -> bytes:
    return ChainHasher(chain_root({"salt": salt} if salt else {}), CHUNK).extend_to(prompt)
