"""A real server for the conformance suite of engine adapters, started, killed, stopped and made to fail loads."""

import contextlib
import enum
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmcache.core.control import Control, ServerAddress
from lmcache.errors import ServerUnavailable
from lmcache.plugins.testing.ports import free_port

PATIENCE_S = 60.0
"""How long something may take to come true. Never asserted, only given up on."""

STARTING_S = 60.0
"""The same, for a server that starts."""

_SERVER = """
import sys
from pathlib import Path
from lmcache.core import protocol, service
from lmcache.errors import Refused

fault = Path(sys.argv.pop(1))
opened, confirm = service.HANDLERS[protocol.Open], service.HANDLERS[protocol.Confirm]

def failing_open(self, connection, request):
    if fault.read_text() == "open":
        raise Refused("the ticket is none: the suite wants this load to fail", code=protocol.ErrorCode.STALE, remedy="")
    return opened(self, connection, request)

def failing_confirm(self, connection, request):
    failing = fault.read_text()
    last = connection.rank == connection.namespace.geometry.ranks - 1
    if failing == "confirm" or (failing == "last rank" and last):
        return protocol.Confirmed(request.id, False)
    return confirm(self, connection, request)

service.HANDLERS[protocol.Open] = failing_open
service.HANDLERS[protocol.Confirm] = failing_confirm
from lmcache.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""`lmcache server` whose answers to loads can be told to be bad ones."""


class LoadFault(enum.Enum):
    """How loads fail."""

    NONE = ""
    OPEN = "open"
    """The ticket is refused, before anything is copied."""
    CONFIRM = "confirm"
    """No rank's load is confirmed: what was copied must not be used."""
    LAST_RANK = "last rank"
    """One rank's load is not confirmed."""


class ServerUnderControl:
    """One server after another, all at one address."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.address = ServerAddress("127.0.0.1", free_port())
        self.flags = flags
        """What the running server, or the last one, was started with."""
        self._log = folder / "server.log"
        self._fault = folder / "fault"
        self._process: subprocess.Popen[bytes] | None = None
        self.fail_loads(LoadFault.NONE)

    @property
    def running(self) -> bool:
        """Whether a server is there."""
        return self._process is not None

    def start(self, *flags: str) -> None:
        """Start a server, and return when it answers and has memory; without `flags`, with those of the last one."""
        self.flags = flags or self.flags
        command = [sys.executable, "-c", _SERVER, str(self._fault), "server", "--port", str(self.address.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*command, *self.flags], stdout=log, stderr=log)
        self.wait_until(self._is_ready, "the server is ready", STARTING_S)

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the server has ended:\n{self.log()}"
        with contextlib.suppress(ServerUnavailable):
            return self.gauges()["cells_backed"] > 0
        return False

    def kill(self) -> None:
        """As `kill -9` does. Nothing happens without a server."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Stop it (SIGSTOP): it neither answers nor goes away."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a stopped server go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def fail_loads(self, how: LoadFault) -> None:
        """From now on, have loads fail like that."""
        self._fault.write_text(how.value)

    # ---------------------------------------------------------------------------------------------------------- looking

    def status(self) -> dict[str, Any]:
        """The server's report."""
        with Control(self.address, deadline=5.0) as control:
            return control.status()

    def gauges(self) -> dict[str, int]:
        """What goes up and down."""
        gauges: dict[str, int] = self.status()["gauges"]
        return gauges

    def counters(self) -> dict[str, int]:
        """What only grows."""
        counters: dict[str, int] = self.status()["counters"]
        return counters

    def log(self) -> str:
        """The end of what it, and those before it, wrote."""
        return self._log.read_text(errors="replace")[-4000:]

    def _counts(self) -> str:
        """All that the server counts, as far as there is any, for a failure to show."""
        try:
            report = self.status()
        except ServerUnavailable as error:
            return f"nothing ({error})"
        counts = {**report["gauges"], **report["counters"]}
        return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "nothing"

    # ---------------------------------------------------------------------------------------------------------- waiting

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 0.0) -> None:
        """Return when it is true; an error of the test that names `what` where it never is, or not for so long."""
        end = time.monotonic() + (seconds or PATIENCE_S)
        while not condition():
            assert time.monotonic() < end, (
                f"it never was so that {what}; the server counts {self._counts()}; its log ends:\n{self.log()}"
            )
            time.sleep(0.02)

    def await_clients(self, number: int) -> None:
        """Return when so many clients are registered, neither more nor fewer."""
        self.wait_until(lambda: self.gauges()["clients"] == number, f"{number} clients are registered")

    def await_stores(self) -> None:
        """Return when no store is in flight."""
        with Control(self.address, deadline=5.0) as control:
            control.wait_idle(PATIENCE_S)

    def await_nothing_held(self) -> None:
        """Return when no ticket, reservation or pin is left: what ended late may take a moment to say so."""
        held = ("tickets", "reservations", "pinned_nodes", "cells_reserved")

        def nothing() -> bool:
            gauges = self.gauges()
            return not any(gauges[name] for name in held)

        self.wait_until(nothing, f"{', '.join(held)} are all 0")
