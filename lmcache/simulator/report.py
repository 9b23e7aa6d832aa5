"""Comparisons for people and for programs."""

from collections.abc import Iterator
from typing import Any

from lmcache.simulator.compare import Comparison
from lmcache.simulator.replay import BATCH, WATERMARK
from lmcache.simulator.trace import Recorded, Trace

GIB = 1 << 30


def as_text(found: Comparison) -> str:
    """A table with a row for each capacity and a column for each policy, below what was replayed."""
    return "\n".join([*_head(found), "", *_table(found), *_notes(found)])


def _head(found: Comparison) -> Iterator[str]:
    trace = found.trace
    yield f"{trace.name}: {_contents(trace)}"
    if trace.recorded:
        yield f"recorded from a server with {_recorded(trace.recorded)}"
    eviction = f"in batches of {BATCH:.0%} at {WATERMARK:.0%} full" if found.batches else "exact"
    yield (
        f"hit ratio, in % of the tokens asked for; with room for everything {found.most * 100:.2f}; eviction {eviction}"
    )


def _contents(trace: Trace) -> str:
    sizes = sorted({space.chunk_size for space in trace.namespaces})
    tokens = " or ".join(str(size) for size in sizes)
    return (
        f"{trace.requests:,} requests for {trace.chunks_asked:,} chunks of {tokens} tokens, "
        f"{len(trace.stored()):,} of them distinct"
    )


def _recorded(recorded: Recorded) -> str:
    ratio = recorded.tokens_hit / max(1, recorded.tokens_asked)
    return f"{recorded.policy}, L1 {_gigabytes(recorded.l1_bytes)} GB: {ratio * 100:.2f} % hit"


def _table(found: Comparison) -> Iterator[str]:
    sized = found.trace.sized
    lines = [["capacity", *(["GB"] if sized else []), "chunks", *found.policies]]
    for capacity, outcomes in found.rows:
        size = [_gigabytes(capacity.bytes or 0)] if sized else []
        ratios = [f"{outcome.hit_ratio * 100:.2f}" for outcome in outcomes]
        lines.append([capacity.text, *size, f"{capacity.chunks:,.0f}", *ratios])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def _notes(found: Comparison) -> Iterator[str]:
    failed: dict[str, int] = {}
    for outcome in found.outcomes:
        failed[outcome.policy] = failed.get(outcome.policy, 0) + outcome.policy_errors
    for policy, errors in failed.items():
        if errors:
            yield f"{policy} failed in {errors:,} calls, in which the cache went by the last use"


def _gigabytes(size: int) -> str:
    return f"{size / GIB:.1f}" if size >= GIB else f"{size / GIB:.2g}"


def as_dict(found: Comparison) -> dict[str, Any]:
    """The same with every figure, for JSON."""
    trace, recorded = found.trace, found.trace.recorded
    return {
        "trace": trace.name,
        "requests": trace.requests,
        "chunks_asked": trace.chunks_asked,
        "chunks_distinct": len(trace.stored()),
        "tokens_asked": trace.tokens_asked,
        "hit_ratio_with_everything_kept": found.most,
        "eviction": "watermark" if found.batches else "exact",
        "recorded": recorded
        and {
            "policy": recorded.policy,
            "l1_bytes": recorded.l1_bytes,
            "tokens_asked": recorded.tokens_asked,
            "tokens_hit": recorded.tokens_hit,
        },
        "results": [
            {
                "capacity": outcome.capacity.text,
                "cells": outcome.capacity.cells,
                "bytes": outcome.capacity.bytes,
                "policy": outcome.policy,
                "tokens_hit": outcome.tokens_hit,
                "hit_ratio": outcome.hit_ratio,
                "chunks_evicted": outcome.chunks_evicted,
                "policy_errors": outcome.policy_errors,
                "cpu_seconds": round(outcome.seconds, 3),
            }
            for outcome in found.outcomes
        ],
    }
