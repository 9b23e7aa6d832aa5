"""The tree of chunk nodes: links, counts of children, and sizes of namespaces."""

from lmcache.core.accounts import Account
from lmcache.core.index import Namespace, Node
from lmcache.core.keys import ChainHash, NamespaceDigest
from lmcache.geometry.groups import Geometry, GroupKind, KVGroup

GEOMETRY = Geometry(
    (
        KVGroup(GroupKind.FULL, 16, (4096, 4096), shards=2),
        KVGroup(GroupKind.SCRATCH, 0, ()),
        KVGroup(GroupKind.SLIDING_WINDOW, 16, (3000,), window=32),
    ),
    ranks=2,
)


def namespace() -> Namespace:
    return Namespace(NamespaceDigest(b"n" * 16), {"model": "m"}, GEOMETRY, 64, 4096)


def node(space: Namespace, name: bytes, parent: Node | None = None) -> Node:
    made = Node(space, ChainHash(name * 16), parent, "tenant", Account("tenant"))
    made.link()
    return made


def children(parent: Node) -> list[Node]:
    found = []
    child = parent.first_child
    while child:
        found.append(child)
        child = child.next_sibling
    return found


def test_a_namespace_knows_the_cells_of_every_object_and_chunk() -> None:
    space = namespace()

    # 4 blocks of 2 layers of 4096 bytes; none of scratch; 2 blocks of 3000 bytes, one a cell
    assert space.object_cells == (8, 0, 2)
    assert space.chunk_cells == 2 * 8 + 2
    assert space.slots == 3
    assert [space.slot(0, 0), space.slot(0, 1), space.slot(2, 0)] == [0, 1, 2]


def test_a_group_is_committed_when_all_of_its_shards_are() -> None:
    space = namespace()
    chunk = node(space, b"a")
    chunk.shards[1] = b"\0\0\0\0"
    assert not space.group_committed(chunk, 0)
    chunk.shards[0] = b"\1\0\0\0"

    assert space.group_committed(chunk, 0)
    assert not space.group_committed(chunk, 2)


def test_nodes_know_their_depth_their_chain_and_their_children_in_order_of_age() -> None:
    space = namespace()
    root = node(space, b"r")
    a, b, c = (node(space, name, root) for name in (b"a", b"b", b"c"))
    leaf = node(space, b"l", b)

    assert (root.depth, b.depth, leaf.depth) == (0, 1, 2)
    assert list(leaf.chain()) == [leaf, b, root]
    assert children(root) == [a, b, c]
    assert (root.first_child, root.last_child, root.live_children) == (a, c, 3)


def test_any_child_may_leave_and_the_others_stay_linked() -> None:
    space = namespace()
    for leaving in range(3):
        root = node(space, b"r")
        kids = [node(space, name, root) for name in (b"a", b"b", b"c")]
        kids[leaving].unlink()
        kept = [kid for number, kid in enumerate(kids) if number != leaving]

        assert children(root) == kept
        assert (root.first_child, root.last_child, root.live_children) == (kept[0], kept[1], 2)
        for kid in kept:
            kid.unlink()
        assert (root.first_child, root.last_child, root.live_children) == (None, None, 0)


def test_a_doomed_child_counts_no_more_whether_it_is_spared_or_leaves() -> None:
    space = namespace()
    root = node(space, b"r")
    a = node(space, b"a", root)
    root.cells = a.cells = 1
    assert (root.evictable, a.evictable) == (False, True)
    a.doom()
    assert (root.evictable, a.evictable, root.live_children) == (True, False, 0)
    a.spare()
    assert (root.evictable, a.evictable, root.live_children) == (False, True, 1)
    a.doom()
    a.unlink()

    assert root.live_children == 0


def test_a_node_that_is_read_written_or_followed_is_neither_evictable_nor_empty() -> None:
    space = namespace()
    chunk = node(space, b"a")
    assert chunk.empty
    for field in ("pins", "writing"):
        setattr(chunk, field, 1)
        assert not chunk.evictable
        assert not chunk.empty
        setattr(chunk, field, 0)
    node(space, b"b", chunk)

    assert not chunk.evictable
    assert not chunk.empty


def test_sizing_a_namespace_costs_nothing_however_large_its_pages_are() -> None:
    """A server sizes objects for whoever registers; a page of 2^60 bytes must not take it time or memory."""
    geometry = Geometry((KVGroup(GroupKind.FULL, 1, (1 << 60,)),))

    assert Namespace(NamespaceDigest(b"n" * 16), {}, geometry, 1, 4096).object_cells == (1 << 48,)


def test_a_chunk_has_the_key_of_its_former_life_and_no_other_chunk_or_namespace_has_it() -> None:
    space, other = namespace(), Namespace(NamespaceDigest(b"o" * 16), {}, GEOMETRY, 64, 4096)
    first = node(space, b"a")
    first.unlink()

    assert node(space, b"a").key == first.key
    assert len({first.key, node(space, b"b").key, node(other, b"a").key}) == 3
