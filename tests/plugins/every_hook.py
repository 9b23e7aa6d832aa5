"""A plugin that implements every hook and writes down, in the file named by EVERY_HOOK_LOG, what it was called with."""

import os
from pathlib import Path

import click

from lmcache.core.adapter import EngineAdapter
from lmcache.core.admission import AdmissionPolicy, RetentionPolicy
from lmcache.core.codec import Codec
from lmcache.core.hookspecs import hookimpl
from lmcache.core.tier import StorageTier
from lmcache.geometry.groups import GroupKind
from lmcache.plugins.eviction.lru import LRU
from lmcache.plugins.manager import PluginManager


class Policy(LRU):
    name = "every-hook"


class Doorkeeper(AdmissionPolicy):
    name = "every-hook"

    def admit(self, offer): ...


class Adviser(RetentionPolicy):
    name = "every-hook"

    def advise(self, offer): ...


class Tier(StorageTier):
    scheme = "every-hook"

    def __init__(self, location): ...
    def store(self, key, parts, deadline): ...
    def load(self, key, into, deadline): ...
    def contains(self, keys, deadline): ...
    def delete(self, keys, deadline): ...
    def keys(self): ...


class Reverse(Codec):
    name = "every-hook"

    def __init__(self, options): ...
    def encode(self, parts, about): ...
    def decode(self, stored, into, about): ...


class Adapter(EngineAdapter):
    engine = "every-hook"
    module = "nowhere"
    status = "for tests"


class Spec:
    """A KV spec of the engine above."""


def note(hook, *arguments):
    with Path(os.environ["EVERY_HOOK_LOG"]).open("a") as log:
        print(hook, *arguments, file=log)


@hookimpl
def lmcache_register_eviction_policies():
    note("lmcache_register_eviction_policies")
    return [Policy]


@hookimpl
def lmcache_register_admission_policies():
    note("lmcache_register_admission_policies")
    return [Doorkeeper]


@hookimpl
def lmcache_register_retention_policies():
    note("lmcache_register_retention_policies")
    return [Adviser]


@hookimpl
def lmcache_register_storage_tiers():
    note("lmcache_register_storage_tiers")
    return [Tier]


@hookimpl
def lmcache_register_codecs():
    note("lmcache_register_codecs")
    return [Reverse]


@hookimpl
def lmcache_register_engine_adapters():
    note("lmcache_register_engine_adapters")
    return [Adapter]


@hookimpl
def lmcache_classify_kv_spec(engine, spec):
    note("lmcache_classify_kv_spec", engine, type(spec).__name__)
    return GroupKind.SCRATCH if isinstance(spec, Spec) else None


@hookimpl
def lmcache_register_commands(cli):
    note("lmcache_register_commands", cli.name)

    @cli.command("classify")
    def classify():
        """Classify a spec as an adapter does."""
        click.echo(PluginManager().classify_kv_spec("every-hook", Spec()))


@hookimpl
def lmcache_server_started(address):
    note("lmcache_server_started", address)


@hookimpl
def lmcache_after_store(events):
    note("lmcache_after_store", *(event.chunk.hex() for event in events))


@hookimpl
def lmcache_after_lookup(events):
    note("lmcache_after_lookup", *(event.hit for event in events))


@hookimpl
def lmcache_after_evict(events):
    note("lmcache_after_evict", *(event.chunk.hex() for event in events))


@hookimpl
def lmcache_server_stopping():
    note("lmcache_server_stopping")
