"""Requests of the reference engine."""

import enum
from collections.abc import Iterator

import attrs
import numpy as np

from lmcache.core.keys import HASH_BYTES, ChainHash, ChainHasher, chain_root
from lmcache.engines.reference.blocks import NULL_BLOCK, BlockKey
from lmcache.engines.reference.pages import Floats
from lmcache.engines.reference.shapes import ModelShape


@attrs.frozen
class Output:
    """What became of one request."""

    tokens: list[int]
    """Generated; short if the request was aborted."""
    logits: list[Floats]
    """For each generated token, the logits it was chosen by."""
    hit_tokens: int
    """Tokens of the prompt that came from the cache server."""
    own_hit_tokens: int
    """Tokens of the prompt that the engine still held itself."""
    computed_tokens: int
    """Tokens that the engine computed, generated ones and repeated ones included."""
    first_token_s: float
    """Seconds from the request's arrival to its first token; 0 if there was none."""
    load_failures: int
    aborted: bool


class State(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    """It has no blocks; what the server holds of it is being asked."""
    LOADING = "loading"
    """Its blocks are being filled by the ranks, and must not be touched."""
    RUNNING = "running"


@attrs.define(eq=False)
class Request:
    """One request, as the scheduler keeps it."""

    id: int
    shape: ModelShape
    prompt_tokens: int
    tokens: list[int]
    """The prompt, then what was generated."""
    max_tokens: int
    salt: str
    arrived: float
    state: State = State.WAITING
    computed: int = 0
    """Tokens whose KV is in blocks."""
    tables: list[list[int]] = attrs.field(factory=list)
    logits: list[Floats] = attrs.field(factory=list)
    reports: set[int] = attrs.field(factory=set)
    """Ranks that have reported on the load."""
    load_failed: bool = False
    loading_to: int = 0
    hit_tokens: int = 0
    own_hit_tokens: int = 0
    computed_tokens: int = 0
    first_token_s: float = 0.0
    load_failures: int = 0
    aborted: bool = False
    keyed: int = 0
    """Tokens whose complete blocks the engine's own prefix cache knows."""
    _hashers: dict[int, ChainHasher] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.clear_tables()

    def clear_tables(self) -> None:
        """Forget all blocks; whoever held them has released them."""
        self.tables = [[] for _ in self.shape.groups]
        self.computed = self.keyed = 0

    @property
    def generated(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def finished(self) -> bool:
        """Whether nothing is left to generate."""
        return self.aborted or self.generated >= self.max_tokens

    def key(self, group: int, block: int) -> BlockKey:
        """Names what the sequence's block `block` of `group` holds, whoever computes it."""
        size = self.shape.groups[group].tokens_per_block
        if size not in self._hashers:
            self._hashers[size] = ChainHasher(chain_root({"salt": self.salt} if self.salt else {}), size)
        hashes = self._hashers[size].extend_to(self.tokens)
        return group, ChainHash(hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES])

    def set_block(self, group: int, number: int, block: int) -> None:
        """Put a block into the table, which grows as far as needed."""
        table = self.tables[group]
        table += [NULL_BLOCK] * (number + 1 - len(table))
        table[number] = block

    def blocks(self) -> Iterator[int]:
        """Every block that the request holds, null blocks included."""
        for table in self.tables:
            yield from table

    def output(self) -> Output:
        """What is handed to whoever asked."""
        return Output(
            self.tokens[self.prompt_tokens :],
            [np.array(row) for row in self.logits],
            self.hit_tokens,
            self.own_hit_tokens,
            self.computed_tokens,
            self.first_token_s,
            self.load_failures,
            self.aborted,
        )
