"""Every number that the server reports, in one table each: name, unit, sentence."""

import attrs


def _counter(unit: str, sentence: str) -> int:
    return attrs.field(default=0, metadata={"unit": unit, "sentence": sentence})


@attrs.define
class Counters:
    """What only ever grows, since the server started."""

    lookups: int = _counter("lookups", "lookups answered")
    tokens_asked: int = _counter("tokens", "tokens in whole chunks that lookups asked for")
    tokens_hit: int = _counter("tokens", "tokens that lookups promised")
    loads_confirmed: int = _counter("tickets", "tickets that every rank has confirmed")
    tickets_dropped: int = _counter("tickets", "tickets that ended before every rank had confirmed")
    chunks_reserved: int = _counter("objects", "chunk shards whose cells were handed to a writer")
    shards_committed: int = _counter("objects", "chunk shards written and published")
    chunks_aborted: int = _counter("objects", "chunk shards given back unpublished, by an abort or a dead writer")
    chunks_evicted: int = _counter("chunks", "chunks evicted to make room")
    cells_evicted: int = _counter("cells", "cells that evictions freed")
    chunks_expired: int = _counter("chunks", "chunks dropped because their TTL was over; evictions count them, too")
    chunks_refused: int = _counter("chunks", "chunks offered that an admission policy did not want stored")
    promotions_declined: int = _counter(
        "lookups", "hits that were left shorter because reading from a tier takes longer than computing"
    )
    requests_refused: int = _counter("requests", "requests answered with an error")
    messages_malformed: int = _counter("messages", "messages that could not be read, on either transport")
    clients_refused: int = _counter("clients", "Unix connections turned away")
    peers_refused: int = _counter(
        "handshakes", "peers on TCP with the wrong keys, or with none unless they hung up first"
    )
    bulk_messages_malformed: int = _counter(
        "messages", "messages on the bulk channel that could not be read or broke a rule; each cost its sender the link"
    )
    bulk_bytes_in: int = _counter("bytes", "bytes of cells that clients on other hosts have written")
    bulk_bytes_out: int = _counter("bytes", "bytes of cells that clients on other hosts have read")
    policy_errors: int = _counter(
        "errors", "calls in which a policy failed (eviction, admission, retention); the first of a kind is logged"
    )
    records_lost: int = _counter("events", "lookups and stores that `--record` could not write down; logged once")
    events_lost: int = _counter(
        "events", "stores, lookups and evictions that observing plugins were too slow to hear of"
    )
    internal_errors: int = _counter("errors", "faults of the server's own; each is in its log")


@attrs.define
class TierCounters:
    """What only ever grows, for each tier, since the server started."""

    searches: int = _counter("searches", "lookups for which it was asked what it has")
    stored: int = _counter("blobs", "shards written to it")
    bytes_written: int = _counter("bytes", "bytes of those, headers included")
    write_seconds: float = _counter("seconds", "time that writing them took, over all threads")
    loaded: int = _counter("blobs", "shards read from it, verified")
    bytes_read: int = _counter("bytes", "bytes of those")
    read_seconds: float = _counter("seconds", "time that reading and verifying them took, over all threads")
    absent: int = _counter("blobs", "shards that it had said it has, and had not when they were to be read")
    damaged: int = _counter("blobs", "shards that were not what had been stored; deleted")
    foreign: int = _counter("blobs", "shards that are not ours to read: another key, or somebody else's value")
    lost: int = _counter("blobs", "shards that were to be stored in it and were not")
    errors: int = _counter("calls", "calls that failed; the first of a kind is logged")
    timeouts: int = _counter("calls", "calls that did not come back in time")
    skipped: int = _counter("calls", "calls that were not made, for it had failed or hung before")


GAUGES = {
    "cells_total": ("cells", "cells that L1 can grow to"),
    "cells_backed": ("cells", "cells that have memory now"),
    "cells_used": ("cells", "cells that hold or are being given bytes"),
    "cells_reserved": ("cells", "cells that writers are filling: quarantined until they commit, abort or die"),
    "nodes": ("chunks", "chunks in the index"),
    "pinned_nodes": ("chunks", "chunks that tickets hold"),
    "prefix_pins": ("pins", "prefixes that users have pinned"),
    "prefix_pin_cells": ("cells", "cells that pinned prefixes hold"),
    "tickets": ("tickets", "hits that are waiting to be loaded"),
    "reservations": ("reservations", "stores in flight"),
    "clients": ("clients", "registered clients"),
    "tier_calls": ("calls", "reads and writes of tiers that wait or are under way"),
}
"""What goes up and down: name → (unit, sentence)."""
