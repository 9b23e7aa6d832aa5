"""Every point at which a process may be killed or stopped, and hosts that pause there: server, engine and ranks.

A point is `SIDE:MOMENT:STEP`: before or after each step of the protocol, on each side, and around each copy. A host is
the real program with its protocol methods wrapped, so that the program itself knows nothing of faults. It pauses at a
point when the point is armed (a small shared file says which one, and at which passage), tells the bench in
`fault_rounds.py` and goes on when that answers.

    python fault_points.py server  ARGUMENTS OF lmcache server
    python fault_points.py engine  SHAPE RANKS [ADDRESS]     then a JSON request a line on standard input
    python fault_points.py rank    DESCRIPTOR
"""

import contextlib
import faulthandler
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import mmap
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmcache.core.protocol import (
    Abort,
    Commit,
    Confirm,
    Drop,
    Hello,
    Lookup,
    Message,
    Open,
    Register,
    Reserve,
    decode_request,
)
from lmcache.errors import LMCacheError

SCHEDULER_STEPS = (Register, Lookup, Drop)
WORKER_STEPS = (Register, Reserve, Commit, Abort, Open, Confirm)
COPIES = ("copy-in", "copy-out")


def _points() -> Iterator[str]:
    for step in (Hello, Register, Reserve, Commit, Abort, Lookup, Open, Confirm, Drop):
        # sent: the reply is on its way; before that the step has been done, and nobody knows
        yield from (f"server:{moment}:{step.__name__}" for moment in ("before", "after", "sent"))
    for side, steps in (("scheduler", SCHEDULER_STEPS), ("worker", WORKER_STEPS)):
        for step in steps:
            yield from (f"{side}:{moment}:{step.__name__}" for moment in ("before", "after"))
    for copy in COPIES:
        yield from (f"worker:{moment}:{copy}" for moment in ("before", "during", "after"))


POINTS = tuple(_points())

FILE, SOCKET = "LMCACHE_FAULT_FILE", "LMCACHE_FAULT_SOCKET"
GO, FAIL = b"g", b"f"
_NAME_BYTES = 64


class Trigger:
    """The shared file: which point is armed, and how many passages are left."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("r+b")
        self._memory = mmap.mmap(self._file.fileno(), _NAME_BYTES + 1)

    @staticmethod
    def create(path: Path) -> "Trigger":
        path.write_bytes(bytes(_NAME_BYTES + 1))
        return Trigger(path)

    @property
    def armed(self) -> str:
        return self._memory[:_NAME_BYTES].rstrip(b"\0").decode()

    def arm(self, point: str, passages: int) -> None:
        self._memory[_NAME_BYTES] = passages
        self._memory[:_NAME_BYTES] = point.encode().ljust(_NAME_BYTES, b"\0")

    def disarm(self) -> bool:
        """Returns whether a process has reached the point meanwhile."""
        with self._locked():
            fired = not self.armed
            self._memory[:_NAME_BYTES] = bytes(_NAME_BYTES)
            return fired

    def passed(self, point: str) -> bool:
        """Whether this passage is the one."""
        if not self._memory[0] or self.armed != point:
            return False
        with self._locked():  # both ranks may be here: one of them pauses
            self._memory[_NAME_BYTES] = max(0, self._memory[_NAME_BYTES] - 1)
            if self.armed != point or self._memory[_NAME_BYTES]:
                return False
            self._memory[:_NAME_BYTES] = bytes(_NAME_BYTES)
            return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        self._memory.close()
        self._file.close()


_trigger: Trigger


def reach(point: str) -> None:
    """Pause here, if the point is armed, until the bench says to go on, or to fail."""
    if _trigger.passed(point):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0" + os.environ[SOCKET])
            sock.sendall(json.dumps({"point": point, "pid": os.getpid()}).encode() + b"\n")
            answer = b""
            with contextlib.suppress(ConnectionError):  # the bench has gone
                answer = sock.recv(1)
        if answer == FAIL:
            raise LMCacheError(f"planned at {point}")


def around(owner: Any, name: str, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Have `before(*arguments)` and `after(result, *arguments)` called around a method."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        result = method(*args, **kwargs)
        after(result, *args)
        return result

    setattr(owner, name, wrapped)


def nothing(*_: Any) -> None:
    pass


def wrap_link(side: str) -> None:
    from lmcache.core.link import Link, Pending

    def sent(pending: Any, link: Any, request: Message, *_: Any) -> None:
        pending.step = type(request).__name__
        if isinstance(request, Drop):  # nobody waits for its answer
            reach(f"{side}:after:Drop")

    around(Link, "_send", lambda link, request, *_: reach(f"{side}:before:{type(request).__name__}"), sent)
    around(Pending, "_result", nothing, lambda _, pending: reach(f"{side}:after:{pending.step}"))


def wrap_copies() -> None:
    from lmcache.engines.copy import Copier
    from lmcache.engines.reference.worker import WorkerConnector

    def spoil(*_: Any) -> None:
        if _trigger.armed.endswith(":Abort"):  # only a failed copy is aborted
            raise LMCacheError("a fault that was planned")

    for method, part, copy in (("_copy_in", "store", "copy-in"), ("_copy_out", "load", "copy-out")):
        around(
            WorkerConnector,
            method,
            lambda *_, c=copy: (spoil() if c == "copy-in" else None, reach(f"worker:before:{c}")),
            lambda *_, c=copy: reach(f"worker:after:{c}"),
        )
        around(Copier, part, nothing, lambda *_, c=copy: reach(f"worker:during:{c}"))


def wrap_server() -> None:
    from lmcache.core.invariants import check_invariants
    from lmcache.core.server import Server

    def check(server: Server, *_: Any) -> None:
        try:
            check_invariants(server.service.cache)
        except RuntimeError:
            traceback.print_exc()
            os._exit(70)

    around(
        Server,
        "_unix_reply",
        lambda server, connection, request: reach(f"server:before:{type(request).__name__}"),
        lambda _, server, connection, request: reach(f"server:after:{type(request).__name__}"),
    )
    around(
        Server,
        "_answer_unix",
        nothing,
        lambda _, server, connection, data: reach(f"server:sent:{type(decode_request(data)).__name__}"),
    )
    around(
        Server,
        "_tcp_reply",
        lambda server, request: reach(f"server:before:{type(request).__name__}"),
        lambda _, server, request: reach(f"server:after:{type(request).__name__}"),
    )
    around(
        Server,
        "_send_tcp",
        nothing,
        lambda _, server, peer, reply, body: reach("server:sent:Hello") if type(reply).__name__ == "Welcome" else None,
    )
    around(Server, "_ready", nothing, lambda _, server, *rest: check(server))
    around(Server, "_end", nothing, lambda _, server, *rest: check(server))


def serve(arguments: list[str]) -> int:
    from lmcache.cli.main import main

    wrap_server()
    return main(["server", *arguments])


def run_rank(arguments: list[str]) -> int:
    from lmcache.engines.reference.rank import main

    wrap_link("worker")
    wrap_copies()
    return main(int(arguments[0]))


def run_engine(arguments: list[str]) -> int:
    from lmcache.engines.reference.engine import Engine
    from lmcache.engines.reference.ranks import RankLost
    from lmcache.engines.reference.shapes import GEOMETRIES

    wrap_link("scheduler")
    shape, ranks, deadline, *address = arguments
    command = (sys.executable, __file__, "rank")
    server = address[0] if address else ""
    with Engine(
        GEOMETRIES[shape], server=server, ranks=int(ranks), rank_command=command, deadline=float(deadline)
    ) as engine:
        print(json.dumps({"ranks": engine.rank_pids}), flush=True)
        for line in sys.stdin:
            try:
                print(json.dumps(_answer(engine, json.loads(line))), flush=True)
            except RankLost as lost:
                print(json.dumps({"lost": str(lost)}), flush=True)
                return 3
    return 0


def _answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    if request.get("forget"):
        engine.drop_prefix_cache()
    outputs = engine.generate(request["prompts"], max_tokens=4)
    digests = [
        hashlib.sha256(b"".join(itertools.chain([bytes(str(o.tokens), "ascii")], (r.tobytes() for r in o.logits))))
        for o in outputs
    ]
    return {
        "answers": [digest.hexdigest() for digest in digests],
        "hits": [output.hit_tokens for output in outputs],
        "failures": [output.load_failures for output in outputs],
        "held": 511 - engine.unused_blocks,
    }


if __name__ == "__main__":
    _trigger = Trigger(Path(os.environ[FILE]))
    logging.basicConfig(level=logging.ERROR)
    faulthandler.register(signal.SIGUSR1)  # the bench asks for all stacks when something hangs
    sys.exit({"server": serve, "engine": run_engine, "rank": run_rank}[sys.argv[1]](sys.argv[2:]))
