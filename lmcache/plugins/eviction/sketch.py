"""How often keys came, roughly, in little memory: the frequency sketch of TinyLFU."""

from collections.abc import Hashable
from hashlib import blake2b

MOST = 15
"""A counter ends here: beyond it, popular is popular."""

_MIX = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
"""Odd numbers, one for each row: they spread what `hash` leaves close together."""

_HALVED = bytes(count >> 1 for count in range(256))
_WORD = (1 << 64) - 1


class FrequencySketch:
    """A count-min sketch with conservative counters of one byte, halved now and then so that it forgets.

    An estimate is never too low, short of `MOST` and halving. Costs 4 bytes a counter, however many keys come.
    """

    def __init__(self, keys: int) -> None:
        """`keys` different ones can be told apart well."""
        bits = max(6, (keys - 1).bit_length())
        self._shift = 64 - bits
        self._rows = [bytearray(1 << bits) for _ in _MIX]
        self._added = 0

    def add(self, key: Hashable, period: int) -> None:
        """`key` came once more; after `period` such calls all counts are halved."""
        places = self._places(key)
        least = min(row[place] for row, place in zip(self._rows, places, strict=True))
        if least < MOST:
            for row, place in zip(self._rows, places, strict=True):
                if row[place] == least:
                    row[place] = least + 1
        self._added += 1
        if self._added >= period:
            self._rows = [row.translate(_HALVED) for row in self._rows]
            self._added //= 2

    def estimate(self, key: Hashable) -> int:
        """How often `key` came lately, at most `MOST`."""
        return min(row[place] for row, place in zip(self._rows, self._places(key), strict=True))

    def _places(self, key: Hashable) -> list[int]:
        # what Python makes of bytes differs from process to process; and keys need not be random in any part
        number = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") if isinstance(key, bytes) else hash(key)
        number ^= number >> 32
        return [(number * mix & _WORD) >> self._shift for mix in _MIX]
