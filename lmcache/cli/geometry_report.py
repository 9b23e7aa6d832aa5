"""What `lmcache geometry` found out, as tables for people and as JSON for programs."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from lmcache import __version__
from lmcache.cli.geometry_facts import (
    ChunkFacts,
    advise,
    allowed_chunk_sizes,
    checked_prompts,
    chosen_chunk_sizes,
    chunk_facts,
    full_bytes_per_token,
    keeps_states,
    token_bytes,
)
from lmcache.cli.geometry_subject import GroupFacts, Subject, alike
from lmcache.geometry.chunking import default_chunk_size
from lmcache.geometry.groups import GroupKind

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 100
"""Columns."""


def as_lines(subjects: Sequence[Subject], asked: Sequence[int], prompts: Sequence[int]) -> Iterator[str]:
    """For people: a section for each geometry. Raises GeometryError for a chunk size that does not fit."""
    from rich.console import Console

    console = Console(width=WIDTH, highlight=False)
    for number, subject in enumerate(subjects):
        sizes = _sizes(subject, asked, prompts)
        with console.capture() as shown:
            if number:
                console.print()
            for part in _section(subject, sizes):
                console.print(part, markup=False)
        for line in shown.get().splitlines():
            yield line.rstrip()  # rich fills the last column with blanks


def _sizes(subject: Subject, asked: Sequence[int], prompts: Sequence[int]) -> list[ChunkFacts]:
    own = (subject.chunk_size,) if subject.chunk_size else ()
    sizes = chosen_chunk_sizes(subject.geometry, asked or own)
    checked = checked_prompts(prompts)
    return [chunk_facts(subject.geometry, size, checked, subject.cell_bytes, subject.model) for size in sizes]


def _section(subject: Subject, sizes: Sequence[ChunkFacts]) -> Iterator["str | Table"]:
    geometry, advice = subject.geometry, advise(subject.geometry)
    yield subject.title
    yield subject.basis
    yield ""
    yield _groups(subject)
    yield ""
    for run in alike(subject.groups):
        yield f"{_numbers(run)}: {_holds(run[0], geometry.ranks)}"
    yield ""
    yield (
        f"chunk sizes: multiples of {geometry.block_multiple:,} ({_listed(allowed_chunk_sizes(geometry))}); without "
        f"--chunk-size a server takes {default_chunk_size(geometry):,}"
    )
    yield ""
    yield _chunks(sizes)
    if keeps_states(geometry):
        yield (
            "Bytes are at most these, and tokens at least: a chunk at whose end the engine left no state stores "
            "none, and no hit ends there."
        )
    yield ""
    yield f"recommended: leave --chunk-size out, which gives {advice.chunk_size:,}: {advice.reason}."


def _groups(subject: Subject) -> "Table":
    table = _table(
        "group", "kind", "tokens/block", "window", "layers", "bytes/token", "bytes/block: a rank", "all ranks"
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for run in alike(subject.groups):
        group, layers = run[0].group, f"{run[0].layers:,}" if run[0].layers else ""
        number = _numbers(run).rpartition(" ")[2]
        if not group.cached:
            table.add_row(number, "not cached", "", "", layers)
            continue
        table.add_row(
            number,
            group.kind.value.replace("_", " "),
            f"{group.tokens_per_block:,}",
            f"{group.window:,}" if group.window else "",
            layers,
            "" if group.kind is GroupKind.RECURRENT else f"{token_bytes(group):,.0f}",
            f"{group.block_bytes:,}",
            f"{group.block_bytes * group.shards:,}",
        )
    return table


def _holds(facts: GroupFacts, ranks: int) -> str:
    holds = "; ".join(facts.holds) or "scratch"
    if facts.skipped:
        return f"{holds}. Not cached: {facts.skipped}"
    if facts.group.shards == ranks:
        return holds
    kept = "once" if facts.group.shards == 1 else f"{facts.group.shards} times"
    return f"{holds}. Ranks hold the same bytes, which are stored {kept}"


def _chunks(sizes: Sequence[ChunkFacts]) -> "Table":
    prompts = [f"of {kept.prompt_tokens:,}" for kept in sizes[0].prompts]
    table = _table("chunk size", "bytes/token stored", "of full attention", "tokens per GB", *prompts)
    for column in table.columns:
        column.justify = "right"
    for facts in sizes:
        table.add_row(
            f"{facts.chunk_size:,}",
            f"{facts.bytes_per_token:,.0f}",
            f"{facts.share_of_full:.0%}",
            f"{facts.tokens_per_gb:,}",
            *(f"{kept.cached:,} ({kept.share:.0%})" for kept in facts.prompts),
        )
    return table


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _numbers(run: Sequence[GroupFacts]) -> str:
    first, last = run[0].number, run[-1].number
    return f"group {first}" if first == last else f"groups {first}–{last}"


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes) + "…"


# ------------------------------------------------------------------------------------------------------------ programs


def as_dicts(subjects: Sequence[Subject], asked: Sequence[int], prompts: Sequence[int]) -> dict[str, Any]:
    """Everything, with names that stay. Raises GeometryError for a chunk size that does not fit."""
    return {
        "version": __version__,
        "geometries": [_as_dict(subject, _sizes(subject, asked, prompts)) for subject in subjects],
    }


def _as_dict(subject: Subject, sizes: Sequence[ChunkFacts]) -> dict[str, Any]:
    geometry = subject.geometry
    return {
        "model": subject.model,
        "architecture": subject.architecture or None,
        "engine": subject.engine or None,
        "via": subject.via,
        "basis": subject.basis,
        "ranks": geometry.ranks,
        "groups": [_group_dict(facts) for facts in subject.groups],
        "chunk_size": {
            "multiple": geometry.block_multiple,
            "default": default_chunk_size(geometry),
            "allowed": list(allowed_chunk_sizes(geometry)),
            "registered": subject.chunk_size or None,
        },
        "full_attention_bytes_per_token": full_bytes_per_token(geometry) or None,
        "cell_bytes": subject.cell_bytes,
        "chunk_sizes": [
            attrs.asdict(facts) | {"prompts": [attrs.asdict(k) | {"share": round(k.share, 4)} for k in facts.prompts]}
            for facts in sizes
        ],
        "recommendation": attrs.asdict(advise(geometry)),
    }


def _group_dict(facts: GroupFacts) -> dict[str, Any]:
    group = facts.group
    recurrent = group.kind is GroupKind.RECURRENT
    return {
        "number": facts.number,
        "kind": group.kind.value,
        "cached": group.cached,
        "skipped": facts.skipped or None,
        "holds": list(facts.holds),
        "layers": facts.layers,
        "names": list(group.layers),
        "tokens_per_block": group.tokens_per_block,
        "window": group.window,
        "shards": group.shards,
        "bytes_per_token": None if recurrent or not group.cached else token_bytes(group),
        "block_bytes": {"rank": group.block_bytes, "all": group.block_bytes * group.shards},
    }
