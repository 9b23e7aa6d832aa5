"""What holds between any two calls of `Cache`, checked. For tests and post-mortems: takes time in the cache's size."""

from collections import Counter

from lmcache.core.cache import Cache
from lmcache.core.cells import unpack_cells
from lmcache.core.hints import Priority
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
    writing = Counter((node, slot) for each in cache.reservations.values() for node, slot, _ in each.objects)
    for node in nodes:
        _check_node(node)
        slots = [slot for slot in range(node.namespace.slots) if node.writing >> slot & 1]
        if [writing[node, slot] for slot in slots] != [1] * len(slots):
            raise RuntimeError(f"{node} is being written in slots {slots}, and not by one reservation each")
    if sum(writing.values()) != sum(node.writing.bit_count() for node in nodes):
        raise RuntimeError("a reservation writes to a chunk that is not in the index, or that does not know of it")
    _check_tickets(cache, nodes)
    _check_orphans(cache, nodes)
    _check_accounts(cache, nodes)


def _check_tickets(cache: Cache, nodes: list[Node]) -> None:
    held = Counter(node for ticket in cache.tickets.values() for node in ticket.nodes if node)
    held.update(node for pin in cache.prefix_pins.all for node in pin.nodes)
    for node in {*nodes, *held}:
        if node.pins != held[node] + node.held:
            raise RuntimeError(f"{node} is held {node.pins} times, by {held[node]} tickets and pins")
    for owner in {ticket.owner for ticket in cache.tickets.values()} | cache.pins.keys():
        tickets = [ticket for ticket in cache.tickets.values() if ticket.owner == owner]
        distinct = {node for ticket in tickets for node in ticket.nodes if node}
        pins = cache.pins.get(owner)
        if pins is None or pins.tickets != len(tickets) or pins.nodes != distinct:
            raise RuntimeError(f"owner {owner} has {len(tickets)} tickets on {len(distinct)} chunks, and other pins")


def _check_orphans(cache: Cache, nodes: list[Node]) -> None:
    holes = {node for node in nodes if not node.cells}
    if holes != cache.residents.orphaned.keys():
        raise RuntimeError(f"{len(holes)} chunks without bytes, {len(cache.residents.orphaned)} known as such")


def _check_accounts(cache: Cache, nodes: list[Node]) -> None:
    accounts = cache.residents.accounts
    for account in accounts.all:
        own = {node for node in nodes if node.account is account}
        listed = [node for priority in Priority for node in account.chunks(priority)]
        if set(listed) != own or len(listed) != len(own):
            raise RuntimeError(f"account {account.name!r} lists {len(listed)} chunks, and has {len(own)}")
        if account.cells != sum(node.cells for node in own):
            raise RuntimeError(f"account {account.name!r} counts {account.cells} cells, which is not what they are")
        if account.quota is not None and account.cells > account.quota:
            raise RuntimeError(f"account {account.name!r} holds {account.cells} cells, its quota is {account.quota}")
        if any(node not in account.chunks(node.priority) for node in own):
            raise RuntimeError(f"account {account.name!r} lists a chunk under another priority")
        if any((account in accounts.holders(priority)) != bool(account.chunks(priority)) for priority in Priority):
            raise RuntimeError(
                f"account {account.name!r} has chunks of a priority and is not known for it, or has none"
            )
    if sum(len(account.chunks(priority)) for account in accounts.all for priority in Priority) != len(nodes):
        raise RuntimeError("a chunk is in no account, or in one that is not known any more")
    if accounts.high_cells != sum(node.cells for node in nodes if node.priority is Priority.HIGH):
        raise RuntimeError(f"{accounts.high_cells} cells of high priority are counted, which is not what there are")


def _check_node(node: Node) -> None:
    if node.namespace.nodes.get(node.hash) is not node or node.doomed:
        raise RuntimeError(f"{node} is not in its index, or left doomed by a selection")
    if node.parent and node.namespace.nodes.get(node.parent.hash) is not node.parent:
        raise RuntimeError(f"{node} hangs below a chunk that is not in the index")
    if node.parent and node.parent.expires < node.expires:
        raise RuntimeError(f"{node} hangs below a chunk that expires before it does")
    for group in node.namespace.geometry.cached_groups:
        if bool(node.sealed >> group & 1) != node.namespace.group_committed(node, group):
            raise RuntimeError(f"{node}: group {group} is sealed and incomplete, or complete and not sealed")
    if node.empty:
        raise RuntimeError(f"{node} holds nothing and was not pruned")
    _check_children(node)


def _check_children(node: Node) -> None:
    children = []
    child = node.first_child
    while child:
        children.append(child)
        child = child.next_sibling
    there = {each for each in node.namespace.nodes.values() if each.parent is node}
    if (
        set(children) != there
        or len(children) != len(there)
        or (children[-1] if children else None) is not node.last_child
    ):
        raise RuntimeError(f"{node} lists {len(children)} children, {len(there)} hang below it")
    if node.live_children != len(children):
        raise RuntimeError(f"{node} counts {node.live_children} live children and has {len(children)}")
