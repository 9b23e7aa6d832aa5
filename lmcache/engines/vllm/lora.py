"""Which LoRA weights the engine computes a request with, if that is certain. Imports neither vLLM nor torch.

vLLM loads a LoRA when a request first needs it, or when somebody asks for it beforehand, and again after it made room
for others. It tells no connector. It knows a LoRA by a name, a number and a path, and none of them changes when its
weights do. So what a number stands for is certain only when

- its path has led to the same files, unchanged, since before this engine began (`lmcache.engines.unchanged`), so that
  it does not matter when vLLM read them: the scheduler looks when a request arrives, and before a hit is used;
- and vLLM has never loaded anything else under that number: a worker looks once KV is computed and before it is stored,
  because LoRAs can be exchanged while requests run. It looks at the files again, too.
"""

import functools
from typing import Any, Protocol

import attrs

from lmcache.engines.unchanged import Beginning, Sight, process_beginning
from lmcache.engines.weights import BESIDE_LORA, Digests, Uncertain, certain_weights

RESTART = "restart the engine, so that it loads what is there now, to have its requests cached"


class LoraRequest(Protocol):
    """As much of vLLM's as the cache looks at."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool


@attrs.frozen
class Evidence:
    """What must hold in a worker, after it has computed KV, for that KV to be of the weights that it is stored as."""

    number: int
    sight: Sight

    def holds(self) -> bool:
        """Whether the weights of this number are certain in this process. A few stat calls; raises nothing."""
        # in this order: what is loaded after the files were looked at is loaded after this KV was computed
        return _loads.only(self.number, self.sight.given) and self.sight.holds()


@attrs.define(eq=False)
class Lora:
    """One LoRA of this engine. Once it is uncertain it stays so: vLLM's own caches may hold KV of something else."""

    given: str
    form: str
    """How vLLM is told to read it."""
    digest: str
    _sight: Sight
    reason: str = ""
    """Why it is uncertain; empty as long as it is not."""

    def certain(self) -> bool:
        """Whether the engine's weights, whenever it has read them, are those of the digest. A few stat calls."""
        if not self.reason and not self._sight.holds():
            self.doubt("its files have changed since the engine started")
        return not self.reason

    def doubt(self, reason: str) -> None:
        """From now on none of its requests is cached, and what runs is not stored."""
        self.reason = self.reason or f"the weights of the LoRA at {self.given} are not certain: {reason}; {RESTART}"

    def evidence(self, number: int) -> Evidence:
        """To be sent along with what is to be stored."""
        return Evidence(number, Sight("") if self.reason else self._sight)


class LoraBook:
    """All LoRAs that requests of this engine have named. One per scheduler."""

    def __init__(self, beginning: Beginning | None = None, remembered: Digests | None = None) -> None:
        """Made when the engine starts, before it loads any. Both are for tests, and default to the real ones."""
        self._beginning = beginning or process_beginning()
        self._remembered = remembered
        self._by_path: dict[str, Lora] = {}
        self._by_number: dict[int, Lora] = {}

    def find(self, request: LoraRequest) -> Lora:
        """The LoRA that a request names, certain or not. Reads files at the first sight only; raises nothing."""
        form = "3d" if getattr(request, "is_3d_lora_weight", False) else ""
        lora = self._by_path.get(request.lora_path)
        if lora is None:
            lora = self._by_path[request.lora_path] = self._first_sight(request.lora_path, form)
        lora.certain()
        first = self._by_number.setdefault(request.lora_int_id, lora)
        if first is not lora:
            # vLLM keeps the one that it loaded first, or not, if it had to make room meanwhile
            for each in (first, lora):
                each.doubt(f"number {request.lora_int_id} was given to {first.given} and to {lora.given}")
        if lora.form != form:
            lora.doubt("it was given in two forms")
        return lora

    def _first_sight(self, given: str, form: str) -> Lora:
        found = certain_weights(given, BESIDE_LORA, self._beginning, remembered=self._remembered)
        if isinstance(found, Uncertain):
            lora = Lora(given, form, "", Sight(given))
            lora.doubt(found.reason)
            return lora
        return Lora(given, form, f"{found.digest} {form}".strip(), found.sight)


class Loads:
    """What vLLM has loaded in this process, ever."""

    def __init__(self) -> None:
        self._paths: dict[int, set[str]] = {}
        self._exchanged: set[str] = set()

    def note(self, number: int, path: str) -> None:
        """vLLM is about to load this number from there."""
        paths = self._paths.setdefault(number, set())
        paths.add(path)
        if len(paths) > 1:
            # requests that ran meanwhile left KV of both in vLLM's own cache, where it knows them by name and path only
            self._exchanged |= paths

    def only(self, number: int, path: str) -> bool:
        """Whether this number has been that path and nothing else, and no other number of that path was exchanged."""
        return path in self._paths.get(number, ()) and path not in self._exchanged

    def forget(self) -> None:
        """Another engine starts in this process."""
        self._paths.clear()
        self._exchanged.clear()


_loads = Loads()


def watch_loads() -> None:
    """Note from now on what vLLM loads in this process. Called by each worker of an engine that may serve LoRAs, first.

    Where vLLM loads in another way than the one that is watched, nothing is ever noted, and nothing stored.
    """
    _loads.forget()
    try:
        from vllm.lora.worker_manager import WorkerLoRAManager
    except ImportError:
        return
    load = getattr(WorkerLoRAManager, "_load_adapter", None)
    if load is None or load.__module__ == __name__:
        return

    @functools.wraps(load, assigned=["__doc__"])
    def load_and_note(self: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        # before it is loaded: whatever comes of it, this number is not certain to be anything else any more
        _loads.note(lora_request.lora_int_id, lora_request.lora_path)
        return load(self, lora_request, *args, **kwargs)

    WorkerLoRAManager._load_adapter = load_and_note  # noqa: SLF001 - it offers no other way to learn of a load
