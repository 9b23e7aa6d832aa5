"""What the bytes of a block mean: KV groups, chunks, object layouts, and which prefix of a prompt can be served.

Pure values and arithmetic, the same in every process: adapters describe an engine with them, the server sizes objects
and finds hits with them, workers copy by them. Imports nothing of the project but its errors, and does no I/O.

    groups.py       KVGroup, GroupKind, Geometry: an engine's KV, validated
    chunking.py     which blocks a chunk keeps of each group; which chunk sizes a geometry allows
    layout.py       where the pages of one object lie in the arena's cells
    hits.py         the longest prefix that all groups can serve, and what to load for it
    fingerprint.py  the facts that decide who may share bytes
"""
