"""What the conformance suite of engine adapters drives: an engine under test, as the author of an adapter gives it."""

import abc
import enum
from collections.abc import Sequence

import attrs


@attrs.frozen
class Answer:
    """What an engine answered to one prompt."""

    tokens: tuple[int, ...]
    """Generated, greedily."""
    cached: int
    """Tokens of the prompt that were not computed: they came from the server, or the engine still held them itself."""
    logprobs: tuple[float, ...] = ()
    """Of the generated tokens; or other numbers that show the KV they were computed from, the more the better."""

    def same(self, other: "Answer", tolerance: float) -> bool:
        """Whether this is the same answer: equal tokens, and logprobs that lie no further apart than `tolerance`."""
        return (
            self.tokens == other.tokens
            and len(self.logprobs) == len(other.logprobs)
            and all(abs(a - b) <= tolerance for a, b in zip(self.logprobs, other.logprobs, strict=True))
        )


class Weights(enum.Enum):
    """Which model an engine under test runs."""

    USUAL = "usual"
    OTHER = "other"
    """The same model by name and shape, with other weights: nothing of it may be shared with the usual one."""


class EngineUnderTest(abc.ABC):
    """One running engine with the adapter. Give its client patient deadlines (5 s): test machines are busy.

    One thread at a time calls it, not always the same one.
    """

    clients: int
    """Connections that it has registered at the server when all is well: a scheduler's, and one for each rank."""

    can_abort: bool = False
    """Whether `abort_after` is there."""

    can_be_killed: bool = False
    """Whether `kill` is there."""

    @abc.abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str = "") -> list[Answer]:
        """Answer prompts, all of them at once, greedily; `salt` is what keeps tenants of the engine apart."""

    @abc.abstractmethod
    def drop_own_cache(self) -> None:
        """Make the engine forget the KV of all prompts that it still holds itself; no request is under way."""

    @abc.abstractmethod
    def close(self) -> None:
        """Shut the engine down as its users do; nothing is left when this returns. Idempotent, also after `kill`."""

    def linked(self) -> bool:
        """Whether each of its clients has its link (`Client.linked`); True if it cannot tell.

        The server counts a client a moment before the engine has the link, and a lookup in between is a miss: the suite
        asks once the server counts all of them, and goes on when this is true.
        """
        return True

    def settle(self) -> None:
        """Return when everything of the finished requests has been offered to the server.

        Nothing to do for an engine that stores within the step; the suite waits for the server by itself.
        """
        return

    def abort_after(self, prompt: Sequence[int], steps: int) -> None:
        """Begin to answer a prompt, abort it after about `steps` steps, and return when the engine is done with it."""
        raise NotImplementedError

    def kill(self) -> None:
        """End all processes of the engine at once, as `kill -9` does. May be called while `generate` runs, which then
        raises."""
        raise NotImplementedError
