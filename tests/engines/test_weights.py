"""What tells weights apart, and what is remembered of it."""

import fcntl
import json
import multiprocessing
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from weights_folders import begins_later, begins_now, lora_folder, safetensors

from lmcache.engines import weights
from lmcache.engines.unchanged import Sight, look
from lmcache.engines.weights import BESIDE_LORA, BESIDE_MODEL, Digests, Uncertain, Weights, certain_weights, digest_of


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes what the user's own engines remember."""
    home = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def seen(folder: Path, beside: tuple[str, ...] = BESIDE_MODEL) -> Sight:
    return look(str(folder), (*weights.WEIGHTS, *beside))


def digest(folder: Path, beside: tuple[str, ...] = BESIDE_MODEL) -> str:
    """As if nothing had been remembered."""
    return digest_of(seen(folder, beside), Digests(folder / "nothing here" / "digests.json"))


BIG = {"first": b"a" * 5000, "middle": b"b" * 200_000, "last": b"c" * 5000}


def with_byte(name: str, at: int) -> dict[str, bytes]:
    changed = bytearray(BIG[name])
    changed[at] ^= 1
    return BIG | {name: bytes(changed)}


# ------------------------------------------------------------------------------------------------------------- digests


@pytest.mark.parametrize(
    "other",
    [
        with_byte("first", 0),
        with_byte("middle", 100_000),
        with_byte("last", -1),
        {"first": BIG["first"], "middle": BIG["middle"], "list": BIG["last"]},
        dict(reversed(BIG.items())),
    ],
    ids=["first byte", "middle of a tensor", "last byte", "a tensor's name", "order"],
)
def test_a_training_step_changes_the_digest(model: Path, other: dict[str, bytes]) -> None:
    safetensors(model / "model.safetensors", BIG)
    before = digest(model)
    safetensors(model / "model.safetensors", other)
    assert digest(model) != before


def test_the_types_of_tensors_count_though_their_bytes_are_equal(model: Path) -> None:
    file = safetensors(model / "model.safetensors", BIG)
    before = digest(model)
    file.write_bytes(file.read_bytes().replace(b'"U8"', b'"I8"'))
    assert digest(model) != before


def test_every_tensor_is_looked_at_whatever_the_number_of_files(model: Path) -> None:
    for shard in range(3):
        safetensors(model / f"model-{shard}.safetensors", {f"{shard}.{name}": data for name, data in BIG.items()})
    digests = {digest(model)}
    for shard in range(3):
        for name in BIG:
            tensors = {f"{shard}.{key}": data for key, data in with_byte(name, 0).items()}
            safetensors(model / f"model-{shard}.safetensors", tensors)
            digests.add(digest(model))
    assert len(digests) == 10


def test_copies_of_weights_have_one_digest_wherever_and_whenever_they_are_made(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for folder in (model, copy):
        safetensors(folder / "model.safetensors", BIG)
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert digest(model) == digest(copy)


def test_an_index_and_a_models_own_code_count_and_a_readme_does_not(model: Path) -> None:
    safetensors(model / "model.safetensors", BIG)
    digests = [digest(model)]
    for name in ("README.md", "model.safetensors.index.json", "modeling_own.py"):
        (model / name).write_text("{}")
        digests.append(digest(model))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_a_file_more_counts_even_if_it_is_empty(model: Path) -> None:
    safetensors(model / "model.safetensors", BIG)
    before = digest(model)
    (model / "more.safetensors").touch()
    assert digest(model) != before


def test_the_configuration_of_a_lora_counts_as_a_whole(tmp_path: Path) -> None:
    four, eight = (lora_folder(tmp_path / str(rank), rank=rank) for rank in (4, 8))
    assert digest(four, BESIDE_LORA) != digest(eight, BESIDE_LORA)
    assert digest(four, BESIDE_MODEL) == digest(eight, BESIDE_MODEL)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "consolidated.pth", "model.pt"])
@pytest.mark.parametrize(("size", "changed"), [(10, 1), (70_000, 1_500), (5_000_000, 80_000)])
def test_files_of_other_formats_are_sampled_evenly(model: Path, name: str, size: int, changed: int) -> None:
    contents = [bytes(size), bytes(size - 1), b"x" + bytes(size - 1), bytes(size - 1) + b"x"]
    contents.append(bytes(size // 2) + b"x" * changed + bytes(size - size // 2 - changed))
    digests = set()
    for content in contents:
        (model / name).write_bytes(content)
        digests.add(digest(model))
    assert len(digests) == len(contents)


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


MALFORMED = {
    "no header": b"",
    "shorter than its length": b"abc",
    "longer than the file": header(b"{}", 1 << 60),
    "no JSON": header(b"version https://git-lfs"),
    "no text": header(b"\xff\xfe\x00"),
    "no object": header(b"[1, 2]"),
    "a bottomless one": header(b"[" * 60_000 + b"]" * 60_000),
    "tensors that are none": header(b'{"a": 1}'),
    "tensors without places": header(b'{"a": {}}'),
    "places that are none": header(b'{"a": {"data_offsets": ["x", "y"]}}'),
    "one place": header(b'{"a": {"data_offsets": [1]}}'),
    "places beyond the end": header(b'{"a": {"data_offsets": [0, 99000000000]}}'),
    "places before the beginning": header(b'{"a": {"data_offsets": [-9, 5]}}'),
    "turned places": header(b'{"a": {"data_offsets": [9, 5]}}'),
    "no tensors": header(b"{}"),
}


@pytest.mark.parametrize("head", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("size", [0, 300_000], ids=["small", "large"])
def test_a_malformed_file_is_sampled_as_any_other_format(model: Path, head: bytes, size: int) -> None:
    digests = set()
    for body in (b"a", b"b"):
        (model / "model.safetensors").write_bytes(head + body * size)
        digests.add(digest(model))
    assert len(digests) == (2 if size else 1)


def test_empty_tensors_do_no_harm(model: Path) -> None:
    safetensors(model / "model.safetensors", {"empty": b"", "one": b"1", "big": b"2" * 100_000, "last": b""})
    assert digest(model)


# ----------------------------------------------------------------------------------------------------------- certainty


def found(folder: Path, **more: object) -> Weights | Uncertain:
    return certain_weights(str(folder), BESIDE_MODEL, **({"beginning": begins_later()} | more))


def test_weights_that_were_there_before_are_certain(model: Path) -> None:
    safetensors(model / "model.safetensors", BIG)
    weights_found = found(model)
    assert weights_found == Weights(digest(model), seen(model))
    assert weights_found.sight.holds()


def test_weights_that_changed_since_are_not(model: Path) -> None:
    file = safetensors(model / "model.safetensors", BIG)
    beginning = begins_now()
    safetensors(file, with_byte("last", 0))
    assert found(model, beginning=beginning) == Uncertain(f"{file} has changed")


def test_a_folder_without_weights_or_none_at_all_is_not(model: Path) -> None:
    (model / "config.json").write_text("{}")
    assert found(model) == Uncertain(f"there are no weights in {model}")
    assert found(model / "nothing") == Uncertain(f"[Errno 2] No such file or directory: '{model}/nothing'")


def test_weights_that_change_while_they_are_read_are_not(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = safetensors(model / "model.safetensors", BIG)

    def meanwhile(sight: Sight, remembered: Digests) -> str:
        digest = digest_of(sight, remembered)
        file.touch()
        return digest

    monkeypatch.setattr(weights, "digest_of", meanwhile)
    assert found(model) == Uncertain("it changed while it was read")


def test_a_file_that_nobody_may_read_is_not(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors(model / "model.safetensors", BIG)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # tests may run as root, who may read everything
    monkeypatch.setattr(Path, "open", refuse)
    assert found(model) == Uncertain("[Errno 13] Permission denied")


# ---------------------------------------------------------------------------------------------------------- remembering


@pytest.fixture
def old(model: Path, monkeypatch: pytest.MonkeyPatch) -> Sight:
    """Weights that were not written just now."""
    monkeypatch.setattr(weights, "YOUNG_NS", 0)
    safetensors(model / "model.safetensors", BIG)
    time.sleep(0.05)
    return seen(model)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called, weights cannot be read."""

    def refuse(*_: object) -> None:
        pytest.fail("the weights are read again")

    return lambda: monkeypatch.setattr(weights, "_parts", refuse)


def test_the_same_files_are_read_once(own_home: Path, old: Sight, unread: Callable[[], None]) -> None:
    first = digest_of(old, Digests())
    unread()
    assert digest_of(old, Digests()) == first
    kept = own_home / "lmcache" / "weights.json"
    assert kept.stat().st_mode & 0o077 == 0 or kept.parent.stat().st_mode & 0o077 == 0
    assert sorted(file.name for file in kept.parent.iterdir()) == ["weights.json", "weights.lock"]


def test_files_that_changed_in_any_way_are_read_again(model: Path, old: Sight) -> None:
    first = digest_of(old, Digests())
    safetensors(model / "model.safetensors", with_byte("first", 3))
    second = digest_of(seen(model), Digests())
    safetensors(model / "model.safetensors", BIG)
    assert digest_of(seen(model), Digests()) == first != second


def test_a_file_whose_size_and_time_were_put_back_is_read_again(model: Path, old: Sight) -> None:
    first = digest_of(old, Digests())
    file = model / "model.safetensors"
    times = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"!")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest_of(seen(model), Digests()) != first


def test_nobody_waits_for_another_who_is_writing(own_home: Path, old: Sight) -> None:
    kept = own_home / "lmcache" / "weights.json"
    kept.parent.mkdir(parents=True)
    with kept.with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert digest_of(old, Digests())
        assert not kept.exists()
    assert digest_of(old, Digests())
    assert kept.exists()


def test_files_that_were_written_just_now_are_not_remembered(model: Path, own_home: Path) -> None:
    safetensors(model / "model.safetensors", BIG)
    digest_of(seen(model), Digests())
    assert not own_home.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: b"[" * 100_000,
        lambda text: b"null",
        lambda text: b"[1]",
        lambda text: b'[{"digest": "x"}]',
        lambda text: b"\xff" + text,
        lambda text: json.dumps([each | {"digest": "0" * 32} for each in json.loads(text)]).encode(),
        lambda text: json.dumps([each | {"digest": 5} for each in json.loads(text)]).encode(),
        lambda text: json.dumps([each | {"check": None} for each in json.loads(text)]).encode(),
    ],
    ids=["empty", "cut", "bottomless", "nothing", "no entry", "half an entry", "no text", "digest", "type", "check"],
)
def test_what_is_damaged_is_not_trusted_and_is_written_anew(
    own_home: Path, old: Sight, damage: Callable[[bytes], bytes], unread: Callable[[], None]
) -> None:
    first = digest_of(old, Digests())
    kept = own_home / "lmcache" / "weights.json"
    kept.write_bytes(damage(kept.read_bytes()))
    assert Digests().get(old) == ""
    assert digest_of(old, Digests()) == first
    unread()
    assert digest_of(old, Digests()) == first


def in_the_way_of_the_folder(home: Path) -> None:
    home.write_text("a file")


def in_the_way_of_the_file(home: Path) -> None:
    (home / "lmcache" / "weights.json").mkdir(parents=True)


def in_the_way_of_the_lock(home: Path) -> None:
    (home / "lmcache" / "weights.lock").mkdir(parents=True)


@pytest.mark.parametrize(
    "block",
    [in_the_way_of_the_folder, in_the_way_of_the_file, in_the_way_of_the_lock],
    ids=lambda block: block.__name__,
)
def test_what_cannot_be_written_is_no_error(own_home: Path, old: Sight, block: Callable[[Path], None]) -> None:
    block(own_home)
    assert digest_of(old, Digests()) == digest_of(old, Digests())


def test_a_process_without_a_home_computes(old: Sight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert digest_of(old, Digests()) == digest_of(old, Digests())


def test_without_its_variable_the_cache_is_below_the_home(
    old: Sight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    digest_of(old, Digests())
    assert (tmp_path / ".cache" / "lmcache" / "weights.json").is_file()


def _remember(file: Path, folder: Path, rounds: int) -> None:
    for round_ in range(rounds):
        digests = Digests(file)
        digests.put(look(str(folder), weights.WEIGHTS), f"{folder.name}-{round_}")
        assert digests.get(look(str(folder), weights.WEIGHTS)) in {
            "",
            *(f"{folder.name}-{i}" for i in range(round_ + 1)),
        }


def test_several_processes_at_once_leave_a_file_that_can_be_trusted(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        folder.mkdir()
        safetensors(folder / "model.safetensors", {"a": folder.name.encode()})
    file = tmp_path / "kept" / "weights.json"
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_remember, args=(file, folder, 50)) for folder in folders]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0, 0]
    kept = [Digests(file).get(look(str(folder), weights.WEIGHTS)) for folder in folders]
    assert any(kept)
    assert all(
        digest == "" or digest.startswith(f"{folder.name}-") for digest, folder in zip(kept, folders, strict=True)
    )
    assert sorted(each.name for each in file.parent.iterdir()) == ["weights.json", "weights.lock"]


def test_the_oldest_digests_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "KEPT_DIGESTS", 3)
    digests, sights = Digests(tmp_path / "kept.json"), []
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        safetensors(folder / "model.safetensors", {"a": b"1"})
        sights.append(look(str(folder), weights.WEIGHTS))
        digests.put(sights[-1], str(number))
    digests.put(sights[3], "again")
    assert [digests.get(sight) for sight in sights] == ["", "", "2", "again", "4"]
