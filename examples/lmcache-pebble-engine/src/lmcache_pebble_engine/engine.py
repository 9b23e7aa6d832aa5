"""Pebble: a made-up inference engine that is small enough to read. Nothing in here knows lmcache.

One token after another, one layer of attention after another, with a paged KV cache and a prefix cache of its own. What
it asks of an external cache is `ExternalCache`; other engines call that a connector.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

VERSION = "1.0.0"

BLOCK = 8
"""Tokens."""
BLOCKS = 512
LAYERS = 2
WIDTH = 32
VOCABULARY = 256
LONGEST = 2048
STEP = 16
"""Tokens of a request that one step computes at most."""

Floats = npt.NDArray[np.float32]


class Request:
    """One request: a prompt, then what was generated."""

    def __init__(self, name: str, prompt: Sequence[int], max_tokens: int, salt: str) -> None:
        self.name = name
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.salt = salt
        self.table: list[int] = []
        """Block ids: which block of the KV cache holds which tokens."""
        self.computed = 0
        """Tokens whose KV is in the blocks."""
        self.cached = 0
        """Tokens of the prompt that were not computed."""
        self.logits: list[Floats] = []

    @property
    def generated(self) -> list[int]:
        """What was generated so far."""
        return self.tokens[self.prompt_tokens :]


class ExternalCache(Protocol):
    """What Pebble calls, in its only thread."""

    def arrived(self, request: Request) -> None:
        """A request waits for its first step."""

    def hit(self, request: Request) -> int | None:
        """Tokens that could be loaded instead of computed; None: not known yet, ask again in the next step."""

    def load(self, request: Request, hit: int) -> bool:
        """Fill the request's blocks from `request.computed` tokens on up to `hit`. False: they are to be computed."""

    def computed(self, request: Request) -> None:
        """A step has computed something of the request; its blocks are good for `request.computed` tokens."""

    def ended(self, request: Request) -> None:
        """The request is finished or was aborted; its blocks go to others."""

    def step(self) -> None:
        """A step begins."""

    def busy(self) -> bool:
        """Whether it wants another step, although no request is left."""


class Pebble:
    """The engine. Call `add`, then `step` until `busy` is False; or `answer`, which does that."""

    def __init__(self, seed: int = 0) -> None:
        source = np.random.default_rng(seed)
        self.seed = seed
        self.kv = np.zeros((LAYERS, BLOCKS, BLOCK, 2, WIDTH), np.float32)
        self.cache: ExternalCache | None = None
        self._embedding: Floats = source.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
        self._positions: Floats = source.normal(size=(LONGEST, WIDTH)).astype(np.float32)
        self._weights: Floats = source.normal(size=(LAYERS, 4, WIDTH, WIDTH)).astype(np.float32) / np.float32(4)
        self._free = list(range(BLOCKS))
        self._own: dict[tuple[str, tuple[int, ...]], int] = {}
        """Full blocks that nobody uses, by salt and all tokens up to the block's end."""
        self._numbers = itertools.count()
        self._waiting: list[Request] = []
        self._running: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether there is anything to do in a step."""
        return bool(self._waiting or self._running) or (self.cache is not None and self.cache.busy())

    def pages(self) -> list[npt.NDArray[np.uint8]]:
        """The bytes of the KV cache: for each layer, `[block, bytes of its page]`."""
        return list(self.kv.view(np.uint8).reshape(LAYERS, BLOCKS, -1))

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "") -> list[Request]:
        """Answer prompts, all at once."""
        requests = [self.add(prompt, max_tokens, salt) for prompt in prompts]
        while self.busy:
            self.step()
        return requests

    def add(self, prompt: Sequence[int], max_tokens: int, salt: str = "") -> Request:
        """Queue a request."""
        request = Request(f"request {next(self._numbers)}", prompt, max_tokens, salt)
        self._waiting.append(request)
        if self.cache:
            self.cache.arrived(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request, wherever it stands."""
        if request in self._waiting + self._running:
            self._end(request)

    def drop_own_cache(self) -> None:
        """Forget the KV of all that has ended."""
        self._free += self._own.values()
        self._own.clear()

    def step(self) -> None:
        """Admit whom there is room for, then compute some tokens of every request."""
        if self.cache:
            self.cache.step()
        for request in tuple(self._waiting):
            self._admit(request)
        for request in tuple(self._running):
            for _ in range(min(STEP, len(request.tokens) - request.computed)):
                self._compute(request)
            if self.cache:
                self.cache.computed(request)
            if len(request.generated) == request.max_tokens:
                self._end(request)

    def _admit(self, request: Request) -> None:
        hit = self.cache.hit(request) if self.cache else 0
        needed = -(-(request.prompt_tokens + request.max_tokens) // BLOCK)
        if hit is None or needed > len(self._free) + len(self._own):
            return
        self._waiting.remove(request)
        self._running.append(request)
        # one token is computed always: its logits are the answer
        while (request.computed + BLOCK < request.prompt_tokens) and (block := self._take_own(request)) is not None:
            request.table.append(block)
            request.computed += BLOCK
        if needed - len(request.table) > len(self._free):
            self.drop_own_cache()
        request.table += [self._free.pop() for _ in range(needed - len(request.table))]
        if self.cache and hit > request.computed and self.cache.load(request, hit):
            request.computed = hit
        request.cached = request.computed

    def _take_own(self, request: Request) -> int | None:
        return self._own.pop((request.salt, tuple(request.tokens[: request.computed + BLOCK])), None)

    def _end(self, request: Request) -> None:
        (self._running if request in self._running else self._waiting).remove(request)
        if self.cache:
            self.cache.ended(request)
        for number, block in enumerate(request.table):
            key = request.salt, tuple(request.tokens[: (number + 1) * BLOCK])
            if (number + 1) * BLOCK <= request.computed and key not in self._own:
                self._own[key] = block
            else:
                self._free.append(block)

    def _compute(self, request: Request) -> None:
        """One token: its KV goes into its block, and after the last token comes another."""
        position = request.computed
        table, slot = request.table[: position // BLOCK + 1], position % BLOCK
        state = self._embedding[request.tokens[position]] + self._positions[position]
        for layer, (query, key, value, out) in enumerate(self._weights):
            normal = state / np.sqrt(np.mean(state**2))
            self.kv[layer, table[-1], slot] = key @ normal, value @ normal
            seen = self.kv[layer, table].reshape(-1, 2, WIDTH)[: position + 1]
            scores = seen[:, 0] @ (query @ normal) / np.float32(WIDTH**0.5)
            weights = np.exp(scores - scores.max())
            state = state + out @ (weights / weights.sum() @ seen[:, 1])
        request.computed += 1
        if request.computed == len(request.tokens):
            request.logits.append(self._embedding @ state)
            request.tokens.append(int(request.logits[-1].argmax()))
