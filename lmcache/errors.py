"""Every error the project raises on purpose. Imports nothing, so that anything may raise them.

    LMCacheError                      has `remedy`: what to do about it
    ├── ConfigError (ValueError)      a flag, a key or a file is wrong
    │   ├── GeometryError             a KV group or a chunk size that cannot be served
    │   └── PluginError               a plugin that cannot be loaded, or two that claim one name
    ├── MemoryLimitError (MemoryError)   the host or the container does not have the memory asked for
    ├── TierError (OSError)           a storage tier that could not do what it was asked
    │   └── CodecError                a blob whose payload cannot be read back
    ├── LoadFailed (RuntimeError)     an engine counts on a load that did not succeed, and cannot compute instead
    ├── ServerUnavailable (ConnectionError)   no server, or none that answers
    │   ├── LinkLost                  the server or its link ended; the client is registering again
    │   └── DeadlineExceeded (TimeoutError)   no answer within the deadline
    └── ProtocolError                 the peer sent something that is not our protocol
        ├── VersionMismatch           the peer speaks another protocol version
        └── Refused                   the server understood the request and refused it

An error names the culprit, what was wished, the fact that stands against it, and the remedy.
"""


class LMCacheError(Exception):
    """Base of all of them. `remedy` is one sentence that says what to do, or empty."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}; {self.remedy}" if self.remedy else message


class ConfigError(LMCacheError, ValueError):
    """A setting that cannot be honoured; raised before anything is served."""


class GeometryError(ConfigError):
    """KV groups, or a chunk size for them, that cannot be served."""


class PluginError(ConfigError):
    """A plugin that cannot be loaded, lacks what it promises, or claims a name that is taken."""


class MemoryLimitError(LMCacheError, MemoryError):
    """More memory than the host or the container has."""


class TierError(LMCacheError, OSError):
    """A storage tier could not store, load, look or delete in time; the server goes on without it."""


class CodecError(TierError):
    """Bytes that are not what the codec wrote for this blob, or that it cannot read with the key that it has."""


class LoadFailed(LMCacheError, RuntimeError):
    """A load that an engine counts on did not succeed.

    Raised only where the engine has no way to compute instead: to go on would be to answer wrongly.
    """


class ServerUnavailable(LMCacheError, ConnectionError):
    """No server answers at the address; callers go on without the cache."""


class LinkLost(ServerUnavailable):
    """The link ended while a request was in flight or before it was sent.

    Whatever it held is forgotten by the server.
    """


class DeadlineExceeded(ServerUnavailable, TimeoutError):
    """No answer came within the deadline. The link is given up, so a late answer can never be taken for another's."""


class ProtocolError(LMCacheError):
    """The peer sent bytes that are not a message of this protocol."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol; names both."""


class Refused(ProtocolError):
    """The server refused a well-formed request. `code` is one of `protocol.ErrorCode`'s values."""

    def __init__(self, message: str, *, code: str, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.code = code


def with_extra(name: str) -> str:
    """A remedy: how to get what an extra brings. PyPI's `lmcache` is another project, so its name would bring that."""
    return f"install this lmcache with its extra `{name}`: in its checkout, pip install '.[{name}]'"
