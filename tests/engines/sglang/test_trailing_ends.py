"""Which lengths can be restored, against what looking at every page would say."""

import random

from lmcache.engines.sglang.trailing import MOST_ENDS, restorable_ends


def by_looking(whole: int, trailing: dict[str, int], held: dict[str, set[int]]) -> list[int]:
    return [
        end
        for end in range(1, whole + 1)
        if all(set(range(max(0, end - count), end)) <= held[name] for name, count in trailing.items())
    ]


def test_without_trailing_pools_any_length_will_do() -> None:
    assert restorable_ends(4, {}, lambda name, pages: 0) == [1, 2, 3, 4]


class Held:
    """What the pools have, and how often they were asked."""

    def __init__(self, pages: dict[str, set[int]]) -> None:
        self.pages = pages
        self.asked = 0

    def leading(self, name: str, pages: range) -> int:
        self.asked += 1
        return next((number for number, page in enumerate(pages) if page not in self.pages[name]), len(pages))


def test_the_longest_lengths_are_found_with_few_questions() -> None:
    source = random.Random(7)
    for _ in range(500):
        whole = source.randrange(0, 40)
        trailing = {name: source.randrange(1, 6) for name in source.sample(["swa", "mamba"], source.randrange(1, 3))}
        held = Held({name: {page for page in range(40) if source.random() < 0.8} for name in trailing})

        assert restorable_ends(whole, trailing, held.leading) == by_looking(whole, trailing, held.pages)[-MOST_ENDS:]
        assert held.asked <= len(trailing) * (whole + 1)
