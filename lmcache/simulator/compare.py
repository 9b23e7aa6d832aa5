"""All policies at all capacities of one trace, and the optimum beside them."""

from collections.abc import Callable, Sequence

import attrs

from lmcache.core.policy import EvictionPolicy
from lmcache.simulator.capacity import Capacity, Wish, fit_capacities
from lmcache.simulator.opt import Opt, next_uses
from lmcache.simulator.replay import Outcome, replay
from lmcache.simulator.trace import Trace

OPT = Opt.name


@attrs.frozen
class Comparison:
    """What the replays of one trace came to."""

    trace: Trace
    batches: bool
    """Whether policies evicted at a watermark; the optimum never does."""
    capacities: Sequence[Capacity]
    policies: Sequence[str]
    """Columns, the optimum last."""
    outcomes: Sequence[Outcome]
    """For each capacity in order, one of each policy in order."""

    @property
    def rows(self) -> list[tuple[Capacity, list[Outcome]]]:
        """Outcomes by capacity."""
        width = len(self.policies)
        return [
            (capacity, list(self.outcomes[number * width : (number + 1) * width]))
            for number, capacity in enumerate(self.capacities)
        ]

    @property
    def most(self) -> float:
        """The hit ratio of a cache that has room for everything."""
        return self.trace.tokens_with_everything_kept() / max(1, self.trace.tokens_asked)


def compare(
    trace: Trace,
    wishes: Sequence[Wish],
    policies: Sequence[Callable[[], EvictionPolicy]],
    *,
    batches: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """Replay the trace with each policy, and with the optimum, at each capacity.

    `policies` make one each, for a replay of its own; `progress` hears of events as they are done: those of the trace,
    times the replays. Raises ConfigError for capacities that cannot be had.
    """
    sizes = fit_capacities(wishes, trace)
    future = next_uses(trace)
    outcomes = []
    for capacity in sizes:
        outcomes += [replay(trace, capacity, make(), batches=batches, progress=progress) for make in policies]
        outcomes.append(replay(trace, capacity, Opt(future), progress=progress))
    names = [outcome.policy for outcome in outcomes[: len(policies) + 1]]
    return Comparison(trace, batches, sizes, names, outcomes)
