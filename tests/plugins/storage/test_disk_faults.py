"""Whatever happens to folder, device or process: a miss, a TierError that says why, and nothing left over."""

import contextlib
import errno
import logging
import mmap
import os
import shutil
import subprocess
import sys
import time

import pytest
from disk_rounds import run_rounds
from file_systems import drop_caches, ext4_on_image, mounted, tmpfs

from lmcache.core.blob import BlobIdentity, BlobStore, Loaded
from lmcache.core.tier import KEY_DIGITS, TierLocation
from lmcache.errors import TierError
from lmcache.plugins.storage.disk import DiskTier

BLOCK = 4096
PAYLOAD = os.urandom(10 * BLOCK)


def key(number):
    return f"ab{number:0{KEY_DIGITS - 2}x}"


def soon():
    return time.monotonic() + 60


@pytest.fixture
def open_tier():
    """Opens tiers, and closes them."""
    tiers = []

    def open_one(folder, **options):
        tiers.append(DiskTier(TierLocation("disk", path=str(folder), options={"size_gb": "1", **options})))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close()


@pytest.fixture(params=["auto", "off"], ids=["direct I/O", "page cache"])
def direct(request):
    return request.param


def parts(length):
    return [aligned(b"x" * length)]


def aligned(content):
    """A buffer that lies as direct I/O wants it."""
    buffer = memoryview(mmap.mmap(-1, len(content)))
    buffer[:] = content
    return buffer


def files(folder):
    return sorted(path.name for path in folder.glob("??/*"))


def identity(number):
    return BlobIdentity(b"n" * 16, {"model": "m"}, number.to_bytes(16, "big"), 0, 0, "", 256)


def load(blobs, number):
    into = aligned(bytes(len(PAYLOAD)))
    answer = blobs.load(identity(number), [into], soon())
    assert answer is not Loaded.LOADED or into == PAYLOAD
    return answer


# ------------------------------------------------------------------------------------------------------------- no room


def test_on_a_full_file_system_its_own_blobs_make_room(open_tier, tmp_path, direct):
    with tmpfs(tmp_path / "small", 4 << 20) as folder:
        tier = open_tier(folder, direct=direct)
        for number in range(40):
            tier.store(key(number), parts(300_000), soon())
            assert tier.load(key(number), parts(300_000), soon()) == 300_000
        usage = tier.usage()
        assert usage.blobs == len(files(folder)) < 14
        assert usage.bytes == usage.blobs * -(-300_000 // BLOCK) * BLOCK
        assert usage.evicted == 40 - usage.blobs


def test_where_others_fill_the_file_system_nothing_is_stored_and_nothing_left_over(open_tier, tmp_path, direct):
    with tmpfs(tmp_path / "small", 4 << 20) as folder:
        tier = open_tier(folder, direct=direct)
        tier.store(key(1), parts(BLOCK), soon())
        with (folder / "others").open("wb") as others, contextlib.suppress(OSError):
            os.posix_fallocate(others.fileno(), 0, shutil.disk_usage(folder).free)
        with pytest.raises(TierError, match=r"cannot store .*: No space left on device"):
            tier.store(key(2), parts(300_000), soon())
        assert files(folder) == []
        (folder / "others").unlink()
        tier.store(key(2), parts(300_000), soon())
        assert files(folder) == [key(2)]
        assert tier.usage().bytes == -(-300_000 // BLOCK) * BLOCK


LIMITED = """
import mmap, resource, sys, time
from lmcache.core.tier import TierLocation
from lmcache.errors import TierError
from lmcache.plugins.storage.disk import DiskTier
tier = DiskTier(TierLocation("disk", path=sys.argv[1], options={"size_gb": "1", "direct": sys.argv[2]}))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
tier.store("ab" * 20, [mmap.mmap(-1, 90_000)], time.monotonic() + 60)
try:
    tier.store("cd" * 20, [mmap.mmap(-1, 10_000_000)], time.monotonic() + 60)
except TierError as error:
    print(error)
print([key for key, _ in tier.keys()], tier.usage().bytes)
"""


def test_a_limit_on_the_size_of_files_is_said_and_leaves_no_part_of_one(tmp_path, direct):
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path, direct], capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"disk://{tmp_path} cannot store {'cd' * 20}: File too large\n['{'ab' * 20}'] {22 * BLOCK}\n"
    )
    assert files(tmp_path) == ["ab" * 20]


def test_more_than_the_file_system_has_room_for_is_said_at_start_with_both_figures(
    open_tier, tmp_path, monkeypatch, caplog
):
    # of which 2 GiB are free, and the tier has nothing yet
    system = os.statvfs_result((4096, 4096, 1 << 20, 1 << 20, 1 << 19, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: system)
    open_tier(tmp_path, size_gb="2").close()
    assert caplog.messages == []

    open_tier(tmp_path, size_gb="500").close()
    (said,) = caplog.messages
    assert said == (
        f"--l2 disk://{tmp_path} has size_gb=500, more than its file system has room for, 2 GB: whoever else writes to "
        "it takes room from the blobs; set size_gb to less, or free space"
    )


def test_a_file_system_without_direct_i_o_is_said_once_and_serves(open_tier, tmp_path, caplog):
    caplog.set_level(logging.INFO, "lmcache.tier")
    with mounted(tmp_path / "ram", "-t", "ramfs", "ramfs") as folder:
        tier = open_tier(folder)
        tier.store(key(1), parts(300_000), soon())
        assert tier.load(key(1), parts(300_000), soon()) == 300_000
        assert tier.alignment == 1
        assert {path.name[:12] for path in folder.iterdir()} == {"ab", "lmcache.lock", "lmcache.inde", "lmcache.log-"}
    name = f"disk://{folder}"
    assert caplog.messages == [
        f"{name} has no direct I/O (Invalid argument): blobs go through the page cache",
        f"{name} holds 0 blobs, 0 bytes of at most {2**30}",
    ]


# --------------------------------------------------------------------------------------------------- I/O errors, rights


def test_a_read_error_is_said_and_costs_the_blob_that_cannot_be_read_and_no_other(open_tier, tmp_path, direct):
    with ext4_on_image(tmp_path / "image", tmp_path / "mounted", 16 << 20) as folder:
        tier = open_tier(folder, direct=direct)
        tier.store(key(1), parts(5 << 20), soon())
        tier.store(key(2), parts(BLOCK), soon())
        drop_caches(folder)
        with (tmp_path / "image").open("r+b") as image:
            image.truncate(1 << 20)
        with pytest.raises(TierError, match=rf"^disk://{folder} cannot load {key(1)}: Input/output error$"):
            tier.load(key(1), parts(5 << 20), soon())
        assert tier.contains([key(1), key(2)], soon()) == [False, True]
        assert tier.load(key(1), parts(5 << 20), soon()) == 0
        assert tier.usage().bytes == BLOCK


def test_a_write_error_is_said_and_leaves_nothing(open_tier, tmp_path):
    """The device says that it cannot: what it stands on is full, which the file system does not know."""
    under, folder = tmp_path / "under", tmp_path / "mounted"
    with tmpfs(under, 3 << 20), ext4_on_image(under / "image", folder, 16 << 20):
        tier, said = open_tier(folder), []
        for number in range(10):
            try:
                tier.store(key(number), parts(1 << 20), soon())
            except TierError as error:
                said.append(str(error).rpartition(": ")[2])
        # what the file system makes of it in the end: then nothing can be removed any more
        ended = "Read-only file system"
        assert said
        assert set(said) <= {"Input/output error", "No space left on device", ended}
        assert ended in said or len(files(folder)) == tier.usage().blobs
        assert ended in said or not any(name.endswith(".part") for name in files(folder))


def test_on_a_file_system_that_became_read_only_loads_go_on_and_stores_say_why(open_tier, tmp_path):
    with tmpfs(tmp_path / "small", 4 << 20) as folder:
        tier = open_tier(folder)
        tier.store(key(1), parts(BLOCK), soon())
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        with pytest.raises(TierError, match=r"cannot store .*: Read-only file system"):
            tier.store(key(2), parts(BLOCK), soon())
        with pytest.raises(TierError, match=r"cannot delete .*: Read-only file system"):
            tier.delete([key(1)], soon())
        assert tier.load(key(1), parts(BLOCK), soon()) == BLOCK
        assert tier.usage().bytes == BLOCK
        tier.close()
        subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
        tier = open_tier(folder)
        assert list(tier.keys()) == [(key(1), BLOCK)]


RIGHTLESS = """
import os, sys, time
from lmcache.core.tier import TierLocation
from lmcache.errors import LMCacheError
from lmcache.plugins.storage.disk import DiskTier
location = TierLocation("disk", path=sys.argv[1], options={"size_gb": "1"})
tier = DiskTier(location)
blob = [bytearray(4096)]
tier.store("ab" * 20, blob, time.monotonic() + 60)
os.chmod(sys.argv[1] + "/ab", 0)
os.chmod(sys.argv[1], 0o500)
if not os.geteuid():
    os.seteuid(65534)
for call in (
    lambda: tier.store("ab" * 20, blob, time.monotonic() + 60),
    lambda: tier.load("ab" * 20, [memoryview(blob[0])], time.monotonic() + 60),
    lambda: tier.delete(["ab" * 20], time.monotonic() + 60),
    lambda: DiskTier(location),
):
    try:
        call()
    except LMCacheError as error:
        print(f"{type(error).__name__}: {error}".replace(sys.argv[1], "FOLDER"))
print(tier.usage().blobs)
"""


def test_without_the_right_to_the_folder_every_call_says_so(tmp_path):
    done = subprocess.run([sys.executable, "-c", RIGHTLESS, tmp_path], capture_output=True, text=True, check=True)
    tmp_path.chmod(0o700)
    (tmp_path / "ab").chmod(0o700)
    blob = "ab" * 20
    assert done.stdout.splitlines() == [
        f"TierError: disk://FOLDER cannot store {blob}: Permission denied",
        f"TierError: disk://FOLDER cannot load {blob}: Permission denied",
        f"TierError: disk://FOLDER cannot delete {blob}: Permission denied",
        # pytest's own folder above it is closed to others than root
        "ConfigError: --l2 disk://FOLDER: the folder cannot be opened: Permission denied; make it (mkdir -p FOLDER), "
        "or give the server's user the right to it"
        if not os.geteuid()
        else "ConfigError: --l2 disk://FOLDER: the folder cannot be written to: Permission denied; give the server's "
        "user the right to write there, or choose another folder",
        "1",
    ]


def test_a_folder_that_is_removed_under_it_is_made_again_blob_by_blob(open_tier, tmp_path):
    tier = open_tier(tmp_path)
    tier.store(key(1), parts(BLOCK), soon())
    (tmp_path / "ab" / key(1)).unlink()
    (tmp_path / "ab").rmdir()
    assert tier.load(key(1), parts(BLOCK), soon()) == 0
    assert tier.usage().bytes == 0
    tier.store(key(1), parts(BLOCK), soon())
    assert tier.load(key(1), parts(BLOCK), soon()) == BLOCK


# ----------------------------------------------------------------------------------------------- files others touch


@pytest.fixture
def stored(open_tier, tmp_path, direct):
    """A store with blobs 0 to 3, and the paths of their files."""
    tier = open_tier(tmp_path, direct=direct)
    blobs = BlobStore(tier)
    for number in range(4):
        blobs.store(identity(number), [aligned(PAYLOAD)], soon())
    return blobs, [tmp_path / blobs.key(identity(n))[:2] / blobs.key(identity(n)) for n in range(4)]


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: flip(path, 0), id="first bit"),
        pytest.param(lambda path: flip(path, 100), id="a bit of the header"),
        pytest.param(lambda path: flip(path, 4095), id="a bit of the padding"),
        pytest.param(lambda path: flip(path, 4096), id="a bit of the payload"),
        pytest.param(lambda path: flip(path, -1), id="last bit"),
        pytest.param(lambda path: os.truncate(path, 1), id="cut to a byte"),
        pytest.param(lambda path: os.truncate(path, 4096), id="cut to the header"),
        pytest.param(lambda path: os.truncate(path, 4096 + len(PAYLOAD) - 1), id="cut by a byte"),
        pytest.param(lambda path: os.truncate(path, 4096 + len(PAYLOAD) + 1), id="longer by a byte"),
        pytest.param(lambda path: path.write_bytes(b"somebody else's"), id="foreign"),
        pytest.param(lambda path: path.write_bytes(bytes(4096 + len(PAYLOAD))), id="zeros"),
    ],
)
def test_a_damaged_file_is_found_deleted_and_no_longer_counted(stored, damage):
    blobs, paths = stored
    before = blobs.tier.usage()
    damage(paths[1])
    assert [load(blobs, number) for number in range(4)] == [Loaded.LOADED, Loaded.DAMAGED, Loaded.LOADED, Loaded.LOADED]
    assert not paths[1].exists()
    assert load(blobs, 1) is Loaded.ABSENT
    assert (blobs.tier.usage().blobs, blobs.tier.usage().bytes) == (3, before.bytes // 4 * 3)
    blobs.store(identity(1), [aligned(PAYLOAD)], soon())
    assert load(blobs, 1) is Loaded.LOADED


def test_an_empty_file_is_absent_and_no_longer_said_to_be_there(stored):
    blobs, paths = stored
    os.truncate(paths[1], 0)
    assert load(blobs, 1) is Loaded.ABSENT
    assert blobs.contains([identity(1)], soon()) == [False]
    assert not paths[1].exists()
    assert blobs.tier.usage().blobs == 3


@pytest.mark.parametrize("what", [os.mkfifo, lambda path: path.symlink_to("notes")], ids=["a pipe", "a link"])
def test_a_pipe_or_a_link_in_place_of_a_blob_is_neither_waited_for_nor_followed(stored, what):
    blobs, paths = stored
    paths[1].rename(paths[1].with_name("notes"))
    what(paths[1])
    with contextlib.suppress(TierError):
        assert load(blobs, 1) is Loaded.ABSENT
    assert blobs.contains([identity(1)], soon()) == [False]
    blobs.store(identity(1), [aligned(PAYLOAD)], soon())
    assert load(blobs, 1) is Loaded.LOADED
    assert paths[1].with_name("notes").read_bytes()[4096:] == PAYLOAD


def test_files_that_changed_their_names_are_found_out(stored):
    blobs, paths = stored
    paths[0].rename(paths[1])
    assert load(blobs, 0) is Loaded.ABSENT
    assert load(blobs, 1) is Loaded.DAMAGED
    assert [load(blobs, number) for number in (2, 3)] == [Loaded.LOADED, Loaded.LOADED]


def test_a_file_removed_by_somebody_is_absent_and_no_longer_counted(stored):
    blobs, paths = stored
    paths[2].unlink()
    assert load(blobs, 2) is Loaded.ABSENT
    assert blobs.tier.usage().blobs == 3


def test_a_file_that_is_cut_while_it_is_read_is_damaged(stored, monkeypatch):
    blobs, paths = stored
    fstat = os.fstat

    def cut(fd):
        facts = fstat(fd)
        with contextlib.suppress(FileNotFoundError):
            os.truncate(paths[1], 9_000)
        return facts

    monkeypatch.setattr(os, "fstat", cut)
    assert load(blobs, 1) is Loaded.DAMAGED


def test_a_store_that_is_interrupted_anywhere_leaves_nothing(open_tier, tmp_path, monkeypatch, direct):
    """What no device here can be made to do: fail after so many bytes, or be cut short."""
    tier, real = open_tier(tmp_path, direct=direct), os.pwritev
    for most, failure in [(0, OSError(errno.EIO, "Input/output error")), (5000, KeyboardInterrupt()), (4096, None)]:
        written = []

        def pwritev(fd, buffers, offset, most=most, failure=failure, written=written):
            if sum(written) >= most and failure:
                raise failure
            written.append(real(fd, [memoryview(buffers[0])[:4096]], offset))
            return written[-1]

        monkeypatch.setattr(os, "pwritev", pwritev)
        if failure:
            with pytest.raises((TierError, KeyboardInterrupt)):
                tier.store(key(1), parts(20_001), soon())
            assert files(tmp_path) == []
            assert tier.usage().bytes == 0
        else:
            tier.store(key(1), parts(20_001), soon())
            assert len(written) == 5
            assert (tmp_path / "ab" / key(1)).read_bytes() == b"x" * 20_001


# --------------------------------------------------------------------------------------------------------------- killed


def test_killed_at_random_points_of_writes_every_blob_is_whole_or_absent(tmp_path):
    found = run_rounds(tmp_path, rounds=10, seed=5)
    assert found["leavings"] > 0, "no process was killed while it wrote"
    assert found["loaded"] > 100
    assert found["loaded"] + found["absent"] == 600
