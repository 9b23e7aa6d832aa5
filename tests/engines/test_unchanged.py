"""What a process may believe about files that it has read at some moment it does not know."""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from weights_folders import begins_later, begins_now, lora_folder

from lmcache.engines import unchanged
from lmcache.engines.unchanged import Mount, Sight, absolute, changed_since, look, process_beginning

PATTERNS = ("*.json", "*.safetensors")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """`top/middle/lora`, and `top/other/lora` with other weights."""
    if unchanged._kind(str(tmp_path), unchanged._mounts()) not in unchanged.LOCAL_FILE_SYSTEMS:
        pytest.skip("the times of this file system are told by somebody else's clock, so seconds would have to pass")
    lora_folder(tmp_path / "top" / "middle" / "lora")
    lora_folder(tmp_path / "top" / "other" / "lora", fill=b"b")
    return tmp_path / "top"


def seen(folder: Path) -> Sight:
    return look(str(folder), PATTERNS)


def test_what_has_not_changed_since_the_beginning_is_certain_and_holds(tree: Path) -> None:
    sight = seen(tree / "middle" / "lora")
    assert [name for name, _ in sight.files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert changed_since(sight, begins_now()) == ""
    assert sight.holds()


def overwrite(lora: Path) -> None:
    with (lora / "adapter_model.safetensors").open("r+b") as stream:
        stream.write(b"!")


def overwrite_and_set_its_time_back(lora: Path) -> None:
    file = lora / "adapter_model.safetensors"
    status = file.stat()
    overwrite(lora)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(lora: Path) -> None:
    file = lora / "adapter_config.json"
    new = file.with_suffix(".new")
    new.write_bytes(file.read_bytes())
    new.rename(file)


def add_a_file(lora: Path) -> None:
    (lora / "more.json").write_text("{}")


def remove_a_file(lora: Path) -> None:
    (lora / "adapter_config.json").unlink()


def write_through_a_mapping(lora: Path) -> None:
    with (lora / "adapter_model.safetensors").open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        mapped[0:1] = b"!"


def exchange_the_folder(lora: Path) -> None:
    lora.rename(lora.with_name("old"))
    (lora.parents[1] / "other" / "lora").rename(lora)


def exchange_a_folder_above(lora: Path) -> None:
    middle = lora.parent
    middle.rename(middle.with_name("gone"))
    middle.with_name("other").rename(middle)


def exchange_a_folder_above_and_hide_it(lora: Path) -> None:
    exchange_a_folder_above(lora)
    # then its mtime and its ctime are the same, as if nothing but its entries had ever changed
    (lora.parent / "more").mkdir()


CHANGES = [
    overwrite,
    overwrite_and_set_its_time_back,
    replace,
    add_a_file,
    remove_a_file,
    write_through_a_mapping,
    exchange_the_folder,
    exchange_a_folder_above,
    exchange_a_folder_above_and_hide_it,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_any_change_ends_what_held_and_is_seen_by_a_first_look_too(tree: Path, change: Callable[[Path], None]) -> None:
    lora = tree / "middle" / "lora"
    before = seen(lora)
    beginning = begins_now()
    change(lora)
    assert not before.holds()
    assert changed_since(seen(lora), beginning) != ""


def test_others_that_come_and_go_above_do_no_harm(tree: Path) -> None:
    lora = tree / "middle" / "lora"
    before = seen(lora)
    beginning = begins_now()
    lora_folder(tree / "middle" / "another")
    assert before.holds()
    assert changed_since(seen(lora), beginning) == ""


def test_two_busy_folders_in_a_row_leave_a_doubt_at_the_first_look_only(tree: Path) -> None:
    lora = tree / "middle" / "lora"
    before = seen(lora)
    beginning = begins_now()
    (tree / "middle" / "another").mkdir()
    (tree / "another").mkdir()
    assert changed_since(seen(lora), beginning) == f"{lora.parent} may have been put in another one's place"
    assert changed_since(seen(lora), beginning, places=False) == ""
    assert before.holds()


def test_a_link_that_is_turned_to_other_weights_is_seen(tree: Path) -> None:
    link = tree / "current"
    link.symlink_to("middle/lora")
    before = seen(link)
    beginning = begins_now()
    assert changed_since(before, beginning) == ""
    new = tree / "new"
    new.symlink_to("other/lora")
    new.rename(link)
    assert not before.holds()
    assert changed_since(seen(link), beginning) == f"{link} has changed"


def test_files_that_are_links_are_followed_as_a_hub_lays_them_out(tree: Path) -> None:
    snapshot, blob = tree / "snapshots" / "c0ffee", tree / "blobs" / "1"
    snapshot.mkdir(parents=True)
    blob.parent.mkdir()
    blob.write_text("{}")
    (snapshot / "adapter_config.json").symlink_to("../../blobs/1")
    sight = seen(snapshot)
    assert [(name, entry.path) for name, entry in sight.files] == [("adapter_config.json", str(blob))]
    assert changed_since(sight, begins_now()) == ""
    blob.write_text("[]")
    assert not sight.holds()


def test_a_file_of_another_name_and_what_is_no_file_do_not_count(tree: Path) -> None:
    lora = tree / "middle" / "lora"
    (lora / "README.md").write_text("one")
    (lora / "folder.json").mkdir()
    os.mkfifo(lora / "pipe.json")
    sight = seen(lora)
    assert len(sight.files) == 2
    (lora / "README.md").write_text("another")
    assert sight.holds()


def test_a_loop_of_links_and_a_file_in_place_of_a_folder_are_errors(tree: Path) -> None:
    (tree / "loop").symlink_to("loop")
    for path in (
        tree / "loop",
        tree / "loop" / "x",
        tree / "nothing",
        tree / "middle" / "lora" / "adapter_config.json",
    ):
        with pytest.raises(OSError):
            seen(path)


def test_dots_are_walked_as_the_kernel_does(tree: Path) -> None:
    (tree / "link").symlink_to("middle/lora")
    assert seen(Path(f"{tree}/link/../../other/./lora/")).files == seen(tree / "other" / "lora").files


def test_a_relative_path_holds_only_where_it_leads_to_the_same(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree / "middle")
    sight = look("lora", PATTERNS)
    assert sight.asked == str(tree / "middle" / "lora")
    assert sight.holds()
    monkeypatch.chdir(tree / "other")
    assert not sight.holds()


def test_paths_become_absolute_as_engines_make_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert absolute("/a/../b") == "/a/../b"
    assert absolute("~/b") == "/home/somebody/b"
    assert absolute("~nobody-of-that-name/b") == "~nobody-of-that-name/b"
    assert absolute("a/../b") == str(tmp_path / "b")


def test_a_clock_that_was_set_back_makes_everything_uncertain(tree: Path) -> None:
    beginning = begins_later()
    assert changed_since(seen(tree / "other" / "lora"), beginning) == ""
    # the wall clock was a minute ahead when the process began
    ahead = attrs.evolve(beginning, ns=beginning.ns + 60_000_000_000)
    assert changed_since(seen(tree / "other" / "lora"), ahead) == "the host's clock was set back"


def test_what_was_mounted_on_the_way_since_makes_it_uncertain(tree: Path) -> None:
    beginning = begins_later()
    mine, beside = (Mount(str(tree / name), "ext4", f"{name}") for name in ("middle", "other"))
    sight = seen(tree / "middle" / "lora")
    assert changed_since(sight, attrs.evolve(beginning, mounts=beginning.mounts | {beside})) == ""
    for mounts in (beginning.mounts | {mine}, beginning.mounts - {unchanged_root(beginning.mounts)}):
        assert "was mounted or unmounted at" in changed_since(sight, attrs.evolve(beginning, mounts=mounts))


def unchanged_root(mounts: frozenset[Mount]) -> Mount:
    return next(mount for mount in mounts if mount.point == "/")


def test_a_file_servers_clock_is_trusted_to_ten_seconds(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sight = seen(tree / "middle" / "lora")
    near, far = begins_now(), begins_later()
    assert [changed_since(sight, beginning, places=False) for beginning in (near, far)] == ["", ""]
    monkeypatch.setattr(unchanged, "LOCAL_FILE_SYSTEMS", frozenset())
    assert "has changed" in changed_since(sight, near, places=False)
    assert changed_since(sight, far, places=False) == ""


def test_times_of_whole_seconds_are_believed_two_seconds_later_only() -> None:
    second = 1_000_000_000
    assert not unchanged._was(100 * second, 102 * second)
    assert unchanged._was(100 * second, 103 * second)
    assert not unchanged._was(100 * second + 1, 100 * second + 1)
    assert unchanged._was(100 * second + 1, 101 * second)


def test_a_process_knows_when_it_began() -> None:
    before = time.time_ns()
    code = "from lmcache.engines.unchanged import process_beginning as b; import time; print(b().ns, time.time_ns())"
    made = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    began, asked = map(int, made.stdout.split())
    # the kernel tells it in hundredths of a second, rounded down
    assert before - 20_000_000 <= began < asked
    assert asked - began > 20_000_000, "an interpreter starts in less than that"


def test_a_process_that_cannot_be_asked_is_certain_of_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise PermissionError("/proc")

    monkeypatch.setattr(unchanged, "_beginning", refuse)
    lora = tree / "middle" / "lora"
    assert changed_since(seen(lora), process_beginning()) == f"{lora} has changed"


def test_a_forked_child_begins_when_it_is_forked() -> None:
    parent = process_beginning()
    time.sleep(0.05)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, str(process_beginning().ns).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        assert int(stream.read()) > parent.ns + 20_000_000
