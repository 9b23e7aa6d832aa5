"""A wait that ends in vain says what it last saw."""

import core_stand
import pytest
from last_seen import last_seen


class Site:
    def __init__(self):
        self.asked = 0

    def counters(self):
        self.asked += 1
        return {"hits": 2, "misses": 0}

    def counter(self, name):
        return self.counters()[name]


def says(counters, name):
    return counters[name] > 0


def test_the_value_beside_what_was_wished_for():
    site = Site()
    assert last_seen(lambda: site.counter("hits") == 3) == "site.counter('hits') == 3, with site.counter('hits') = 2"
    assert site.asked == 1


def test_what_a_function_was_asked_with():
    site, name = Site(), "misses"
    assert last_seen(lambda: says(site.counters(), name)) == (
        "says(site.counters(), name), with says(site.counters(), name) = False, "
        "with site.counters() = {'hits': 2, 'misses': 0}, with name = 'misses'"
    )


def test_every_part_of_what_must_hold_together():
    site, done = Site(), [False]
    assert last_seen(lambda: done[0] and not site.asked) == (
        "done[0] and (not site.asked), with done[0] = False, with site.asked = 0"
    )
    conditions = [lambda each=each: each > 5 for each in (1, 2)]  # two of one lambda, told apart by its default
    assert [last_seen(each) for each in conditions] == ["each > 5, with each = 1", "each > 5, with each = 2"]


def test_of_two_lambdas_in_a_line_the_right_one():
    one, other = (lambda: Site.asked == 1), (lambda: 1 in [2, 3])
    assert (
        last_seen(one)
        == "Site.asked == 1, with Site.asked = AttributeError(\"type object 'Site' has no attribute 'asked'\")"
    )
    assert last_seen(other) == "1 in [2, 3], with [2, 3] = [2, 3]"


def test_what_is_no_lambda_by_its_name():
    site = Site()

    def settled():
        return False

    assert last_seen(settled).endswith("settled")
    assert last_seen(site.counters) == "Site.counters"


def test_a_wait_in_vain_fails_with_it(monkeypatch):
    monkeypatch.setattr(core_stand, "PATIENCE_S", 0.05)
    site = Site()
    with pytest.raises(AssertionError) as error:
        core_stand.wait_until(lambda: site.counter("misses") and (site.counter("hits") == 2), "somebody misses")
    assert str(error.value) == (
        "never came true: somebody misses: site.counter('misses') and site.counter('hits') == 2, "
        "with site.counter('misses') = 0, with site.counter('hits') = 2"
    )
