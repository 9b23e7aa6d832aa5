"""Requests of the simulated executor: what a connector sees of one, and what the executor knows besides."""

import hashlib
from collections.abc import Sequence

import attrs
from trtllm_model import Image, Toy, chain
from trtllm_names import LAYOUTS, SALTED

BAD_PAGE = -1


class Request:
    """`LlmRequest`, as far as connectors look at it in a generation of the interface."""

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        generation: int,
        *,
        salt: str | None = None,
        lora: int | None = None,
        images: Sequence[tuple[list[int], int, int]] = (),
    ) -> None:
        """`images` are hash words, position and length of each."""
        self.request_id = number
        self.tokens = list(prompt)
        if generation >= LAYOUTS:
            self.cache_salt = salt
            self.py_num_connector_matched_tokens = 0
        elif generation >= SALTED:
            self.cache_salt_id = int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little") if salt else None
        self.lora_task_id = lora
        self.multimodal_hashes = [words for words, _, _ in images] or None
        self.multimodal_positions = [start for _, start, _ in images] or None
        self.multimodal_lengths = [length for _, _, length in images] or None
        self.is_dummy_request = self.is_generation_only_request = False

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


@attrs.define(eq=False)
class Run:
    """One request, seen by the executor."""

    request: Request
    prompt_tokens: int
    answer_tokens: int
    weights: str
    images: Sequence[Image]
    domain: str
    """What besides tokens keeps it from sharing pages in the engine."""
    groups: int
    tables: list[list[int]] = attrs.field(factory=list)
    position: int = 0
    """Tokens whose KV is in its pages."""
    computed: int = 0
    """Tokens that the engine found in its own pages."""
    shared: int = 0
    """Leading blocks of its table that are the engine's, not its own."""
    offered: int = 0
    taken: int = 0
    """Of what was offered."""
    waits: bool = False
    """It is parked until its load is done."""
    admitted: bool = False
    told: bool = False
    """It has been in `new_requests`."""
    told_tokens: int = 0
    told_blocks: list[int] = attrs.field(factory=list)
    reservation: int = 0
    loading: bool = False
    """Its pages may be written by the connector now."""
    loaded: bool = False
    """It was parked, and its load has ended."""
    polled: bool = False
    saving: bool = False
    saving_polled: bool = False
    aborted: bool = False
    done: bool = False
    _states: list[bytes] = attrs.field(factory=list)

    @property
    def number(self) -> int:
        return self.request.request_id

    @property
    def answer(self) -> list[int]:
        return self.request.tokens[self.prompt_tokens :]

    def states(self) -> list[bytes]:
        """What each token knows of those before it."""
        if len(self._states) < len(self.request.tokens):
            self._states = chain(self.request.tokens, self.weights, self.images)
        return self._states

    def loadable(self, toy: Toy) -> range:
        """Numbers of the blocks that a load fills."""
        return range(self.computed // toy.tokens_per_block, (self.computed + self.taken) // toy.tokens_per_block)
