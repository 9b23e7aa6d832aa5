"""The disk tier counts what it keeps, finds it again, and shares its folder with nobody."""

import contextlib
import errno
import os
import random
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import disk_reopen
import pytest

from lmcache.core.tier import KEY_DIGITS, TierLocation
from lmcache.errors import ConfigError, TierError
from lmcache.plugins.storage import disk_catalogue, disk_file
from lmcache.plugins.storage.disk import DiskTier

BLOCK = 4096


def key(number):
    return f"{number:0{KEY_DIGITS - 2}x}ab"


def soon():
    return time.monotonic() + 60


def store(tier, number, length=BLOCK):
    tier.store(key(number), [bytes([number % 251 + 1]) * length], soon())


def holds(tier, number, length=BLOCK):
    into = bytearray(length)
    found = tier.load(key(number), [memoryview(into)], soon())
    assert into[:found] == bytes([number % 251 + 1]) * min(found, length)
    return bool(found)


def counted(folder):
    """Files and bytes in whole blocks, as the filesystem tells."""
    files = [file for file in folder.glob("??/*") if file.is_file()]
    return len(files), sum(-(-file.stat().st_size // BLOCK) * BLOCK for file in files)


@pytest.fixture
def opened(tmp_path):
    """Opens tiers in one folder, with room for `blocks`; closes what is still open."""
    tiers = []

    def open_tier(blocks=100, **options):
        options = {"size_gb": str(blocks * BLOCK / 2**30), **options}
        tier = DiskTier(TierLocation("disk", path=str(tmp_path), options=options))
        tiers.append(tier)
        return tier

    yield open_tier
    for tier in tiers:
        tier.close()


# ---------------------------------------------------------------------------------------------- room, and what makes it


def test_the_blob_used_longest_ago_makes_room(opened, tmp_path):
    tier = opened(blocks=4)
    for number in range(4):
        store(tier, number)
    assert holds(tier, 0)
    store(tier, 4)
    assert [holds(tier, number) for number in range(5)] == [True, False, True, True, True]
    assert tier.usage().evicted == 1
    assert counted(tmp_path) == (4, 4 * BLOCK)


def test_of_a_prompt_the_tail_makes_room_and_not_the_beginning(opened):
    tier = opened(blocks=6)
    for number in range(4):
        store(tier, number)
    store(tier, 9)
    tier.touch([key(number) for number in (3, 2, 77, 1, 0)])  # 77 is not there
    for number in (10, 11, 12):
        store(tier, number)
    assert [holds(tier, number) for number in (0, 1, 2, 3, 9)] == [True, True, True, False, False]


def test_another_policy_decides_otherwise(opened):
    tier = opened(blocks=4, policy="fifo")
    for number in range(4):
        store(tier, number)
    assert holds(tier, 0)
    store(tier, 4)
    assert [holds(tier, number) for number in range(5)] == [False, True, True, True, True]


def test_as_many_go_as_must_and_no_more(opened, tmp_path):
    tier = opened(blocks=10)
    for number in range(5):
        store(tier, number, 2 * BLOCK)
    store(tier, 5, 3 * BLOCK - 7)
    assert [holds(tier, number, 2 * BLOCK) for number in range(5)] == [False, False, True, True, True]
    assert counted(tmp_path) == (4, 9 * BLOCK)
    assert (tier.usage().blobs, tier.usage().bytes, tier.usage().limit_bytes) == (4, 9 * BLOCK, 10 * BLOCK)


def test_files_are_counted_in_whole_blocks(opened):
    tier = opened()
    for number, (length, blocks) in enumerate([(1, 1), (4095, 1), (4096, 1), (4097, 2), (8193, 3)]):
        before = tier.usage().bytes
        store(tier, number, length)
        assert tier.usage().bytes - before == blocks * BLOCK


def test_a_blob_larger_than_the_limit_is_refused_and_evicts_nothing(opened):
    tier = opened(blocks=4)
    store(tier, 1)
    with pytest.raises(TierError, match=r"cannot store .*: 20480 bytes do not fit: the tier may take 16384"):
        store(tier, 2, 5 * BLOCK)
    assert holds(tier, 1)


def test_what_is_being_written_is_counted_before_it_is_there(opened, tmp_path):
    """Two at once must not each take the last room."""
    tier, most = opened(blocks=4), []

    write = disk_file.write

    def write_two(fd, parts, deadline):
        write(fd, parts, deadline)
        disk_file.write = write
        for number in (2, 3):
            store(tier, number, 2 * BLOCK)
            most.append(counted(tmp_path)[1])

    disk_file.write = write_two
    try:
        store(tier, 1, 2 * BLOCK)
    finally:
        disk_file.write = write
    assert most == [4 * BLOCK, 4 * BLOCK]
    assert counted(tmp_path) == (2, 4 * BLOCK)


def test_threads_that_store_and_load_while_room_is_made_keep_count(opened, tmp_path):
    tier, done, most, failures = opened(blocks=40), threading.Event(), [], []

    def work(thread):
        source = random.Random(thread)
        for _ in range(150):
            number = source.randrange(60)
            try:
                store(tier, number, (number % 5 + 1) * BLOCK)
                holds(tier, source.randrange(60), BLOCK * 6)
                tier.delete([key(source.randrange(60))], soon())
            except TierError as error:  # others are writing, and take all of the room
                failures.append(str(error))

    def watch():
        while not done.is_set():
            with contextlib.suppress(FileNotFoundError):
                most.append(counted(tmp_path)[1])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert max(most) <= 40 * BLOCK
    assert counted(tmp_path) == (tier.usage().blobs, tier.usage().bytes)
    assert tier._index.reserved == 0
    assert tier.usage().evicted > 20
    assert failures == []


def test_a_file_is_counted_once_when_it_gets_its_name_and_nothing_goes_for_it(opened, monkeypatch):
    tier = opened(blocks=2)
    keep_the_log_short = tier._keep_the_log_short

    def meanwhile() -> None:
        monkeypatch.setattr(tier, "_keep_the_log_short", keep_the_log_short)
        store(tier, 2)  # while the first has its name, and its call has not come back

    monkeypatch.setattr(tier, "_keep_the_log_short", meanwhile)
    store(tier, 1)
    assert tier.contains([key(1), key(2)], soon()) == [True, True]
    assert (tier.usage().evicted, tier._index.reserved) == (0, 0)


@pytest.fixture
def slow_removal(monkeypatch):
    """Files go only once `let_go` is set, or cannot go at all if `refused` is; `begun` is set when one is to go."""
    state = SimpleNamespace(begun=threading.Event(), let_go=threading.Event(), refused=False)
    unlink = os.unlink

    def unlink_later(path, **options):
        if len(Path(path).name) == KEY_DIGITS:
            state.begun.set()
            assert state.let_go.wait(60)
            if state.refused:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", unlink_later)
    yield state
    state.let_go.set()


def test_while_a_file_goes_to_make_room_nobody_waits_for_it(opened, tmp_path, slow_removal):
    tier = opened(blocks=2)
    store(tier, 1)
    store(tier, 2)
    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(store, tier, 3)
        assert slow_removal.begun.wait(60)
        assert tier.contains([key(1), key(2), key(3)], soon()) == [False, True, False]
        assert holds(tier, 2)
        assert counted(tmp_path) == (2, 2 * BLOCK)  # nothing of the third is written as long as the first is there
        slow_removal.let_go.set()
        third.result(60)
    assert tier.contains([key(1), key(2), key(3)], soon()) == [False, True, True]
    assert counted(tmp_path) == (tier.usage().blobs, tier.usage().bytes) == (2, 2 * BLOCK)
    assert tier.usage().evicted == 1


def test_a_blob_stored_anew_while_the_old_one_goes_is_not_taken_with_it(opened, tmp_path, slow_removal):
    tier = opened(blocks=3)
    for number in (1, 2, 3):
        store(tier, number)
    with ThreadPoolExecutor(2) as pool:
        fourth = pool.submit(store, tier, 4)
        assert slow_removal.begun.wait(60)
        tier._index.limit += 2  # so that there is room without another that goes
        again = pool.submit(store, tier, 1)
        with pytest.raises(TierError, match="the deadline has passed"):
            tier.store(key(1), [b"x"], time.monotonic() + 0.05)
        slow_removal.let_go.set()
        fourth.result(60)
        again.result(60)
    assert holds(tier, 1)
    assert holds(tier, 4)
    assert counted(tmp_path) == (tier.usage().blobs, tier.usage().bytes)


def test_a_file_that_cannot_go_is_a_blob_as_before(opened, tmp_path, slow_removal):
    tier = opened(blocks=2)
    store(tier, 1)
    store(tier, 2)
    slow_removal.refused = True
    slow_removal.let_go.set()
    with pytest.raises(TierError, match="Input/output error"):
        store(tier, 3)
    assert [holds(tier, number) for number in (1, 2, 3)] == [True, True, False]
    assert (tier.usage().blobs, tier.usage().evicted, tier._index.reserved) == (2, 0, 0)
    slow_removal.refused = False
    store(tier, 3)
    assert counted(tmp_path) == (tier.usage().blobs, tier.usage().bytes) == (2, 2 * BLOCK)


def test_names_have_one_length_and_are_spread_over_sub_folders(opened, tmp_path):
    tier = opened()
    tier.store("ab" + "0" * 38, [b"one"], soon())
    tier.store("cd" + "0" * 38, [b"two"], soon())
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.glob("??/*")) == [
        "ab/ab" + "0" * 38,
        "cd/cd" + "0" * 38,
    ]


def test_files_are_for_the_server_s_user_only(opened, tmp_path):
    store(opened(), 1)
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.glob("*")} == {"0o700", "0o600"}
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.glob("??/*")} == {"0o600"}


# -------------------------------------------------------------------------------------------------------- opened again


def killed(tier):
    """Leave the folder as `kill -9` does: nothing is written any more, and the lock is free."""
    tier._folder.close()
    tier.close = lambda: None


@pytest.mark.parametrize("how", ["closed well", "killed", "crash of the host"])
def test_opened_again_it_has_the_same_blobs_counts_and_order(opened, tmp_path, how):
    tier = opened(blocks=11)
    for number in range(6):
        store(tier, number, BLOCK + number)
        os.utime(tmp_path / "00" / key(number), (number + 1, number + 1))
    before = tier.usage()
    if how != "crash of the host":
        assert holds(tier, 0)
    if how == "killed":
        killed(tier)
    else:
        tier.close()
        assert [path.name for path in tmp_path.glob("lmcache.*") if path.suffix != ".lock"] == ["lmcache.index"]
    if how == "crash of the host":
        (tmp_path / "lmcache.index").unlink()
    tier = opened(blocks=11)
    assert (tier.usage().blobs, tier.usage().bytes) == (before.blobs, before.bytes) == (6, 11 * BLOCK)
    store(tier, 6)
    gone = [number for number in range(7) if not tier.contains([key(number)], soon())[0]]
    assert gone == ([1] if how == "closed well" else [0])  # after a crash the order is right to a minute
    assert counted(tmp_path)[1] == tier.usage().bytes


@pytest.mark.parametrize("crash", ["of the server", "of the host"])
def test_a_load_is_remembered_across_a_crash_to_a_minute(opened, tmp_path, crash):
    tier = opened(blocks=2)
    for number in range(2):
        store(tier, number)
        os.utime(tmp_path / "00" / key(number), (1000 + number, 1000 + number))
    tier.close()
    (tmp_path / "lmcache.index").unlink()
    tier = opened(blocks=2)
    assert holds(tier, 0)
    killed(tier)
    if crash == "of the host":
        (tmp_path / "lmcache.index").unlink()
    tier = opened(blocks=2)
    store(tier, 2)
    assert [holds(tier, number) for number in range(3)] == [True, False, True]


def test_what_came_and_went_while_no_server_ran_is_noticed_although_there_is_an_index(opened, tmp_path):
    tier = opened()
    for number in range(3):
        store(tier, number)
    tier.close()
    (tmp_path / "00" / key(1)).unlink()
    (tmp_path / "00" / key(7)).write_bytes(bytes([8]) * 5000)
    tier = opened()
    assert sorted(tier.keys()) == [(key(0), BLOCK), (key(2), BLOCK), (key(7), 5000)]
    assert counted(tmp_path) == (3, tier.usage().bytes) == (3, 4 * BLOCK)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
def test_an_index_that_is_damaged_is_not_believed(opened, tmp_path, damage):
    tier = opened()
    for number in range(3):
        store(tier, number)
    tier.close()
    index = tmp_path / "lmcache.index"
    data = bytearray(index.read_bytes())
    if damage == "flip":
        data[40 + 20] ^= 1  # of a length
    elif damage == "cut":
        del data[-36:]
    elif damage == "empty":
        data.clear()
    elif damage == "foreign":
        data[:] = b"hello" * 20
    index.write_bytes(data)
    tier = opened()
    assert sorted(tier.keys()) == [(key(number), BLOCK) for number in range(3)]
    assert tier.usage().bytes == 3 * BLOCK


@pytest.fixture
def looked_at(monkeypatch):
    """Names of files that a start looks at one by one."""
    names, stat = [], os.stat

    def noted(path, **options):
        names.extend([path] if "dir_fd" in options else [])
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", noted)
    return names


TAIL = [disk_reopen.key(f"more {number}") for number in range(7)]


@pytest.fixture
def after_a_kill(tmp_path):
    """The folder of a process that began with 50 blobs, stored as many as TAIL has, and was killed."""
    disk_reopen.make_files(tmp_path, 50)
    disk_reopen.reopened(tmp_path)
    disk_reopen.kill_one(tmp_path, len(TAIL))
    return tmp_path


def log_of(folder):
    [log] = folder.glob("lmcache.log-*")
    return log


def test_after_a_kill_the_files_that_the_log_names_are_looked_at_and_no_others(after_a_kill, looked_at):
    for _ in range(2):  # whoever opens it goes on where the killed one was
        _, _, usage = disk_reopen.reopened(after_a_kill)
        assert usage.blobs == 50 + len(TAIL)
        assert sorted(looked_at) == sorted(TAIL)


def flip(log):
    data = bytearray(log.read_bytes())
    data[24 + 3] ^= 1  # of a key
    log.write_bytes(data)


def cut_to_no_header(log):
    os.truncate(log, 11)


def of_another_boot(log):
    data = bytearray(log.read_bytes())
    data[8:24] = bytes(16)
    log.write_bytes(data)


@pytest.mark.parametrize("harm", [flip, cut_to_no_header, of_another_boot])
def test_where_the_log_cannot_be_believed_every_file_is_looked_at(after_a_kill, looked_at, harm):
    harm(log_of(after_a_kill))
    _, _, usage = disk_reopen.reopened(after_a_kill)
    assert (usage.blobs, len(looked_at)) == (50 + len(TAIL), 50 + len(TAIL))


def test_a_record_that_was_not_written_to_its_end_is_none(after_a_kill, looked_at, opened):
    log = log_of(after_a_kill)
    with log.open("ab") as file:
        file.write(b"torn")
    tier = opened()
    assert sorted(looked_at) == sorted(TAIL)
    store(tier, 1)
    killed(tier)
    looked_at.clear()
    assert opened().usage().blobs == 50 + len(TAIL) + 1
    assert sorted(looked_at) == sorted([*TAIL, key(1)])


def test_without_a_log_nothing_is_believed_that_is_stored_afterwards(after_a_kill, looked_at, opened):
    tier = opened()
    log_of(after_a_kill).unlink()
    store(tier, 1)
    assert not (after_a_kill / "lmcache.index").exists()
    store(tier, 2)
    killed(tier)
    looked_at.clear()
    assert opened().usage().blobs == len(looked_at) == 50 + len(TAIL) + 2


def test_a_log_that_grows_long_gives_way_to_a_new_index(opened, tmp_path, looked_at, monkeypatch):
    monkeypatch.setattr(disk_catalogue, "FEWEST_RECORDS", 5)
    tier, first = opened(), log_of(tmp_path)
    for number in range(12):
        store(tier, number)
    assert log_of(tmp_path) != first
    killed(tier)
    tier = opened()
    assert sorted(tier.keys()) == [(key(number), BLOCK) for number in range(12)]
    assert sorted(looked_at) == [key(number) for number in (10, 11)]


def test_where_there_is_no_room_for_a_new_index_the_old_one_serves_on(opened, tmp_path, looked_at, monkeypatch):
    monkeypatch.setattr(disk_catalogue, "FEWEST_RECORDS", 5)
    tier, first = opened(), log_of(tmp_path)
    monkeypatch.setattr(tier._folder.catalogue, "write", refuse)
    for number in range(7):
        store(tier, number)
    assert log_of(tmp_path) == first
    killed(tier)
    assert sorted(opened().keys()) == [(key(number), BLOCK) for number in range(7)]
    assert sorted(looked_at) == [key(number) for number in range(7)]


def refuse(*_):
    raise OSError(errno.ENOSPC, "no room")


def test_a_smaller_limit_is_kept_from_the_start(opened, tmp_path):
    tier = opened()
    for number in range(10):
        store(tier, number)
    tier.close()
    tier = opened(blocks=3)
    assert sorted(tier.keys()) == [(key(number), BLOCK) for number in (7, 8, 9)]
    assert counted(tmp_path) == (3, 3 * BLOCK)


def test_leavings_are_removed_and_foreign_files_are_left_alone_and_not_counted(opened, tmp_path):
    tier = opened()
    store(tier, 0)
    tier.close()
    sub = tmp_path / "00"
    for name in (f"{key(1)}.0.part", f"{key(2)}.123.part", key(3)):
        (sub / name).touch()
    foreign = [
        tmp_path / "notes.txt",
        tmp_path / key(4),
        tmp_path / "zz" / "file",
        sub / "README",
        sub / f"{key(5)}.part",
        sub / key(6).upper(),
        sub / f"ff{'0' * 38}",
    ]
    (tmp_path / "zz").mkdir()
    for path in foreign:
        path.write_bytes(b"mine")
    (sub / key(8)).mkdir()
    (sub / key(9)).symlink_to(tmp_path / "notes.txt")
    tier = opened()
    assert list(tier.keys()) == [(key(0), BLOCK)]
    assert tier.usage().bytes == BLOCK
    assert {path.name for path in sub.iterdir()} == {
        key(0),
        "README",
        f"{key(5)}.part",
        key(6).upper(),
        f"ff{'0' * 38}",
        key(8),
        key(9),
    }
    assert all(path.read_bytes() == b"mine" for path in foreign)
    assert tier.load(key(9), [memoryview(bytearray(10))], soon()) == 0


def test_thousands_of_blobs_are_back_after_a_kill_and_after_a_clean_end(tmp_path):
    """Printed with -s; `python tests/_plugins/disk_reopen.py` does it for a hundred thousand."""
    for how, wall, cpu in disk_reopen.measure(tmp_path, 3_000):
        print(f"3000 blobs {how}: {wall:.3f} s, of which {cpu:.3f} s on the processor")


# ------------------------------------------------------------------------------------------------------ one at a time


def test_a_second_server_is_refused_and_told_who_has_the_folder(opened, tmp_path):
    first = opened()
    for mode in ("serve", "repair"):
        with pytest.raises(ConfigError) as refused:
            opened(mode=mode)
        assert str(refused.value) == (
            f"--l2 disk://{tmp_path}: the server with process id {os.getpid()} has this folder; give each server "
            "a folder of its own, or end the other first"
        )
    store(first, 1)
    first.close()
    assert holds(opened(), 1)


def test_the_lock_of_a_killed_server_is_free(opened, tmp_path):
    script = (
        "import sys; from lmcache.core.tier import TierLocation; from lmcache.plugins.storage.disk import DiskTier; "
        "t = DiskTier(TierLocation('disk', path=sys.argv[1], options={'size_gb': '1'})); print('open', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=f"the server with process id {other.pid} has this folder"):
            opened()
        other.kill()
    store(opened(), 1)


def test_open_to_read_it_changes_nothing_although_a_server_has_the_folder(opened, tmp_path):
    tier = opened()
    store(tier, 1)
    (tmp_path / "00" / f"{key(2)}.0.part").touch()
    reader = opened(mode="read")
    assert holds(reader, 1)
    assert list(reader.keys()) == [(key(1), BLOCK)]
    for call in (lambda: store(reader, 3), lambda: reader.delete([key(1)], soon())):
        with pytest.raises(TierError, match="is open to read"):
            call()
    tier.delete([key(1)], soon())
    assert not holds(reader, 1)
    assert (tmp_path / "00" / f"{key(2)}.0.part").exists()


def test_open_to_repair_it_deletes_and_does_not_store(opened):
    tier = opened()
    store(tier, 1)
    tier.close()
    repair = opened(mode="repair")
    with pytest.raises(TierError, match="is open to repair, not to store"):
        store(repair, 2)
    repair.delete([key(1)], soon())
    assert list(repair.keys()) == []


def test_a_call_that_comes_back_after_closing_changes_nothing(opened, tmp_path):
    tier = opened()
    store(tier, 1)
    tier.close()
    for call in (lambda: store(tier, 2), lambda: tier.delete([key(1)], soon())):
        with pytest.raises(TierError, match="the tier is closed"):
            call()
    assert counted(tmp_path) == (1, BLOCK)
    assert holds(opened(), 1)


# ------------------------------------------------------------------------------------------------- what the user wrote


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size_gb": "0"}, "--l2 disk:// has size_gb=0; use a positive number"),
        ({"size_gb": "much"}, "--l2 disk:// has size_gb=much; use a positive number"),
        ({"size_gb": "1e-9"}, "--l2 disk://{} has size_gb=1e-9, less than a block of 4096 bytes"),
        ({"sync": "maybe"}, "--l2 disk:// has sync=maybe; use on or off"),
        ({"direct": "on"}, "--l2 disk:// has direct=on; use auto or off"),
        ({"mode": "write"}, "--l2 disk:// has mode=write; use serve or read or repair"),
        (
            {"policy": "best"},
            (
                "--l2 disk:// has policy=best; use one of ARC, FIFO, GDSF, LFU, LRU, S3-FIFO, SIEVE, SLRU, W-TinyLFU, "
                "prefix-aware"
            ),
        ),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(opened, tmp_path, options, says):
    with pytest.raises(ConfigError) as refused:
        opened(**options)
    assert str(refused.value) == says.format(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_and_a_size_that_is_not_said_are_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        DiskTier(TierLocation("disk", path=f"{tmp_path}/none", options={"size_gb": "1"}))
    assert str(refused.value) == (
        f"--l2 disk://{tmp_path}/none: the folder cannot be opened: No such file or directory; "
        f"make it (mkdir -p {tmp_path}/none), or give the server's user the right to it"
    )
    with pytest.raises(ConfigError) as refused:
        DiskTier(TierLocation("disk", path=str(tmp_path)))
    assert str(refused.value) == f"--l2 disk://{tmp_path} has no size_gb; say what it may take: ?size_gb=100"
    with pytest.raises(ConfigError) as refused:
        DiskTier(TierLocation("disk", host="cache", path="/x", options={"size_gb": "1"}))
    assert str(refused.value) == "--l2 disk://cache/x names a host; write disk:///cache/x for a folder"


# ----------------------------------------------------------------------------------------------------- order of a store


def test_a_blob_that_cannot_get_its_name_is_not_there(opened, tmp_path):
    tier = opened()
    (tmp_path / "00" / key(1)).mkdir(parents=True)
    with pytest.raises(TierError, match=r"cannot store .*: Is a directory"):
        store(tier, 1)
    assert tier.contains([key(1)], soon()) == [False]
    assert tier.usage().bytes == tier._index.reserved == 0
    assert [path.name for path in tmp_path.glob("00/*")] == [key(1)]


@pytest.mark.parametrize(
    ("options", "order"), [({}, ["rename"]), ({"sync": "on"}, ["fsync file", "rename", "fsync folder"])]
)
def test_with_sync_bytes_are_on_the_device_before_the_name_and_then_the_name(opened, monkeypatch, options, order):
    tier, seen = opened(**options), []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(fd):
        seen.append("fsync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync file")
        fsync(fd)

    def watched_rename(*names):
        seen.append("rename")
        rename(*names)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    store(tier, 1)
    assert seen == order
