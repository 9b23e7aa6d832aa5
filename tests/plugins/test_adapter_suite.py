"""The conformance suite of engine adapters finds what is wrong with one: each wrong one fails the test named beside it.

All of them are the example's adapter with one mistake.
"""

import contextlib
import inspect
import os
import re
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache.core.client import Client
from lmcache.core.link import Link
from lmcache.plugins.testing import Answer, EngineUnderTest, Weights, served
from lmcache.plugins.testing.adapter import EngineStand
from lmcache.plugins.testing.served import LoadFault, ServerUnderControl

pytestmark = pytest.mark.may_leave("wrong adapters leave things behind")

SOURCE = Path(__file__).parents[2] / "examples" / "lmcache-pebble-engine"


@pytest.fixture(scope="module")
def pebble() -> Iterator[types.SimpleNamespace]:
    """The example's modules, and what its own tests say of it."""
    folders = [str(SOURCE / "src"), str(SOURCE / "tests")]
    sys.path[:0] = folders
    import test_pebble
    from lmcache_pebble_engine import adapter, connector, engine

    yield types.SimpleNamespace(adapter=adapter, connector=connector, engine=engine, tests=test_pebble)
    del sys.path[:2]


def copies_nothing(pebble, patch):
    def load(self, request, hit):
        self._known[request.name].found = None
        return True

    patch.setattr(pebble.connector.LMCache, "load", load)


def copies_into_wrong_blocks(pebble, patch):
    load = pebble.connector.Copier.load
    patch.setattr(
        pebble.connector.Copier,
        "load",
        lambda self, arena, cells, ids, first: load(self, arena, cells, ids[::-1], first),
    )


def believes_what_is_not_confirmed(pebble, patch):
    patch.setattr(Link, "confirm", lambda self, ticket, confirm=Link.confirm: confirm(self, ticket) or True)


def looks_up_what_fails_again_and_again(pebble, patch):
    load = pebble.connector.LMCache.load

    def stubborn(self, request, hit):
        for _ in range(10):
            if load(self, request, hit):
                return True
            self._drop(self._known[request.name])
            self.arrived(request)
            while self.hit(request) is None:
                pass
        return False

    patch.setattr(pebble.connector.LMCache, "load", stubborn)


def raises_when_a_load_fails(pebble, patch):
    load = pebble.connector.LMCache.load

    def strict(self, request, hit):
        if not load(self, request, hit):
            raise RuntimeError("a load has failed")
        return True

    patch.setattr(pebble.connector.LMCache, "load", strict)


def stores_the_first_chunk_only(pebble, patch):
    store = pebble.connector.Storer.store
    patch.setattr(
        pebble.connector.Storer, "store", lambda self, orders, ns: orders[0].first or store(self, orders[:1], ns)
    )
    patch.setattr(pebble.engine, "STEP", 32)


def stores_after_the_blocks_have_changed(pebble, patch):
    store = pebble.connector.Storer.store

    def late(self, orders, namespace):
        numbers = orders[0].blocks[0]
        pebble.tests.PebbleUnderTest.latest.kv[:, numbers] += 1
        store(self, orders, namespace)
        pebble.tests.PebbleUnderTest.latest.kv[:, numbers] -= 1

    patch.setattr(pebble.connector.Storer, "store", late)


def knows_no_salt(pebble, patch):
    patch.setattr(pebble.connector, "chain_root", lambda content, root=pebble.connector.chain_root: root({}))


def names_weights_by_the_model(pebble, patch):
    engine = pebble.connector.Engine
    patch.setattr(pebble.connector, "Engine", lambda facts, *more: engine({**facts, "weights": facts["model"]}, *more))


def hashes_chunks_without_what_comes_before(pebble, patch):
    class Hasher(pebble.connector.ChainHasher):
        def _link(self, start, tokens):
            self._last = b"always the same"
            return super()._link(start, tokens)

    patch.setattr(pebble.connector, "ChainHasher", Hasher)


def keeps_tickets_of_what_it_does_not_load(pebble, patch):
    patch.setattr(pebble.connector.LMCache, "_drop", lambda self, known: None)


def forgets_lookups_of_aborted_requests(pebble, patch):
    patch.setattr(pebble.connector.LMCache, "step", lambda self: self._abandoned.clear())


def never_commits(pebble, patch):
    patch.setattr(Link, "commit", lambda self, reservation: None)


def needs_a_server(pebble, patch):
    start = pebble.connector.LMCache.__init__

    def needy(self, *arguments):
        start(self, *arguments)
        self._worker.link()

    patch.setattr(pebble.connector.LMCache, "__init__", needy)


def cannot_do_without_a_server(pebble, patch):
    patch.setattr(pebble.connector.contextlib, "suppress", lambda *kinds: contextlib.nullcontext())


def stays_with_its_first_server(pebble, patch):
    links = {}
    link = pebble.connector.Client.link
    patch.setattr(
        pebble.connector.Client,
        "link",
        lambda self: links.setdefault(self, None) or links.update({self: link(self)}) or links[self],
    )


def does_not_leave(pebble, patch):
    patch.setattr(pebble.connector.LMCache, "close", lambda self: None)


def fails_when_refused(pebble, patch):
    def arrived(self, request, arrived=pebble.connector.LMCache.arrived):
        if refusal := self._scheduler.refusal or self._worker.refusal:
            raise refusal
        arrived(self, request)

    patch.setattr(pebble.connector.LMCache, "arrived", arrived)


def says_it_was_cached(pebble, patch):
    patch.setattr(pebble.tests.PebbleUnderTest, "generate", _boasting(pebble.tests.PebbleUnderTest.generate))


def _boasting(generate):
    def boasting(self, prompts, max_tokens, salt=""):
        return [
            Answer(each.tokens, max(each.cached, 8), each.logprobs)
            for each in generate(self, prompts, max_tokens, salt)
        ]

    return boasting


def has_a_model_that_attends_to_nothing(pebble, patch):
    patch.setattr(
        pebble.engine.np, "exp", lambda scores, exp=pebble.engine.np.exp: exp(scores) * (scores == scores[-1])
    )


def imports_its_engine_to_be_listed(pebble, patch):
    patch.setattr(pebble.adapter.PebbleAdapter, "__module__", "lmcache_pebble_engine.connector")


def does_not_say_what_was_validated(pebble, patch):
    patch.setattr(pebble.adapter.PebbleAdapter, "status", "")


def does_not_say_which_versions(pebble, patch):
    patch.setattr(pebble.adapter.PebbleAdapter, "supported", "")


AGAIN = "a_prompt_that_comes_again_is_served_by_the_hit_rule_and_answered_the_same"
BETWEEN = "a_server_killed_between_requests_costs_the_hits_and_the_next_one_is_used"
FAILS = "a_load_that_fails_is_computed_and_not_tried_for_ever"
WITHOUT = "it_starts_and_serves_without_a_server_and_uses_one_that_comes"
OWN = "what_the_engine_holds_itself_is_neither_loaded_nor_lost"

OTHER = "one answer is .*, the other "
COUNT = r"assert \[[\d, ]*\] == \["
HELD = "it never was so that tickets, reservations, .* are all 0"

WRONG = [
    (copies_nothing, AGAIN, {"chunks": 3, "around": 1}, OTHER),
    (copies_into_wrong_blocks, AGAIN, {"chunks": 1, "around": 1}, OTHER),
    (copies_nothing, "many_prompts_at_once_are_answered_as_each_alone", {}, OTHER),
    (copies_nothing, "prompts_share_the_whole_chunks_before_they_first_differ", {}, OTHER),
    (copies_nothing, "a_full_server_costs_hits_and_no_answer", {}, OTHER),
    (copies_nothing, "another_engine_is_served_what_the_first_has_stored", {}, OTHER),
    (believes_what_is_not_confirmed, FAILS, {"fault": LoadFault.CONFIRM}, COUNT),
    (believes_what_is_not_confirmed, FAILS, {"fault": LoadFault.LAST_RANK}, COUNT),
    (looks_up_what_fails_again_and_again, FAILS, {"fault": LoadFault.OPEN}, "was looked up in a loop"),
    (raises_when_a_load_fails, FAILS, {"fault": LoadFault.CONFIRM}, "a load has failed"),
    (stores_the_first_chunk_only, AGAIN, {"chunks": 3, "around": 0}, COUNT),
    (stores_after_the_blocks_have_changed, AGAIN, {"chunks": 1, "around": 0}, OTHER),
    (knows_no_salt, "salts_share_nothing_and_each_finds_its_own", {}, COUNT),
    (names_weights_by_the_model, "other_weights_share_nothing", {}, COUNT),
    (hashes_chunks_without_what_comes_before, "the_same_tokens_after_others_are_other_chunks", {}, OTHER),
    (keeps_tickets_of_what_it_does_not_load, OWN, {}, HELD),
    (keeps_tickets_of_what_it_does_not_load, FAILS, {"fault": LoadFault.OPEN}, HELD),
    (forgets_lookups_of_aborted_requests, "aborted_requests_leave_nothing_behind", {}, HELD),
    (never_commits, AGAIN, {"chunks": 1, "around": 1}, "in flight"),
    (needs_a_server, WITHOUT, {}, "there is no link to a server"),
    (cannot_do_without_a_server, WITHOUT, {}, "there is no link to a server"),
    (cannot_do_without_a_server, BETWEEN, {}, "no lmcache server at|no link to a server"),
    (stays_with_its_first_server, BETWEEN, {}, COUNT),
    (does_not_leave, "an_engine_that_ends_leaves_nothing_and_the_other_goes_on", {}, "2 clients are registered"),
    (fails_when_refused, "refused_by_the_server_it_serves_without", {}, "chunk size 20 is not a multiple of 8"),
    (says_it_was_cached, AGAIN, {"chunks": 1, "around": -1}, COUNT),
    (
        has_a_model_that_attends_to_nothing,
        "another_first_token_shares_nothing_and_is_answered_differently",
        {},
        "the model does not care",
    ),
    (imports_its_engine_to_be_listed, "it_can_be_listed_without_its_engine", {}, "not in"),
    (does_not_say_what_was_validated, "it_says_what_it_is", {}, "assert ''"),
    (does_not_say_which_versions, "it_says_what_it_is", {}, "which versions of the engine were tested"),
]


@pytest.mark.parametrize(
    ("mistake", "test", "arguments", "words"), WRONG, ids=[f"{mistake.__name__}-{test}" for mistake, test, *_ in WRONG]
)
def test_a_wrong_adapter_fails(pebble, tmp_path, monkeypatch, mistake, test, arguments, words):
    if words not in {OTHER, COUNT}:
        monkeypatch.setattr(served, "PATIENCE_S", 8.0)
        monkeypatch.setattr(ServerUnderControl, "wait_until", _soon_tired(ServerUnderControl.wait_until, words))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE / "src"), os.environ.get("PYTHONPATH", "")]))
    mistake(pebble, monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception), match=f"(?s){words}"):
        _run(pebble, tmp_path, test, arguments)


def _soon_tired(wait_until, words):
    """Waits that end in vain, as these words say, do not wait long."""

    def waiting(self, condition, what, seconds=0.0):
        in_vain = re.search(words, f"it never was so that {what}")
        wait_until(self, condition, what, 1.0 if in_vain else seconds)

    return waiting


def test_an_engine_that_ends_when_a_load_fails_passes_if_its_class_says_so(pebble, tmp_path, monkeypatch):
    monkeypatch.setattr(pebble.tests.TestPromises, "ends_when_a_load_fails", True)
    raises_when_a_load_fails(pebble, monkeypatch)
    _run(pebble, tmp_path, FAILS, {"fault": LoadFault.CONFIRM})
    monkeypatch.undo()
    monkeypatch.setattr(pebble.tests.TestPromises, "ends_when_a_load_fails", True)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        _run(pebble, tmp_path, FAILS, {"fault": LoadFault.CONFIRM})


SERVED = "what_the_engine_holds_itself_is_neither_loaded_nor_lost"


def test_an_engine_that_has_its_links_later_than_the_server_counts_them_is_waited_for(pebble, tmp_path, monkeypatch):
    register = Client._register

    def slow(client):
        link = register(client)
        time.sleep(0.5)
        return link

    monkeypatch.setattr(Client, "_register", slow)
    _run(pebble, tmp_path, SERVED, {})


def test_an_engine_that_cannot_tell_of_its_links_is_tested_as_well(pebble, tmp_path, monkeypatch):
    monkeypatch.delattr(pebble.tests.PebbleUnderTest, "linked")
    _run(pebble, tmp_path, SERVED, {})


def _run(pebble, folder, test, arguments):
    """One test of the suite, as pytest would run it."""
    engines: list[EngineUnderTest] = []
    suite = pebble.tests.TestPromises()
    patched = pebble.tests.PebbleUnderTest

    def start(weights: Weights) -> EngineUnderTest:
        engines.append(suite.start_engine(str(server.address), weights))
        patched.latest = engines[-1].engine
        return engines[-1]

    server = ServerUnderControl(folder)
    call = getattr(suite, f"test_{test}")
    wanted = inspect.signature(call).parameters
    try:
        if not {"stand", "engine"} & set(wanted):
            call()
            return
        stand = EngineStand(server, start)
        given = {"stand": stand, "engine": stand.engine, "server": server}
        if "engine" in wanted:
            stand.ready(*suite._flags())
        call(**{name: value for name, value in given.items() if name in wanted}, **arguments)
        stand.check()
    finally:
        for engine in engines:
            for client in engine.cache.clients:
                client.close()
        server.kill()
