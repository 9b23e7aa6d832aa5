"""What `lmcache bench` measures, and how much of it."""

from collections.abc import Sequence
from pathlib import Path

import attrs

from lmcache.bench.bulk import measure_bulk
from lmcache.bench.codecs import measure_codec
from lmcache.bench.copying import measure_copying
from lmcache.bench.device_page import as_markdown
from lmcache.bench.figures import Figure, Step
from lmcache.bench.hanging_lookups import measure_lookups_beside_hanging
from lmcache.bench.lookups import measure_lookups
from lmcache.bench.machine import this_machine
from lmcache.bench.policies import measure_policies
from lmcache.bench.shapes import page_shapes
from lmcache.bench.startup import measure_startup
from lmcache.bench.tier_subject import tier_subject
from lmcache.bench.tiers import measure_tier, most_bytes, prompt_bytes
from lmcache.errors import ConfigError
from lmcache.plugins.manager import PluginManager

MIB = 1 << 20


def measure(quick: bool, step: Step) -> list[Figure]:
    """Rows 1, 2, 5, 6 and 11, which need no engine. Two to three minutes; `quick` takes a few seconds."""
    figures: list[Figure] = []
    for shape in page_shapes():
        # a full prompt is several times what a CPU caches
        figures += measure_copying(shape, 1 if quick else 15, 32 * MIB if quick else 128 * MIB, step)
    figures += measure_lookups(2 if quick else 16, 512, 20 if quick else 1000, step)
    figures += measure_startup(1 if quick else 5, step)
    figures += measure_policies(10_000 if quick else 1_000_000, 3 if quick else 40, step)
    figures += measure_bulk(1 if quick else 9, 8 if quick else 64, step)
    return figures


def measure_engine(engine: str, quick: bool, step: Step) -> list[Figure]:
    """Rows 3 and 4, in a real engine. A few minutes, half of them the engine's start. Raises ConfigError without it."""
    from lmcache.bench.vllm_rows import measure_vllm

    measures = {"vllm": measure_vllm}
    return measures[engine](quick, step)


def measure_device(name: str, quick: bool, step: Step, page: Path | None) -> tuple[str, list[Figure], list[str]]:
    """What the device is, row 10, and what went wrong. A few minutes. Raises ConfigError without torch or the device.

    `page`, if there is one, is written anew whenever more has been measured.
    """
    try:
        from lmcache.bench.device import DeviceRun, describe_device, open_device
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("--device takes torch, which is not installed here", remedy="pip install torch") from None
    device = open_device(name)
    machine = attrs.evolve(this_machine(), device=describe_device(device))

    def write(run: DeviceRun) -> None:
        if page is not None:
            page.write_text(as_markdown(machine, run.figures, run.notes, quick=quick))

    run = DeviceRun(device, quick, step, write)
    run.measure()
    write(run)
    return machine.device, run.figures, run.notes


def measure_tiers(urls: Sequence[str], plugins: Sequence[str], quick: bool, step: Step) -> list[Figure]:
    """Rows 7 to 9. About a minute a tier on an NVMe drive. Raises ConfigError for a URL that cannot be opened."""
    figures: list[Figure] = []
    manager = PluginManager(plugins)
    reference, llama, *_ = page_shapes()
    for url in urls:
        with tier_subject(url, manager, most_bytes(quick)) as subject:
            for shape in (reference, llama):
                figures += measure_tier(subject, plugins, shape, 1 if quick else 9, prompt_bytes(quick), step)
            if subject.codec:
                figures += measure_codec(subject.codec, 1 if quick else 9, step)
    figures += measure_lookups_beside_hanging(20 if quick else 2000, step)
    return figures
