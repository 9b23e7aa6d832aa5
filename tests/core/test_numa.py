"""Slabs near the devices of the workers: made-up hosts of several nodes, and the real system call on this one."""

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from core_stand import FACTS, GEOMETRY, RunningServer, wait_until

from lmcache.core import numa
from lmcache.core.arena import SLAB_BYTES, Backer, Mapping, create_segment
from lmcache.core.client import Client
from lmcache.core.link import Engine, Link
from lmcache.core.numa import ANYWHERE, Placement, nodes_with_memory, prefer
from lmcache.core.protocol import Role

MIB = 1 << 20


@attrs.define
class Kernel:
    """Writes down on which node what shall lie; refuses from the given call on."""

    calls: list[tuple[int, int, int]] = attrs.field(factory=list)
    refuses: bool = False

    def __call__(self, address: int, size: int, node: int) -> None:
        if self.refuses:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        self.calls.append((address, size, node))


def placed(placement: Placement, count: int) -> None:
    for number in range(count):
        placement.place(number * SLAB_BYTES, SLAB_BYTES)


# --------------------------------------------------------------------------------------------------------- the decision


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", {0}), ("0-1\n", {0, 1}), ("0-2,4,6-7\n", {0, 1, 2, 4, 6, 7}), ("\n", set())]
)
def test_nodes_are_read_from_the_kernels_list(
    text: str, nodes: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "has_memory").write_text(text)
    monkeypatch.setattr(numa, "NODES", tmp_path)
    assert nodes_with_memory() == nodes
    monkeypatch.setattr(numa, "NODES", tmp_path / "none")
    assert nodes_with_memory() == frozenset()


def test_slabs_lie_where_the_only_device_is() -> None:
    kernel = Kernel()
    placement = Placement(frozenset({0, 1}), kernel)
    placement.near(1)
    placed(placement, 3)
    assert kernel.calls == [(number * SLAB_BYTES, SLAB_BYTES, 1) for number in range(3)]


def test_nodes_of_several_devices_take_turns_and_one_that_comes_later_catches_up() -> None:
    kernel = Kernel()
    placement = Placement(frozenset({0, 1, 2}), kernel)
    for node in (2, 2, 2, 0):
        placement.near(node)
    placed(placement, 4)
    placement.near(1)
    placed(placement, 3)
    assert [node for _, _, node in kernel.calls] == [0, 2, 0, 2, 1, 1, 0]
    assert placement.placed == {0: 3 * SLAB_BYTES, 1: 2 * SLAB_BYTES, 2: 2 * SLAB_BYTES}


@pytest.mark.parametrize("nodes", [frozenset[int](), frozenset({0})])
def test_on_a_host_of_one_node_nothing_happens(nodes: frozenset[int]) -> None:
    kernel = Kernel()
    placement = Placement(nodes, kernel)
    placement.near(0)
    placed(placement, 2)
    assert kernel.calls == []


@pytest.mark.parametrize("node", [ANYWHERE, 2, 1 << 40, -7])
def test_a_node_that_this_host_does_not_have_is_none(node: int) -> None:
    kernel = Kernel()
    placement = Placement(frozenset({0, 1}), kernel)
    placement.near(node)
    placed(placement, 2)
    assert kernel.calls == []


def test_a_kernel_that_refuses_is_asked_once_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Kernel(refuses=True)
    placement = Placement(frozenset({0, 1}), kernel)
    placement.near(1)
    with caplog.at_level(logging.WARNING):
        placed(placement, 2)
        placement.near(0)
        placed(placement, 2)
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning == (
        "L1 cannot be put near the devices, and lies wherever the kernel puts it: [Errno 1] Operation not permitted. "
        "In a container the server needs the capability SYS_NICE for it (`--cap-add SYS_NICE`)"
    )


# ------------------------------------------------------------------------------------------------ server and kernel


def test_a_slab_is_placed_before_it_is_backed() -> None:
    order: list[str] = []
    descriptor = create_segment(2 * SLAB_BYTES)
    mapping = Mapping(descriptor, 2 * SLAB_BYTES)
    os.close(descriptor)
    real = mapping.populate

    def populate(start: int, stop: int) -> None:
        order.append(f"backed {start}")
        real(start, stop)

    def place(address: int, size: int, node: int) -> None:
        order.append(f"placed {address - mapping.address} on {node}")

    mapping.populate = populate  # type: ignore[method-assign]
    placement = Placement(frozenset({0, 1}), place)
    backer = Backer(mapping, 1, lambda: None, placement=placement)
    backer.near(1)
    for _ in range(2):
        backer.request(2 * SLAB_BYTES)
        wait_until(lambda: not backer.working)
    backer.close()
    mapping.close()
    assert order == ["placed 0 on 1", "backed 0", f"placed {SLAB_BYTES} on 1", f"backed {SLAB_BYTES}"]


def test_a_worker_says_where_its_device_is_and_a_scheduler_does_not_count(
    serve: Callable[..., RunningServer], connect: Callable[..., Client]
) -> None:
    server = serve(backed=False)
    seen: list[int] = []
    server.server.service._backer.near = seen.append  # type: ignore[method-assign]
    address = server.server.socket_address
    links = [
        Link.register(address, Engine(FACTS, GEOMETRY, role, 0, node), 30.0)
        for role, node in ((Role.WORKER, 1), (Role.SCHEDULER, 1), (Role.WORKER, ANYWHERE))
    ]
    for link in links:
        link.close()
    assert seen == [1, ANYWHERE]


def test_this_kernel_takes_the_policy_and_keeps_it_with_the_file() -> None:
    if 0 not in nodes_with_memory():
        pytest.skip("this kernel knows no NUMA nodes")
    descriptor = create_segment(4 * MIB)
    server, worker = Mapping(descriptor, 4 * MIB), Mapping(descriptor, 4 * MIB)
    os.close(descriptor)
    try:
        try:
            prefer(server.address + MIB, 2 * MIB, 0)
        except PermissionError as error:
            pytest.skip(f"this container may not set memory policies: {error}")
        except OSError as error:
            if platform.machine() in {"x86_64", "aarch64"}:
                raise
            pytest.skip(str(error))
        found = [policy_of(server, at * MIB) for at in range(4)]
        assert found == ["default", "prefer:0", "prefer:0", "default"]
        server.populate(0, 4 * MIB)
        # what another process does to these pages follows the same policy
        assert policy_of(worker, MIB) == "prefer:0"
    finally:
        server.close()
        worker.close()


def test_what_the_kernel_refuses_is_an_error() -> None:
    if 0 not in nodes_with_memory():
        pytest.skip("this kernel knows no NUMA nodes")
    with pytest.raises(OSError, match=r"Invalid argument|Operation not permitted"):
        prefer(0, MIB, 1023)


def policy_of(mapping: Mapping, offset: int) -> str:
    """The memory policy at an offset, by get_mempolicy(2)."""
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
    mode, nodes = ctypes.c_int(), (ctypes.c_uint64 * 16)()
    of_address = 2
    words = (ctypes.c_ulong(n) for n in (1024, mapping.address + offset, of_address))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.syscall(ctypes.c_long(number), ctypes.byref(mode), nodes, *words) == 0, os.strerror(ctypes.get_errno())
    if mode.value == 0:
        return "default"
    assert mode.value == 1
    return f"prefer:{nodes[0].bit_length() - 1}"
