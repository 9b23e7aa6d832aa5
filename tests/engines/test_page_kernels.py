"""The kernel, compiled for cards that are not here. What it does: tests/engines/test_staging.py."""

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton is installed"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch is installed"),
]

COMPILE = """
import sys
import triton.language as tl
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from lmcache.engines.page_kernels import BYTES_AT_ONCE, _move

if "nvidia" not in backends:
    sys.exit("this Triton does not compile for NVIDIA")
arguments = {name: "i32" for name in ("count_jobs", "first", "count")} | {"memory": "i64"}
arguments |= {name: "*i64" for name in ("jobs", "ids", "starts")}
arguments |= {name: "constexpr" for name in ("STORE", "ELEMENT", "LANES")}
signature = {name: arguments[name] for name in _move.arg_names}
for capability in map(int, sys.argv[1:]):
    for store in (True, False):
        for element, size in ((tl.int64, 8), (tl.uint8, 1)):
            fixed = {"STORE": store, "ELEMENT": element, "LANES": BYTES_AT_ONCE // size}
            made = compile(ASTSource(_move, signature, fixed), target=GPUTarget("cuda", capability, 32))
            print(capability, store, element, len(made.asm["cubin"]))
"""


def test_the_kernel_compiles_for_ampere_hopper_and_blackwell() -> None:
    # in a process of its own: here the interpreter may be on, and a compiler keeps what it loads
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, "80", "90", "100"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "does not compile for NVIDIA" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * 2 * 2
    assert all(int(line.split()[-1]) > 1000 for line in lines), lines
