"""Engine adapters, and how to write one.

An adapter teaches one engine to store its KV in the server and to load it back. This package is the only place where
an engine, torch or NumPy may be imported; nothing here is imported before somebody asks for an engine by name. The
shortest complete example is `examples/lmcache-pebble-engine`: under 150 lines, for an engine of one process and one
KV group. `lmcache.engines.reference` has ranks and every kind of group; `lmcache.engines.vllm` is the same thing for
an engine that was not built for it. An adapter has three parts:

    describe        what the engine's pages are            → `Geometry`, facts, `Engine`
    scheduler half  what to load, what may be stored       → `Link.lookup`, `Link.drop`
    worker half     the copies, one process a rank         → `Link.reserve`, `commit`, `open`, `confirm`, `Copier`

What is the same for most engines is here to be used: `copying.py` (plans of copies, for pages that the CPU reaches),
`storing.py` (a worker's stores), `staging.py` (pages on an accelerator), `weights.py` (what identifies weights), and
`versions.py`. Adding an engine touches its own folder, its docs and tests, and one line in `plugins/sources.py`; an
adapter of somebody else's touches nothing here.

**What you need from the engine.** Block tables (which block holds which tokens, per KV group), the memory of the
pages as uint8 views, a place in the scheduler where a request may wait for a load, a place in each worker after the
step's computations, and the word that a load has failed, upon which the engine computes.

**1. Describe.** Make one `KVGroup` for each set of layers that share block ids, block size and kind; `page_bytes` are
the bytes of one block in each layer, on one rank, taken from the engine's own strides. Classify by what the engine
says, not by guessing from names: an unknown kind must stop the start, because a wrong one would serve wrong tokens.
`shards` is the number of ranks that hold distinct bytes (1 where all hold the same, as in MLA). Facts are everything
else that gives the same tokens other bytes: model, weights (by content, not by name), dtype, layout, attention
backend. What is no fact is shared, so when in doubt it is one.

    engine = Engine(facts, geometry, Role.WORKER, rank)
    client = Client(ServerAddress.parse("127.0.0.1:5555"), engine)
    client.start(wait=1.0)      # never raises: without a server, `client.link()` does, at once, and the engine goes on

One client a process and role. `client.link()` is one registration; when anything goes wrong with it it is dead for
good, and the client makes another. Take it anew for each piece of work, and let `LMCacheError` mean: do without.

**2. Look up** when a request arrives, in the scheduler. Hash the prompt with a `ChainHasher` whose root is
`chain_root(content)`: content is what besides tokens changes the KV (salt, LoRA weights, images at their positions).

    pending = link.lookup(tenant, hasher.extend_to(tokens), limit=len(tokens) - 1)
    found = pending.poll()      # each step, until it is not None; a deadline ends it

Never wait for it. `found.tokens` counts from the prompt's beginning; load only if that is more than the engine holds.
If no load follows, for whatever reason, `link.drop(found.ticket)`; if the request ended while the answer was under
way, drop the ticket when the answer comes. `load_spans` says which blocks of the sequence a hit fills, for each
group: allocate those.

**3. Load**, in every worker, without holding up the engine. The scheduler hands over the ticket *and* the link's
epoch.

    opened = link.open(ticket)                      # only if link.epoch is that epoch
    with link.copying() as memory:                  # keep no view of it beyond the block
        copier.load(np.frombuffer(memory, np.uint8), cells, block_ids, first)
    loaded = link.confirm(ticket)                   # False: as if nothing had been loaded

Only when every rank has confirmed may the request go on from the hit. If any has not: drop the ticket, release the
blocks, compute, and remember the failure so that the request is not looked up again. Blocks that are being loaded
belong to the workers until all have reported, aborted request or not.

**4. Store**, in every worker, after the computations of a step and before the engine may reuse a block. Offer all
whole chunks of a request, in chain order, group by group, full groups first:

    reserved = link.reserve(tenant, parent, hashes, group, geometry.shard_of(group, rank))
    granted = [chunk for chunk, placed in enumerate(reserved.placed, first) if placed == Placed.GRANTED]
    for number, chunk in enumerate(granted):        # cells come for the granted ones only, in their order
        own = cells[number * layout.cells :][: layout.cells]
        copier.store(arena, own, [table[block] for block in kept_span(geometry.groups[group], chunk_size, chunk)])
    link.commit(reserved.reservation)               # if anything was granted

`storing.Storer` is that loop with all that belongs to it: turns of ranks, chunks that found no room, servers that came
anew. Give it a `StoreOrder` for the chunks that a step has made whole.

`reserved.placed` has one `Placed` a chunk for those that were dealt with, from the first one offered on (`first`
above). Every day, most are `PRESENT`, stored by an earlier request, or `BUSY`, being written by another engine: there
is nothing to write, and there are no cells.

Windows lose their blocks and recurrent groups their snapshots while a request runs: store those in the step that fills
them, and never store a null block. Where ranks hold the same bytes, offer only chunks with `geometry.writes(group,
rank, chunk)`, each with its parent. Store what is computed and accepted, nothing that is speculated.

**5. Prove it.** Put your engine into the words of `EngineUnderTest` (answer prompts, drop your own cache, close), and
derive a test class from `EngineAdapterTests`:

    class TestMyEngine(EngineAdapterTests):
        adapter, chunk_size, hit_step, wrong_chunk_size = MyAdapter, 64, 16, 40

        @classmethod
        def start_engine(cls, server, weights):
            return MyEngineUnderTest(server, seed=1 if weights is Weights.USUAL else 2)

It starts real servers, kills and stops them between and during requests, has them refuse the engine, fail its loads and
run full, and asks for the same answers with exactly the hits of the hit rule: at k chunks, one token less and one more,
with another salt, from another engine, with other weights. Nothing may be held afterwards. What it cannot know is yours
to test: every kind of KV group, each rank's failures, what your engine does to blocks while requests run
(`tests/engines/reference`; `tests/_plugins/fault_rounds.py` kills and stops every process at every step).

**6. Offer it.** Subclass `lmcache.core.adapter.EngineAdapter` in a module that imports no engine, and return the class
from the hook `lmcache_register_engine_adapters`: it says which module the engine loads, which versions of the engine
your tests ran on, and what they proved; `lmcache engines` prints that. When the engine starts, `check_interface`
refuses one that lacks what you need, and `warn_of_version` tells of a version that nobody has tried.
"""
