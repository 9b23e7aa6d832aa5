"""A comparison of long values that fails says at once where they differ."""

import random

import pytest

LONG = random.Random(1).randbytes(1 << 20)
OTHER = LONG[:700_000] + b"\0" + LONG[700_001:]
WHERE = "1,048,576 bytes are not the 1,048,576 bytes expected, from offset 700,000 on: "


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (LONG, OTHER, WHERE),
        (memoryview(LONG), bytearray(OTHER), WHERE),
        ([b"", [LONG]], [b"", [OTHER]], f"[1]: [0]: {WHERE}"),
        ((7, LONG, "%d\n"), (7, LONG, "%s"), r"[2]: '%d\n' where '%s' was expected"),
        ({"a": 1, "b": LONG}, {"a": 1, "b": OTHER}, f"['b']: {WHERE}"),
        ({"b": LONG}, {"a": OTHER}, "{'b': b'"),
        (list(range(5000)), [*range(4000), 7], "[4000]: 4000 where 7 was expected"),
        (
            list(range(5000)),
            list(range(4000)),
            "5,000 items where 4,000 were expected; as far as both go they are equal",
        ),
        (LONG, None, " where None was expected"),
    ],
    ids=["bytes", "buffers", "in lists", "in a tuple", "in a dict", "other keys", "numbers", "fewer", "nothing"],
)
def test_the_place_is_named(one, other, said, monkeypatch):
    monkeypatch.setenv("CI", "true")  # pytest shows all that it has to show there
    with pytest.raises(AssertionError) as error:
        assert one == other
    assert said in str(error.value)
    assert len(str(error.value)) < 1000


def test_short_values_are_shown_as_pytest_does():
    with pytest.raises(AssertionError) as error:
        assert [1, 2, 3] == [1, 2, 4]
    assert "At index 2 diff: 3 != 4" in str(error.value)
