"""The conformance suite of eviction policies, one class to derive from, and what it drives them with."""

import abc
import contextlib
import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FrameType
from typing import Any, ClassVar, TypeVar

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from lmcache.core.interpreter import collector_off
from lmcache.core.policy import EvictionPolicy

_UNSEEN = itertools.count()


class FakeNode:
    """A chunk node that belongs to no cache. As in a real one, there is no room for foreign attributes.

    `key` says which chunk it is; without one it is a chunk that nobody has seen before.
    """

    __slots__ = ("_depth", "_key", "_parent", "_priority", "_tenant", "cells", "policy_state")

    def __init__(
        self,
        parent: "FakeNode | None" = None,
        *,
        tenant: str = "",
        cells: int = 1,
        key: Hashable = None,
        priority: int = 0,
    ) -> None:
        self._priority = priority
        self._key = next(_UNSEEN) if key is None else key
        self._parent = parent
        self._depth: int = 0 if parent is None else parent.depth + 1
        self._tenant = tenant
        self.cells = cells
        self.policy_state: Any = None

    @property
    def key(self) -> Hashable:
        """Which chunk it is, in this life and any other."""
        return self._key

    @property
    def parent(self) -> "FakeNode | None":
        """The chunk before it in its prompt."""
        return self._parent

    @property
    def depth(self) -> int:
        """Chunks before it in its prompt."""
        return self._depth

    @property
    def tenant(self) -> str:
        """Who stored it."""
        return self._tenant

    @property
    def priority(self) -> int:
        """What requests said of it."""
        return self._priority


class _WatchedNode(FakeNode):
    """A node whose end is seen, and whose comparisons with others are steps that `_StepCounter` counts."""

    __slots__ = ("__weakref__",)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class _WatchedKey:
    """A key whose end is seen."""


N = TypeVar("N", bound=FakeNode)


def make_chain(length: int, parent: FakeNode | None = None, *, tenant: str = "", cells: int = 1) -> list[FakeNode]:
    """The nodes of a prompt of `length` chunks from root to tail, below `parent` if there is one."""
    return _chain(FakeNode, length, parent, tenant, cells)


def _chain(
    node_class: type[N], length: int, parent: FakeNode | None = None, tenant: str = "", cells: int = 1
) -> list[N]:
    nodes: list[N] = []
    for _ in range(length):
        nodes.append(node_class(nodes[-1] if nodes else parent, tenant=tenant, cells=cells))
    return nodes


class _Driver:
    """Calls a policy as the cache does, and keeps book of the nodes that it must know."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.known: dict[FakeNode, None] = {}
        self.gone: list[Hashable] = []
        """Keys of chunks that left, which may come again."""

    def store(self, nodes: Sequence[FakeNode]) -> None:
        """A request stores a chain, given from its root on."""
        for node in nodes:
            self.policy.insert(node)
            self.known[node] = None
        self.use(nodes[-1])

    def use(self, tail: FakeNode) -> None:
        """A request uses a chunk and what is left of those before it."""
        node: FakeNode | None = tail
        chain = []
        while node is not None:
            chain.append(node)
            node = node.parent
        self.policy.touch([each for each in chain if each in self.known])

    def remove(self, node: FakeNode) -> None:
        """A node leaves the cache."""
        self.policy.remove(node)
        del self.known[node]
        self.gone.append(node.key)

    def evict_leaf(self) -> None:
        """The cache makes room: it takes the first victim that no known node hangs below."""
        parents = {node.parent for node in self.known}
        leaf = next((node for node in self.victims() if node not in parents), None)
        assert leaf is not None, f"victims() offers no leaf among the {len(self.known)} nodes that it should know"
        self.remove(leaf)

    def victims(self, most: int | None = None) -> list[FakeNode]:
        """The policy's first victims: `most`, or as many as there can be and one more."""
        found: list[Any] = list(itertools.islice(self.policy.victims(), len(self.known) + 1 if most is None else most))
        return found

    def check(self) -> None:
        """Victims are the known nodes, each once."""
        found = self.victims()
        strangers = [node for node in found if node not in self.known]
        assert not strangers, f"victims() yields {len(strangers)} nodes that were removed or never inserted"
        assert len(found) == len(set(found)), "victims() yields a node more than once"
        missing = len(self.known) - len(found)
        assert not missing, (
            f"victims() does not yield {missing} of the {len(self.known)} nodes inserted and not removed"
        )


class _StepCounter:
    """Counts steps (bytecodes) of Python code that is called while it traces: unlike time, the same anywhere."""

    def __init__(self) -> None:
        self.steps = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is called inside the block; a debugger or a coverage measurement sees nothing meanwhile."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, _event: str, _argument: object) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self.steps += 1
        return self._trace


class _PolicyMachine(RuleBasedStateMachine):
    """Any sequence of calls that a cache can make, looked at after each of them."""

    make_policy: Callable[[], EvictionPolicy]

    def __init__(self) -> None:
        super().__init__()
        self.driver = _Driver(self.make_policy())

    def _pick(self, number: int) -> FakeNode:
        return list(self.driver.known)[number % len(self.driver.known)]

    @property
    def _any(self) -> bool:
        return bool(self.driver.known)

    @rule(length=st.integers(1, 4), tenant=st.sampled_from(["", "a", "b"]), cells=st.integers(0, 3))
    def store(self, length: int, tenant: str, cells: int) -> None:
        self.driver.store(make_chain(length, tenant=tenant, cells=cells))

    @precondition(lambda self: self._any)
    @rule(number=st.integers(0, 99), length=st.integers(1, 4))
    def store_below(self, number: int, length: int) -> None:
        parent = self._pick(number)
        self.driver.store(make_chain(length, parent, tenant=parent.tenant))

    @precondition(lambda self: self.driver.gone)
    @rule(number=st.integers(0, 99), length=st.integers(1, 4))
    def store_again(self, number: int, length: int) -> None:
        keys = [self.driver.gone.pop(number % len(self.driver.gone)) for _ in range(min(length, len(self.driver.gone)))]
        nodes: list[FakeNode] = []
        for key in keys:
            nodes.append(FakeNode(nodes[-1] if nodes else None, key=key))
        self.driver.store(nodes)

    @rule(cells=st.sampled_from([1, 10, 1000]))
    def grow(self, cells: int) -> None:
        self.driver.policy.resize(cells)

    @precondition(lambda self: self._any)
    @rule(number=st.integers(0, 99))
    def use(self, number: int) -> None:
        self.driver.use(self._pick(number))

    @precondition(lambda self: self._any)
    @rule(number=st.integers(0, 99), cells=st.integers(0, 3))
    def resize(self, number: int, cells: int) -> None:
        self._pick(number).cells = cells

    @precondition(lambda self: self._any)
    @rule()
    def evict_a_leaf(self) -> None:
        self.driver.evict_leaf()

    @precondition(lambda self: self._any)
    @rule(number=st.integers(0, 99))
    def remove(self, number: int) -> None:
        self.driver.remove(self._pick(number))

    @rule(count=st.integers(0, 3))
    def look_at_some_victims(self, count: int) -> None:
        self.driver.victims(count)

    @invariant()
    def victims_are_the_known_nodes(self) -> None:
        self.driver.check()


class EvictionPolicySuite(abc.ABC):
    """What every eviction policy must pass. Derive a class named `Test…` and say how to make the policy."""

    search: ClassVar[settings] = settings(max_examples=50, stateful_step_count=30, deadline=None)
    """How long hypothesis looks for calls that confuse the policy: more `max_examples` look longer."""

    @abc.abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """A new policy that knows no nodes, as the server makes it."""

    def test_its_name_can_be_typed_and_it_is_made_without_arguments(self) -> None:
        policy = type(self.make_policy())
        assert isinstance(policy.name, str), f"name is {policy.name!r}, not a string"
        assert policy.name.split() == [policy.name], f"the name {policy.name!r} is not one word"
        assert isinstance(policy(), EvictionPolicy)

    def test_a_new_policy_knows_no_victims(self) -> None:
        _Driver(self.make_policy()).check()

    def test_every_known_node_is_a_victim_exactly_once(self) -> None:
        driver = _Driver(self.make_policy())
        trunk = make_chain(3)
        driver.store(trunk)
        driver.store(make_chain(4, trunk[-1], tenant="a"))
        driver.store(make_chain(2, trunk[1], tenant="b", cells=9))
        driver.store(make_chain(1))
        driver.check()

    def test_touching_neither_loses_nor_adds_a_node(self) -> None:
        driver = _Driver(self.make_policy())
        first, second = make_chain(5), make_chain(3)
        driver.store(first)
        driver.store(second)
        for tail in (first[-1], second[-1], first[2], first[-1], first[0]):
            driver.use(tail)
            driver.check()
        driver.policy.touch([])
        driver.check()

    def test_a_removed_node_is_no_victim(self) -> None:
        driver = _Driver(self.make_policy())
        nodes = make_chain(5)
        driver.store(nodes)
        for node in (nodes[4], nodes[0], nodes[2]):  # the tail, the root of what follows, one between two others
            driver.remove(node)
            driver.check()

    def test_nodes_go_on_after_all_were_removed(self) -> None:
        driver = _Driver(self.make_policy())
        for _ in range(3):
            nodes = make_chain(4)
            driver.store(nodes)
            driver.check()
            for node in nodes:
                driver.remove(node)
            driver.check()
        driver.store(make_chain(2))
        driver.check()

    def test_giving_up_an_iteration_changes_nothing(self) -> None:
        driver = _Driver(self.make_policy())
        driver.store(make_chain(6))
        for taken in (0, 1, 3):
            found = len(driver.victims(taken))
            assert found == taken, f"victims() yields {found} nodes, {taken} of the 6 known ones were wanted"
            driver.check()

    def test_victims_come_one_by_one(self) -> None:
        policy = self.make_policy()
        _Driver(policy).store(make_chain(2))
        victims = policy.victims()
        assert iter(victims) is victims, (
            "victims() returns a collection; the cache wants an iterator, of one node or two"
        )

    def test_a_leaf_is_found_as_long_as_there_are_nodes(self) -> None:
        driver = _Driver(self.make_policy())
        trunk = make_chain(8)
        driver.store(trunk)
        for depth in (0, 3, 3, 7):
            driver.store(make_chain(6, trunk[depth]))
        while driver.known:
            driver.evict_leaf()
        driver.check()

    def test_nothing_keeps_a_removed_node_alive(self) -> None:
        policy = self.make_policy()
        stays, goes = _chain(_WatchedNode, 2), _chain(_WatchedNode, 6)
        _Driver(policy).store(stays)
        _Driver(policy).store(goes)
        next(policy.victims(), None)
        ends = [weakref.ref(node) for node in goes]
        with collector_off():
            while goes:
                policy.remove(goes.pop())
            kept = sum(end() is not None for end in ends)
            gc.collect()
            cycles = kept - sum(end() is not None for end in ends)
        assert not kept, f"{kept} of {len(ends)} removed nodes are still referred to, {cycles} of them in cycles"

    def test_hearing_how_much_l1_holds_loses_no_node(self) -> None:
        policy = self.make_policy()
        policy.resize(10)
        driver = _Driver(policy)
        for cells in (20, 20, 2_000):
            driver.store(make_chain(5))
            policy.resize(cells)
            driver.check()

    def test_a_chunk_that_comes_again_is_a_node_of_its_own(self) -> None:
        driver = _Driver(self.make_policy())
        for _ in range(4):
            driver.store([FakeNode(key="once"), FakeNode(key="again")])
            driver.use(next(iter(driver.known)))
            driver.check()
            driver.evict_leaf()
            driver.check()
            for node in list(driver.known):
                driver.remove(node)
        driver.check()

    def test_what_it_remembers_of_removed_nodes_does_not_grow_for_ever(self) -> None:
        policy = self.make_policy()
        policy.resize(100)
        driver = _Driver(policy)
        keys: list[weakref.ref[_WatchedKey]] = []
        with collector_off():
            for _ in range(12_000):
                key = _WatchedKey()
                keys.append(weakref.ref(key))
                driver.store([FakeNode(key=key)])
                del key
                if len(driver.known) > 100:
                    driver.remove(*driver.victims(1))
                driver.gone.clear()
            kept = sum(key() is not None for key in keys)
        assert kept <= 6_000, f"{kept} of 12,000 chunks are remembered, though only {len(driver.known)} are cached"

    def test_two_policies_share_nothing(self) -> None:
        one, other = _Driver(self.make_policy()), _Driver(self.make_policy())
        one.store(make_chain(3))
        other.check()
        other.store(make_chain(2))
        one.check()
        other.check()

    def test_ten_thousand_nodes_are_kept_and_evicted(self) -> None:
        driver = _Driver(self.make_policy())
        for _ in range(100):
            driver.store(make_chain(100))
        driver.check()
        for node in driver.victims()[:9_900]:
            driver.remove(node)
        driver.check()

    def test_a_call_takes_no_more_steps_when_more_nodes_are_known(self) -> None:
        few, many = self._steps(500), self._steps(2_000)
        assert many <= 2 * few, f"the same calls take {few} steps when 500 nodes are known, {many} when 2,000 are"

    def test_no_sequence_of_calls_confuses_it(self) -> None:
        machine = type("Machine", (_PolicyMachine,), {"make_policy": staticmethod(self.make_policy)})
        run_state_machine_as_test(machine, settings=self.search)

    def _steps(self, size: int) -> int:
        """What the same few calls cost a policy that knows `size` nodes."""
        driver = _Driver(self.make_policy())
        chains = [_chain(_WatchedNode, 20) for _ in range(size // 20)]
        for chain in chains:
            driver.store(chain)
        counter = _StepCounter()
        with counter.counting():
            for chain in chains[-20:]:
                driver.store(_chain(_WatchedNode, 1))
                driver.use(chain[-1])
                driver.remove(*driver.victims(1))
        return counter.steps
