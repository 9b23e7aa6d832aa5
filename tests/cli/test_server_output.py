"""A server whose standard output takes nothing serves, ends in order, and does not call that a fault of its own."""

import signal
import socket
import subprocess
import sys

import pytest
from core_stand import PATIENCE_S, wait_until

from lmcache.core.control import Control, ServerAddress
from lmcache.errors import ServerUnavailable


def answers(port: int) -> bool:
    try:
        with Control(ServerAddress(port=port), PATIENCE_S) as control:
            return control.ping() > 0
    except ServerUnavailable:
        return False


@pytest.mark.parametrize(("redirection", "says"), [("1>&-", ""), ("1>/dev/full", "No space left on device")])
def test_a_server_without_a_standard_output_serves_and_ends_in_order(redirection: str, says: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    command = f"exec {sys.executable} -m lmcache server --port {port} --l1-size-gb 0.05 --log-level warning"
    with subprocess.Popen(["sh", "-c", f"{command} {redirection}"], stderr=subprocess.PIPE, text=True) as server:
        wait_until(lambda: server.poll() is not None or answers(port))
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate()
    assert server.returncode == 0, errors
    assert "internal error" not in errors
    assert says in errors
