"""Row 8: what a codec makes of KV, and how fast. One thread, by its CPU time; what comes back is compared."""

import mmap
import time
from collections.abc import Sequence

import numpy as np

from lmcache.bench.figures import Figure, Step, figure
from lmcache.bench.tier_subject import kv_like
from lmcache.core.codec import Codec
from lmcache.core.tier import KEY_DIGITS
from lmcache.errors import LMCacheError

PAYLOAD_BYTES = 8 << 20

ABOUT = bytes(KEY_DIGITS // 2)


def measure_codec(codec: Codec, times: int, step: Step) -> list[Figure]:
    """Encode and decode a payload of bfloat16 values so often. Raises LMCacheError when it comes back changed."""
    step(f"codec {codec.name}")
    payload = kv_like(PAYLOAD_BYTES).data
    into = memoryview(mmap.mmap(-1, PAYLOAD_BYTES))
    ratios, encoding, decoding = [], [], []
    for _ in range(times + 1):
        began = time.thread_time()
        stored = codec.encode([payload], ABOUT)
        between = time.thread_time()
        codec.decode(stored, [into], ABOUT)
        ended = time.thread_time()
        if not np.array_equal(np.frombuffer(into, np.uint8), np.frombuffer(payload, np.uint8)):
            raise LMCacheError(f"the codec {codec.name} gave other bytes back: that is a bug, not a figure")
        ratios.append(PAYLOAD_BYTES / len(stored))
        encoding.append(PAYLOAD_BYTES / (between - began) / 2**30)
        decoding.append(PAYLOAD_BYTES / (ended - between) / 2**30)
        into[:64] = bytes(64)
    counts = {"payload_bytes": PAYLOAD_BYTES, "verified": len(ratios)}

    def row(what: str, samples: Sequence[float], unit: str) -> Figure:
        # the first round found everything cold
        return figure(8, what, codec.name, samples[1:], unit, counts=counts)

    return [
        row("smaller by", ratios, "×"),
        row("encode", encoding, "GiB/s of CPU"),
        row("decode", decoding, "GiB/s of CPU"),
    ]
