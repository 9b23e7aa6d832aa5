"""Where the worker of a process tells the scheduler of the same engine what its pages are.

TensorRT-LLM makes both from one `llm_args`, in two threads of the same process, and carries nothing from one to the
other; the scheduler may be asked before the worker has seen its KV cache.
"""

import threading
from typing import Any

from lmcache.engines.trtllm.registration import Registration


class Meeting:
    """One engine's."""

    def __init__(self) -> None:
        self.registration: Registration | None = None
        """What the worker has found out; None until TensorRT-LLM has registered its KV cache."""


_lock = threading.Lock()
_meetings: list[tuple[Any, Meeting]] = []


def meeting_of(llm_args: Any) -> Meeting:
    """The meeting of the engine that was started with these very arguments, not with equal ones."""
    with _lock:
        for known, meeting in _meetings:
            if known is llm_args:
                return meeting
        # the arguments are kept, or others that come to lie at the same address would meet them
        _meetings.append((llm_args, Meeting()))
        return _meetings[-1][1]
