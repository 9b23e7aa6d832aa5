"""Replays request traces against eviction policies: which one, and how much memory, suits this traffic?

    trace.py       what is replayed: requests, or what a server has recorded
    reading.py     trace files, and what is wrong with them
    capacity.py    sizes of L1, as users write them
    replay.py      one policy at one capacity: the server's own cache, without a server
    opt.py         the offline optimum, which knows the future
    compare.py     all policies at all capacities
    report.py      tables and JSON
    plot.py        hit ratio against capacity; needs Matplotlib

It drives `core.cache.Cache` itself, so that residency, order and every rule beside the policy are the server's.
"""
