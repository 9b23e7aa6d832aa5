"""What holds between any two calls of `Cache`, checked. For tests and post-mortems: takes time in the cache's size."""

from lmcache.core.cache import Cache
from lmcache.core.cells import unpack_cells
from lmcache.core.index import Node


def check_invariants(cache: Cache) -> None:
    """Raise RuntimeError, with the numbers, if a cell, a pin or a node is not accounted for exactly once."""
    cache.allocator.validate()
    nodes = [node for namespace in cache.namespaces.values() for node in namespace.nodes.values()]
    owned = [cell for node in nodes for packed in filter(None, node.shards) for cell in unpack_cells(packed)]
    reserved = [
        cell
        for reservation in cache.reservations.values()
        for _, _, packed in reservation.objects
        for cell in unpack_cells(packed)
    ]
    counted = len(owned) + len(reserved)
    if len({*owned, *reserved}) != counted or counted != cache.allocator.used:
        raise RuntimeError(f"{len(owned)} committed and {len(reserved)} reserved cells, {cache.allocator.used} used")
    for node in nodes:
        _check_node(node)
    pins = sum(node.pins for node in nodes)
    held = sum(1 for ticket in cache.tickets.values() for node in ticket.nodes if node)
    if pins != held:
        raise RuntimeError(f"{pins} pins for {held} nodes held by {len(cache.tickets)} tickets")


def _check_node(node: Node) -> None:
    if node.namespace.nodes.get(node.hash) is not node or node.doomed:
        raise RuntimeError(f"{node} is not in its index, or left doomed by a selection")
    if node.parent and node.namespace.nodes.get(node.parent.hash) is not node.parent:
        raise RuntimeError(f"{node} hangs below a chunk that is not in the index")
    for group in node.namespace.geometry.cached_groups:
        if bool(node.sealed >> group & 1) != node.namespace.group_committed(node, group):
            raise RuntimeError(f"{node}: group {group} is sealed and incomplete, or complete and not sealed")
    if node.empty:
        raise RuntimeError(f"{node} holds nothing and was not pruned")
