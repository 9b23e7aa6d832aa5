"""What this process of SGLang serves, as SGLang itself has published it."""

import contextlib
from typing import Any

import sglang
from sglang.srt import runtime_context

from lmcache.engines.sglang.identity import Model, read_model

UNPUBLISHED = (ValueError, RuntimeError)
"""What SGLang raises where nothing was published: in a process that makes pools and serves nothing."""


def served_model(args: Any = None, name: str = "") -> Model:
    """The model, from `args` if SGLang has handed them over; where nothing is known of it, it is but a `name`."""
    with contextlib.suppress(*UNPUBLISHED):
        args = args or runtime_context.get_server_args()
    if args is None:
        return Model(path=name, version=sglang.__version__)
    config = None
    with contextlib.suppress(*UNPUBLISHED):
        config = runtime_context.process_model_config().hf_config
    return read_model(args, sglang.__version__, config)
