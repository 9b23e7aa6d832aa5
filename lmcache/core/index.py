"""The index: namespaces and the tree of chunk nodes in each. Structure only.

`core/cache.py` decides what happens to it.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lmcache.core.hints import Priority
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.geometry.groups import Geometry, KVGroup
from lmcache.geometry.layout import object_bytes, object_cells

if TYPE_CHECKING:  # accounts hold nodes
    from lmcache.core.accounts import Account


# looked up once: of all chunks that are stored, these are read
_NORMAL = Priority.NORMAL
_NEVER = math.inf


class Node:
    """One chunk of one prompt: the entry of the index. A `policy.ChunkNode`."""

    __slots__ = (
        "account",
        "cells",
        "depth",
        "doomed",
        "expires",
        "first_child",
        "hash",
        "held",
        "last_child",
        "live_children",
        "namespace",
        "next_sibling",
        "parent",
        "pins",
        "policy_state",
        "previous_sibling",
        "priority",
        "sealed",
        "shards",
        "tenant",
        "tiers",
        "tiers_since",
        "used",
        "writing",
    )

    def __init__(
        self,
        namespace: "Namespace",
        chain_hash: ChainHash,
        parent: "Node | None",
        tenant: str,
        account: "Account",
    ) -> None:
        self.namespace = namespace
        self.hash = chain_hash
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.tenant = tenant
        self.account = account  # where its cells are counted
        self.priority = _NORMAL
        self.expires = _NEVER  # from then on it is not served; never before what hangs below it
        self.used = 0  # number of its last use, among all uses
        self.cells = 0  # written and being written
        self.sealed = 0  # bit g: every shard of group g is committed, so its object may be read
        self.shards: list[bytes | None] = [None] * namespace.slots  # packed cells of each committed shard
        self.writing = 0  # bit s: slot s is reserved and not committed
        self.pins = 0
        self.held = 0  # of the pins, those of the tiers
        self.tiers: list[int] | None = None  # for each tier, the slots that it is known to hold, as bits
        self.tiers_since = 0.0  # when the first of them was found out
        self.live_children = 0  # children that are not doomed
        self.first_child: Node | None = None  # the oldest
        self.last_child: Node | None = None
        self.next_sibling: Node | None = None
        self.previous_sibling: Node | None = None
        self.doomed = False  # chosen as a victim in the selection that is going on
        self.policy_state: Any = None

    def __repr__(self) -> str:
        return f"<Node {self.hash.hex()[:8]} depth {self.depth} sealed {self.sealed:b} pins {self.pins}>"

    @property
    def key(self) -> bytes:
        """Equal for the same chunk of the same namespace in any of its lives."""
        return self.namespace.digest + self.hash

    @property
    def evictable(self) -> bool:
        """Nobody reads it, nobody writes it, nothing that stays hangs below it, and it has not been chosen yet."""
        return not (self.pins or self.writing or self.live_children or self.doomed)

    @property
    def expires_some_day(self) -> bool:
        """Whether it has a time after which it is not to be kept anywhere."""
        return self.expires < math.inf

    @property
    def empty(self) -> bool:
        """It holds no bytes, nobody is about to give it any, and nothing hangs below it."""
        return not (self.cells or self.writing or self.pins or self.first_child)

    def link(self) -> None:
        """Become the youngest child of the parent, if there is one."""
        parent = self.parent
        if parent is None:
            return
        self.previous_sibling = parent.last_child
        if parent.last_child:
            parent.last_child.next_sibling = self
        else:
            parent.first_child = self
        parent.last_child = self
        parent.live_children += 1

    def unlink(self) -> None:
        """Leave the parent's children."""
        parent = self.parent
        if parent is None:
            return
        if self.previous_sibling:
            self.previous_sibling.next_sibling = self.next_sibling
        else:
            parent.first_child = self.next_sibling
        if self.next_sibling:
            self.next_sibling.previous_sibling = self.previous_sibling
        else:
            parent.last_child = self.previous_sibling
        if not self.doomed:
            parent.live_children -= 1
        self.next_sibling = self.previous_sibling = None

    def doom(self) -> None:
        """Choose as a victim: its parent may be chosen next."""
        self.doomed = True
        if self.parent:
            self.parent.live_children -= 1

    def spare(self) -> None:
        """Undo `doom`."""
        self.doomed = False
        if self.parent:
            self.parent.live_children += 1

    def chain(self) -> Iterator["Node"]:
        """This node and its ancestors, up to the root."""
        node: Node | None = self
        while node:
            yield node
            node = node.parent


class Namespace:
    """Engines whose bytes mean the same: one index, one geometry, one chunk size."""

    def __init__(
        self, digest: NamespaceDigest, facts: dict[str, str], geometry: Geometry, chunk_size: int, cell_bytes: int
    ) -> None:
        self.digest = digest
        self.facts = facts
        """In clear, for status and logs."""
        self.geometry = geometry
        self.chunk_size = chunk_size
        self.cached_groups = geometry.cached_groups
        """Numbers of the groups that are stored; here, because every chunk that is committed asks."""
        self.all_sealed = sum(1 << group for group in self.cached_groups)
        """`Node.sealed` of a chunk that is there in all groups."""
        self.nodes: dict[ChainHash, Node] = {}
        self.cell_bytes = cell_bytes
        self.object_cells = tuple(object_cells(group, chunk_size, cell_bytes) for group in geometry.groups)
        """For each group, the cells of one shard's object."""
        self.object_bytes = tuple(object_bytes(group, chunk_size, cell_bytes) for group in geometry.groups)
        """For each group, bytes of one shard's object from its first cell to the end of its last page."""
        self._first_slot: list[int] = []
        self._of_slot: list[tuple[int, int]] = []
        slots = 0
        for group in geometry.groups:
            self._first_slot.append(slots)
            shards = group.shards if group.cached else 0
            self._of_slot += [(len(self._first_slot) - 1, shard) for shard in range(shards)]
            slots += shards
        self.slots = slots
        """Shards of all cached groups together: the length of `Node.shards`."""

    @property
    def chunk_cells(self) -> int:
        """Cells of one chunk, over all groups and shards."""
        return sum(c * g.shards for c, g in zip(self.object_cells, self.geometry.groups, strict=True))

    def slot(self, group: int, shard: int) -> int:
        """Position of a group's shard in `Node.shards`."""
        return self._first_slot[group] + shard

    def slots_of(self, group: int) -> range:
        """Positions of all shards of a group in `Node.shards`."""
        first = self._first_slot[group]
        return range(first, first + self.geometry.groups[group].shards)

    def group_and_shard(self, slot: int) -> tuple[int, int]:
        """What `slot` was told for that position."""
        return self._of_slot[slot]

    def group_of(self, slot: int) -> KVGroup:
        """The group of a position in `Node.shards`."""
        return self.geometry.groups[self._of_slot[slot][0]]

    def group_committed(self, node: Node, group: int) -> bool:
        """Whether every shard of `group` is committed in `node`."""
        first = self._first_slot[group]
        return None not in node.shards[first : first + self.geometry.groups[group].shards]
