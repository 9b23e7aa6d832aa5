"""Sizes as users write them, and what they come to."""

import pytest

from lmcache.errors import ConfigError
from lmcache.simulator.capacity import Unit, fit_capacities, parse_capacity

PROMPTS = [[number] for number in range(200)]


@pytest.mark.parametrize(
    ("text", "unit", "amount"),
    [
        ("2%", Unit.SHARE, 0.02),
        ("0.5 %", Unit.SHARE, 0.005),
        ("8GB", Unit.BYTES, 8 << 30),
        ("1.5 GiB", Unit.BYTES, 1.5 * (1 << 30)),
        ("500mb", Unit.BYTES, 500 << 20),
        ("2TB", Unit.BYTES, 2 << 40),
        ("5000", Unit.CHUNKS, 5000),
        ("5000 chunks", Unit.CHUNKS, 5000),
    ],
)
def test_a_size_is_read(text, unit, amount) -> None:
    wish = parse_capacity(text)
    assert (wish.text, wish.unit, wish.amount) == (text, unit, amount)


@pytest.mark.parametrize("text", ["", "much", "-5", "0", "0%", "8 bananas", "GB", "1e9", "nan", "5%GB"])
def test_what_is_no_size_is_refused_with_what_to_write(text) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_capacity(text)
    assert str(refusal.value) == (
        f"--capacity {text!r} is no size; write a share of all distinct chunks like 2%, bytes like 8GB, or a number of "
        "chunks like 5000"
    )


def test_shares_chunks_and_bytes_come_to_cells(make_trace) -> None:
    trace = make_trace(*PROMPTS, *PROMPTS, bytes_per_token=2048)
    found = fit_capacities([parse_capacity(text) for text in ("5%", "1.2%", "50", "0.25GB")], trace)

    assert [(size.cells, size.chunks, size.bytes) for size in found] == [
        (10, 10, 10 << 20),
        (2, 2, 2 << 20),
        (50, 50, 50 << 20),
        (256, 256, 256 << 20),
    ]


def test_bytes_need_the_size_of_a_token(make_trace) -> None:
    trace = make_trace(*PROMPTS)
    with pytest.raises(ConfigError) as refusal:
        fit_capacities([parse_capacity("8GB")], trace)
    assert str(refusal.value) == (
        f"--capacity 8GB is in bytes, and {trace.name} does not say how large its chunks are; give --bytes-per-token "
        "as well, the KV bytes of a token over all layers and ranks, or write a share like 2%"
    )


def test_less_than_a_server_would_take_is_refused(make_trace) -> None:
    trace = make_trace(*PROMPTS)
    with pytest.raises(ConfigError) as refusal:
        fit_capacities([parse_capacity("0.6%")], trace)
    assert str(refusal.value) == (
        f"--capacity 0.6% is 1 chunks of {trace.name}, and a server needs room for 2; give more"
    )
