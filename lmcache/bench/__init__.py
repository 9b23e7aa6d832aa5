"""`lmcache bench`: what the cache costs, as ratios in one run, with the machine's own limits beside them.

It plays the engine: memory of its own, a real client, a real server process. A figure says what was measured, on how
many samples, how far they spread, and whether the design's target is met. A missed target is a figure like any other:
nothing here fails on it.

    figures.py    the values that everything here returns
    machine.py    what the machine can do at best
    subject.py    a server process under measurement
    shapes.py     the page shapes
    memory.py     engine memory: pages that prove that they were moved
    copying.py    row 1: pages between engine memory and arena, against memcpy
    lookups.py    row 2: a lookup of a long prompt
    startup.py    row 5: from nothing to a server that is ready
    report.py     as text and as JSON
"""
