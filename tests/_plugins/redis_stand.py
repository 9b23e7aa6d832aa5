"""Real redis servers for tests: Debian's `redis-server` on free loopback ports, alone, with TLS, or as a cluster."""

import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.core.tier import TierLocation
from lmcache.plugins.testing.ports import free_port

START_S = 20.0
"""A server that has not answered by then will not."""
CLUSTER_BUS = 10_000
"""A server of a cluster talks to the others on a port that is higher by this."""

_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
_SERVER, _CLI = shutil.which("redis-server", path=_PATH), shutil.which("redis-cli", path=_PATH)

needs_redis = pytest.mark.skipif(
    _SERVER is None or _CLI is None,
    reason="no redis-server on PATH; `make test` puts Debian's into .venv where apt-get can fetch it",
)


class RedisServer:
    """A redis server in a process of its own. What it holds lives in memory: a restarted one is empty."""

    def __init__(self, folder: Path, *options: str, port: int | None = None, tls: "Certificates | None" = None) -> None:
        self.port = port or free_port()
        self.tls = tls
        self._folder = folder
        self._options = options
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        listen = ["--port", str(self.port)]
        if self.tls:
            listen = ["--port", "0", "--tls-port", str(self.port), *self.tls.server_options()]
        command = [str(_SERVER), *listen, "--bind", "127.0.0.1", "--dir", str(self._folder), "--save", ""]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)
        end = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "redis.log").read_text()
            assert time.monotonic() < end, "redis-server does not answer"
            time.sleep(0.02)

    def client(self, **options: Any) -> Any:
        """A client of redis-py, for what the test itself does on the server. Close it."""
        import redis

        if self.tls:
            options |= {"ssl": True, "ssl_ca_certs": str(self.tls.authority)}
        return redis.Redis(host="127.0.0.1", port=self.port, **options)

    @contextlib.contextmanager
    def talking(self, **options: Any) -> Iterator[Any]:
        """The same for a moment."""
        with contextlib.closing(self.client(**options)) as client:
            yield client

    def location(self, scheme: str = "redis", path: str = "", **options: str) -> TierLocation:
        """Where a tier finds it."""
        return TierLocation(scheme, "127.0.0.1", self.port, path, options)

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stop its process: connections are accepted by the kernel, nobody answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it, however it is."""
        if self._process is not None:
            self.resume()
            self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=START_S)
            self._process = None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as line:
            if self.tls:
                return True
            line.sendall(b"PING\r\n")
            return line.recv(64)[:1] in (b"+", b"-")
        return False


class RedisCluster:
    """Three servers that share the slots among them; and three more that stand in for one of them each, if wanted."""

    def __init__(self, folder: Path, replicas: int = 0) -> None:
        # a server that a busy machine keeps waiting is not dead; where one is to take over, that is waited for
        timeout_ms = "3000" if replicas else "15000"
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", timeout_ms, "--repl-diskless-sync-delay", "0")
        self.servers: list[RedisServer] = []
        try:
            for number in range(3 * (1 + replicas)):
                self.servers.append(RedisServer(folder / f"node{number}", *options, port=free_port(beside=CLUSTER_BUS)))
            self._join(replicas)
        except BaseException:
            self.close()
            raise

    def location(self, **options: str) -> TierLocation:
        """Where a tier finds it: the first of its servers."""
        return self.servers[0].location(cluster="on", **options)

    def close(self) -> None:
        """End all servers."""
        for server in self.servers:
            server.close()

    def primaries(self) -> list[RedisServer]:
        """Those that have slots, as the first server sees it."""
        with self.servers[0].talking() as client:
            ports = {entry[2][1] for entry in client.execute_command("CLUSTER SLOTS", NEVER_DECODE=[])}
        return [server for server in self.servers if server.port in ports]

    def _join(self, replicas: int) -> None:
        addresses = [f"127.0.0.1:{server.port}" for server in self.servers]
        command = [str(_CLI), "--cluster", "create", *addresses, "--cluster-replicas", str(replicas), "--cluster-yes"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        end = time.monotonic() + START_S
        for server in self.servers:
            with server.talking() as client:
                while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                    assert time.monotonic() < end, "the cluster does not come up"
                    time.sleep(0.05)


class Certificates:
    """A certificate authority that nobody knows, and a certificate for 127.0.0.1 that it has signed."""

    def __init__(self, folder: Path) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        def certificate(name: str, key: Any, signer: Any, issuer: str, extension: Any) -> bytes:
            now = datetime.datetime.now(datetime.UTC)
            builder = (
                x509.CertificateBuilder()
                .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
                .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
                .public_key(key.public_key())
                .serial_number(x509.random_serial_number())
                .not_valid_before(now - datetime.timedelta(days=1))
                .not_valid_after(now + datetime.timedelta(days=1))
                .add_extension(extension, critical=True)
            )
            return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

        folder.mkdir(parents=True, exist_ok=True)
        self.authority, self.certificate, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        above, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        loopback = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        self.authority.write_bytes(
            certificate("test CA", above, above, "test CA", x509.BasicConstraints(ca=True, path_length=0))
        )
        self.certificate.write_bytes(certificate("127.0.0.1", own, above, "test CA", loopback))
        self.key.write_bytes(
            own.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )

    def server_options(self) -> list[str]:
        """How redis-server is told."""
        return [
            *("--tls-cert-file", str(self.certificate)),
            *("--tls-key-file", str(self.key)),
            *("--tls-ca-cert-file", str(self.authority)),
            *("--tls-auth-clients", "no"),
        ]
