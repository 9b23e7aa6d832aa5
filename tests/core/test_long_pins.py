"""Pins of prompts as long as there are: they are asked for on TCP, where all else is short."""

from collections.abc import Callable

import pytest
from core_stand import CELL, PATIENCE_S, RunningServer, prompt

from lmcache.core.client import Client, ServerAddress
from lmcache.core.control import Control
from lmcache.core.protocol import MAX_CHUNKS
from lmcache.errors import Refused

CHUNKS = 1000
"""256,000 tokens in chunks of the usual size."""


def test_a_long_prompt_can_be_pinned(
    serve: Callable[..., RunningServer], connect: Callable[[ServerAddress], Client]
) -> None:
    server = serve(l1_bytes=4 * CHUNKS * CELL)
    link = connect(server.address).link()
    link.commit(link.reserve("", b"", b"".join(prompt(1, CHUNKS)), 0, 0).reservation)
    with Control(server.address, PATIENCE_S) as control:
        for length in (253, 254, CHUNKS):
            pinned = control.pin(link.namespace, b"".join(prompt(1, length)), 60.0)
            assert pinned.tokens == length * link.chunk_size
        longest = b"".join(prompt(1, CHUNKS)) + bytes(16 * (MAX_CHUNKS - CHUNKS))
        assert control.pin(link.namespace, longest, 60.0).tokens == CHUNKS * link.chunk_size
        with pytest.raises(Refused, match=f"a prompt of {MAX_CHUNKS + 1} chunks; {MAX_CHUNKS} can be pinned at once"):
            control.pin(link.namespace, longest + bytes(16), 60.0)
