"""A server of our own for a while: a child process on a free port, as `demo` and `bench` need one."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

from lmcache.errors import LMCacheError

_READY = re.compile(r"lmcache server ready on (\S+): ")


@contextlib.contextmanager
def child_server(*arguments: str) -> Iterator[str]:
    """Run `lmcache server --port 0 ARGUMENTS` for the length of the block; gives its `host:port`.

    Raises LMCacheError with the server's own words if it does not start. It is drained and ended with the block.
    """
    command = [sys.executable, "-m", "lmcache", "server", "--port", "0", "--log-level", "error", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            ready = _READY.match(process.stdout.readline() if process.stdout else "")
            if ready is None:
                raise LMCacheError(f"the server did not start: {process.communicate()[1].strip()}")
            yield ready[1]
        finally:
            process.terminate()
            process.communicate()  # reads to the end, so that the server never waits for a reader
