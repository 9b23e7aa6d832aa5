"""What the C library does with freed memory, where messages of a megabyte come and go."""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_PIECE = 32 << 20
_KEPT_AT_ONCE = 64 << 20


def keep_freed_memory() -> None:
    """Have this process use freed memory again, and not give it back to the kernel a message at a time.

    The kernel clears what it takes back, page by page: as much work as everything else that a message takes. The values
    are those that glibc comes to by itself once a process has freed 32 MiB in one piece, as engines do: so much it may
    keep for each thread. Other C libraries are left alone.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_PIECE)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_AT_ONCE)
