"""The conformance suite finds what is wrong with a policy: each wrong one here fails the test named beside it."""

import itertools
import weakref

import pytest
from hypothesis import Phase, settings

from lmcache.core.policy import EvictionPolicy
from lmcache.plugins.testing import EvictionPolicySuite


class Ordered(EvictionPolicy):
    """Correct, except for its cost; the wrong policies below are this one with one mistake."""

    name = "ordered"

    def __init__(self):
        self.order = {}

    def insert(self, node):
        self.order[node] = None

    def touch(self, nodes):
        for node in nodes:
            del self.order[node]
            self.order[node] = None

    def remove(self, node):
        del self.order[node]

    def victims(self):
        yield from self.order


class TestOrdered(EvictionPolicySuite):
    def make_policy(self):
        return Ordered()


class NameOfTwoWords(Ordered):
    name = "my policy"


class WantsArguments(Ordered):
    def __init__(self, capacity):
        super().__init__()


class YieldsItsSentinel(Ordered):
    def victims(self):
        yield from self.order
        yield None


class TakesEqualChunksForOne(Ordered):
    def insert(self, node):
        self.order[node.tenant, node.depth] = node

    def touch(self, nodes):
        pass

    def remove(self, node):
        self.order.pop((node.tenant, node.depth), None)

    def victims(self):
        yield from self.order.values()


class LosesWhatIsTouched(Ordered):
    def touch(self, nodes):
        for node in nodes[1:]:
            self.order.pop(node, None)


class YieldsWhatIsTouchedTwice(Ordered):
    def __init__(self):
        self.order = []

    def insert(self, node):
        self.order.append(node)

    def touch(self, nodes):
        self.order.extend(nodes)

    def remove(self, node):
        self.order = [each for each in self.order if each is not node]


class NeverForgets(Ordered):
    def remove(self, node):
        pass


class LosesItsEndWhenEmptied(Ordered):
    last = None

    def insert(self, node):
        if self.last is None:
            self.last = node
        elif self.last not in self.order:
            return
        super().insert(node)

    def touch(self, nodes):
        super().touch([node for node in nodes if node in self.order])

    def remove(self, node):
        self.order.pop(node, None)


class ConsumesItsOrder(Ordered):
    def victims(self):
        while self.order:
            yield self.order.popitem()[0]


class ReturnsACollection(Ordered):
    def victims(self):
        return list(self.order)


class OffersOnlyTrunks(Ordered):
    def victims(self):
        parents = {node.parent for node in self.order}
        yield from (node for node in self.order if node in parents)


class RemembersGhosts(Ordered):
    def __init__(self):
        super().__init__()
        self.ghosts = set()

    def remove(self, node):
        super().remove(node)
        self.ghosts.add(node)


class BeginsAnewWhenItHearsTheSize(Ordered):
    def resize(self, cells):
        self.order.clear()


class TakesAChunkForItsFormerLife(Ordered):
    def __init__(self):
        super().__init__()
        self.nodes = {}

    def insert(self, node):
        super().insert(self.nodes.setdefault(node.key, node))

    def touch(self, nodes):
        pass

    def remove(self, node):
        self.order.pop(node, None)


class RemembersEveryKey(Ordered):
    def __init__(self):
        super().__init__()
        self.keys = []

    def remove(self, node):
        super().remove(node)
        self.keys.append(node.key)


class LeavesACycle(Ordered):
    def insert(self, node):
        super().insert(node)
        node.policy_state = [node]


class SharesItsOrder(Ordered):
    everything = {}  # noqa: RUF012  # the mistake

    def __init__(self):
        self.order = self.everything


class Recurses(Ordered):
    def victims(self):
        yield from self.rest(list(self.order), 0)

    def rest(self, nodes, start):
        if start < len(nodes):
            yield nodes[start]
            yield from self.rest(nodes, start + 1)


class SearchesAList(Ordered):
    def __init__(self):
        self.order = []

    def insert(self, node):
        self.order.append(node)

    def touch(self, nodes):
        for node in nodes:
            self.order.remove(node)
            self.order.append(node)

    def remove(self, node):
        self.order.remove(node)


class SortsForEveryVictim(Ordered):
    def victims(self):
        yield from sorted(self.order, key=lambda node: node.depth)


class BringsParentsBack(Ordered):
    def touch(self, nodes):
        super().touch(nodes)
        if nodes and nodes[-1].parent is not None:
            self.order[nodes[-1].parent] = None


class WantsWeakReferences(Ordered):
    def __init__(self):
        self.order = weakref.WeakKeyDictionary()


class WritesOnTheNode(Ordered):
    def insert(self, node):
        super().insert(node)
        node.visited = False


WRONG = [
    (
        NameOfTwoWords,
        "test_its_name_can_be_typed_and_it_is_made_without_arguments",
        "the name 'my policy' is not one word",
    ),
    (YieldsItsSentinel, "test_a_new_policy_knows_no_victims", "1 nodes that were removed or never inserted"),
    (TakesEqualChunksForOne, "test_every_known_node_is_a_victim_exactly_once", "does not yield 1 of the 10 nodes"),
    (LosesWhatIsTouched, "test_touching_neither_loses_nor_adds_a_node", "does not yield 6 of the 8 nodes"),
    (YieldsWhatIsTouchedTwice, "test_touching_neither_loses_nor_adds_a_node", "yields a node more than once"),
    (NeverForgets, "test_a_removed_node_is_no_victim", "1 nodes that were removed or never inserted"),
    (LosesItsEndWhenEmptied, "test_nodes_go_on_after_all_were_removed", "does not yield 4 of the 4 nodes"),
    (
        ConsumesItsOrder,
        "test_giving_up_an_iteration_changes_nothing",
        "victims() yields 0 nodes, 1 of the 6 known ones",
    ),
    (ReturnsACollection, "test_victims_come_one_by_one", "victims() returns a collection"),
    (OffersOnlyTrunks, "test_a_leaf_is_found_as_long_as_there_are_nodes", "offers no leaf among the 32 nodes"),
    (
        RemembersGhosts,
        "test_nothing_keeps_a_removed_node_alive",
        "6 of 6 removed nodes are still referred to, 0 of them",
    ),
    (
        BeginsAnewWhenItHearsTheSize,
        "test_hearing_how_much_l1_holds_loses_no_node",
        "does not yield 5 of the 5 nodes",
    ),
    (
        TakesAChunkForItsFormerLife,
        "test_a_chunk_that_comes_again_is_a_node_of_its_own",
        "2 nodes that were removed or never inserted",
    ),
    (
        RemembersEveryKey,
        "test_what_it_remembers_of_removed_nodes_does_not_grow_for_ever",
        "12000 of 12,000 chunks are remembered, though only 100 are cached",
    ),
    (LeavesACycle, "test_nothing_keeps_a_removed_node_alive", "6 of 6 removed nodes are still referred to, 6 of them"),
    (SharesItsOrder, "test_two_policies_share_nothing", "1 nodes that were removed or never inserted"),
    (SearchesAList, "test_a_call_takes_no_more_steps_when_more_nodes_are_known", "when 2,000 are"),
    (SortsForEveryVictim, "test_a_call_takes_no_more_steps_when_more_nodes_are_known", "when 2,000 are"),
    (BringsParentsBack, "test_no_sequence_of_calls_confuses_it", "1 nodes that were removed or never inserted"),
]

RAISING = [
    (WantsArguments, "test_its_name_can_be_typed_and_it_is_made_without_arguments", TypeError),
    (Recurses, "test_ten_thousand_nodes_are_kept_and_evicted", RecursionError),
    (WantsWeakReferences, "test_every_known_node_is_a_victim_exactly_once", TypeError),
    (WritesOnTheNode, "test_every_known_node_is_a_victim_exactly_once", AttributeError),
]


def suite_of(policy):
    class Suite(EvictionPolicySuite):
        # found is enough here: no minimal example, and the same search every time
        search = settings(EvictionPolicySuite.search, phases=[Phase.generate], derandomize=True, database=None)

        def make_policy(self):
            return policy(4) if policy is WantsArguments else policy()

    return Suite()


@pytest.fixture(autouse=True)
def nothing_shared_yet():
    SharesItsOrder.everything.clear()


@pytest.mark.parametrize(("policy", "test", "finding"), WRONG)
def test_a_wrong_policy_fails_the_test_that_looks_for_its_mistake(policy, test, finding):
    with pytest.raises(AssertionError) as failure:
        getattr(suite_of(policy), test)()
    assert finding in str(failure.value)


@pytest.mark.parametrize(("policy", "test", "error"), RAISING)
def test_a_policy_that_wants_more_than_it_is_given_raises_in_the_suite(policy, test, error):
    with pytest.raises(error):
        getattr(suite_of(policy), test)()


def test_a_suite_that_makes_no_policy_cannot_be_built():
    class Suite(EvictionPolicySuite):
        pass

    with pytest.raises(TypeError, match="make_policy"):
        Suite()


def test_every_test_of_the_suite_catches_a_wrong_policy():
    tests = {name for name in dir(EvictionPolicySuite) if name.startswith("test_")}
    assert {test for _, test, _ in itertools.chain(WRONG, RAISING)} == tests
