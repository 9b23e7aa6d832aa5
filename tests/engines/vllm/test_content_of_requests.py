"""What starts a request's chain, and which requests are never cached."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from weights_folders import begins_later, begins_now, lora_folder, safetensors

from lmcache.core.keys import ChainHasher
from lmcache.engines.unchanged import Sight
from lmcache.engines.vllm import lora as lora_module
from lmcache.engines.vllm.content import Content, NeverCached, content_of
from lmcache.engines.vllm.lora import Evidence, LoraBook, watch_loads

CHUNK = 16


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def book() -> LoraBook:
    """Of an engine that starts when all files are written."""
    return LoraBook(begins_later())


def request(lora: Any = None, **different: Any) -> Any:
    defaults = {"cache_salt": None, "prompt_embeds": None, "mm_features": [], "resumable": False}
    defaults |= {"kv_transfer_params": None}
    return SimpleNamespace(lora_request=lora, **defaults | different)


def lora(path: Path | str, number: int = 1, name: str = "x", **different: Any) -> Any:
    defaults = {"load_inplace": False, "is_3d_lora_weight": False}
    return SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path), **defaults | different)


def cached(book: LoraBook, lora_request: Any) -> Content:
    content = content_of(request(lora_request), "", book)
    assert isinstance(content, Content), content.reason
    return content


def reason(book: LoraBook, lora_request: Any) -> str:
    content = content_of(request(lora_request), "", book)
    assert isinstance(content, NeverCached)
    return content.reason


# ---------------------------------------------------------------------------------------------------------------- LoRA


def test_requests_with_two_loras_and_with_none_have_three_roots(book: LoraBook, tmp_path: Path) -> None:
    one, two = lora_folder(tmp_path / "one"), lora_folder(tmp_path / "two", fill=b"b")
    contents = [content_of(request(each), "", book) for each in (None, lora(one, 1), lora(two, 2))]
    assert len({content.root for content in contents}) == 3
    assert contents[0].root == content_of(request(), "", book).root
    assert [content.certain() for content in contents] == [True, True, True]


def test_the_root_depends_on_the_weights_and_not_on_name_number_path_or_engine(book: LoraBook, tmp_path: Path) -> None:
    here, there = lora_folder(tmp_path / "here"), lora_folder(tmp_path / "there")
    first = cached(book, lora(here, 1, "x"))
    assert cached(book, lora(there, 2, "y")).root == first.root
    assert cached(LoraBook(begins_later()), lora(there, 7, "z")).root == first.root


def test_one_name_with_other_weights_has_another_root(book: LoraBook, tmp_path: Path) -> None:
    one, two = lora_folder(tmp_path / "one"), lora_folder(tmp_path / "two", fill=b"b")
    assert cached(book, lora(one, 1, "x")).root != cached(book, lora(two, 2, "x")).root


def test_rank_and_scale_are_part_of_what_a_lora_is(book: LoraBook, tmp_path: Path) -> None:
    four, eight = (lora_folder(tmp_path / str(rank), rank=rank) for rank in (4, 8))
    assert cached(book, lora(four, 1)).root != cached(book, lora(eight, 2)).root


def test_one_path_with_other_weights_has_another_root_in_the_next_engine_only(tmp_path: Path) -> None:
    path = lora_folder(tmp_path / "lora")
    book = LoraBook(begins_now())
    before = cached(book, lora(path))
    lora_folder(path, fill=b"b")
    assert not before.certain()
    assert reason(book, lora(path)) == (
        f"the weights of the LoRA at {path} are not certain: its files have changed since the engine started; restart "
        "the engine, so that it loads what is there now, to have its requests cached"
    )
    # put back, they are what they were; but in between vLLM may have loaded the others, and cached their KV
    lora_folder(path)
    assert "not certain" in reason(book, lora(path))
    assert cached(LoraBook(begins_later()), lora(path)).root == before.root


def test_what_was_installed_after_the_engine_started_is_never_cached(tmp_path: Path) -> None:
    book = LoraBook(begins_now())
    path = lora_folder(tmp_path / "lora")
    assert f"{path} has changed; restart the engine" in reason(book, lora(path))


def test_a_name_on_a_model_hub_is_never_cached(book: LoraBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    why = reason(book, lora("org/some-lora"))
    assert "the weights of the LoRA at org/some-lora are not certain: [Errno 2]" in why
    # not even once a folder of that name is there: vLLM has what it took from the hub
    lora_folder(tmp_path / "org" / "some-lora")
    assert reason(book, lora("org/some-lora")) == why


@pytest.mark.parametrize("path", ["/a\0b", "", "\ud800", "/dev/null", "~", "x" * 5000])
def test_what_is_no_path_at_all_is_never_cached_and_no_error(book: LoraBook, path: str) -> None:
    assert f"the weights of the LoRA at {path} are not certain" in reason(book, lora(path))
    assert reason(book, lora(path)) == reason(book, lora(path))


def test_a_relative_path_is_as_good_as_any(book: LoraBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora_folder(tmp_path / "lora")
    monkeypatch.chdir(tmp_path)
    assert cached(book, lora("lora", 1)).root == cached(book, lora(tmp_path / "lora", 2)).root


def test_a_request_that_loads_in_place_is_never_cached_and_others_of_that_lora_are(
    book: LoraBook, tmp_path: Path
) -> None:
    path = lora_folder(tmp_path / "lora")
    assert "makes the engine load its LoRA anew" in reason(book, lora(path, load_inplace=True))
    assert cached(book, lora(path)).certain()


def test_a_number_that_is_given_to_two_loras_ends_the_caching_of_both(book: LoraBook, tmp_path: Path) -> None:
    one, two = lora_folder(tmp_path / "one"), lora_folder(tmp_path / "two", fill=b"b")
    running = cached(book, lora(one, 1))
    evidence = running.evidence()
    assert f"number 1 was given to {one} and to {two}" in reason(book, lora(two, 1, load_inplace=True))
    assert "not certain" in reason(book, lora(one, 1))
    # also for what runs, from now on
    assert not running.certain()
    assert running.evidence() != evidence
    assert not running.evidence().holds()


def test_one_path_read_in_two_forms_is_never_cached(book: LoraBook, tmp_path: Path) -> None:
    path = lora_folder(tmp_path / "lora")
    first = cached(book, lora(path))
    assert "given in two forms" in reason(book, lora(path, is_3d_lora_weight=True))
    assert not first.certain()
    other = LoraBook(begins_later())
    assert cached(other, lora(path, is_3d_lora_weight=True)).root != first.root


def test_the_digest_is_computed_once(book: LoraBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lora_folder(tmp_path / "lora")
    first = cached(book, lora(path))
    monkeypatch.setattr(lora_module, "certain_weights", lambda *_, **__: pytest.fail("the files are read again"))
    monkeypatch.setattr(Path, "iterdir", lambda _: pytest.fail("the folder is listed again"))
    assert cached(book, lora(path)).root == first.root


# ------------------------------------------------------------------------------------- what a worker sees of the loads


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A manager as vLLM has in its workers, as far as loading goes. `make demo-vllm` and CI run the real one."""

    class WorkerLoRAManager:
        def _load_adapter(self, lora_request: Any) -> str:
            if "broken" in lora_request.lora_path:
                raise ValueError("not a LoRA")
            return f"weights of {lora_request.lora_path}"

    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("vllm.lora.worker_manager")
    module.WorkerLoRAManager = WorkerLoRAManager
    monkeypatch.setitem(sys.modules, "vllm.lora.worker_manager", module)
    yield WorkerLoRAManager()
    lora_module._loads.forget()


def evidence(book: LoraBook, lora_request: Any) -> Evidence:
    found = cached(book, lora_request).evidence()
    assert found is not None
    return found


def test_a_worker_stores_what_it_has_loaded_from_that_path_and_nothing_else(
    book: LoraBook, tmp_path: Path, manager: Any
) -> None:
    one, two = lora(lora_folder(tmp_path / "one"), 1), lora(lora_folder(tmp_path / "two", fill=b"b"), 2)
    watch_loads()
    assert not evidence(book, one).holds(), "nothing was loaded"
    assert manager._load_adapter(one) == f"weights of {one.lora_path}"
    assert evidence(book, one).holds()
    assert not evidence(book, two).holds()
    manager._load_adapter(two)
    assert evidence(book, two).holds()
    manager._load_adapter(one)
    assert evidence(book, one).holds()


@pytest.mark.parametrize("path", ["two", "broken"])
def test_weights_exchanged_while_a_request_runs_are_not_stored_under_the_old_ones(
    book: LoraBook, tmp_path: Path, manager: Any, path: str
) -> None:
    one = lora(lora_folder(tmp_path / "one"), 1)
    watch_loads()
    manager._load_adapter(one)
    running = evidence(book, one)
    assert running.holds()
    # somebody asks vLLM to load another one in its place, which the scheduler does not learn of
    try:
        manager._load_adapter(lora(lora_folder(tmp_path / path, fill=b"b"), 1, load_inplace=True))
    except ValueError:
        assert path == "broken"
    assert not running.holds()
    # nor when it is exchanged back, nor under a new number: who knows what of the other one vLLM's own cache has
    manager._load_adapter(one)
    again = lora(one.lora_path, 7)
    manager._load_adapter(again)
    assert not running.holds()
    assert not evidence(book, again).holds()


def test_files_changed_while_a_request_runs_end_its_storing(book: LoraBook, tmp_path: Path, manager: Any) -> None:
    path = lora_folder(tmp_path / "one")
    watch_loads()
    manager._load_adapter(lora(path))
    running = evidence(book, lora(path))
    safetensors(path / "adapter_model.safetensors", {"a": b"other"})
    assert not running.holds()


def test_watching_twice_watches_once_and_forgets_the_engine_before(
    book: LoraBook, tmp_path: Path, manager: Any
) -> None:
    one = lora(lora_folder(tmp_path / "one"), 1)
    watch_loads()
    method = type(manager)._load_adapter
    manager._load_adapter(one)
    watch_loads()
    assert type(manager)._load_adapter is method
    assert not evidence(book, one).holds()


@pytest.mark.parametrize("there", [True, False], ids=["by another method", "in another module"])
def test_a_vllm_that_loads_in_another_way_stores_no_lora(
    book: LoraBook, tmp_path: Path, manager: Any, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    del type(manager)._load_adapter
    if not there:
        monkeypatch.delitem(sys.modules, "vllm.lora.worker_manager")
    watch_loads()
    assert not evidence(book, lora(lora_folder(tmp_path / "one"), 1)).holds()


def test_evidence_is_carried_to_other_processes(book: LoraBook, tmp_path: Path) -> None:
    import pickle

    found = evidence(book, lora(lora_folder(tmp_path / "one"), 1))
    assert pickle.loads(pickle.dumps(found)) == found


def test_nothing_is_no_evidence() -> None:
    assert not Sight("").holds()
    assert not Sight("/").holds()


# ------------------------------------------------------------------------------------------------ images, salts, others


def image(digest: str = "a" * 64, offset: int = 4, length: int = 30, modality: str = "image") -> Any:
    return SimpleNamespace(
        identifier=digest, modality=modality, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def hashes(**different: Any) -> list[bytes]:
    """Chain hashes of the same 80 tokens, placeholders included."""
    content = content_of(request(**different), "", LoraBook(begins_later()))
    assert isinstance(content, Content)
    joined = ChainHasher(content.root, CHUNK, content.items).extend_to([7] * 80)
    return [joined[at : at + 16] for at in range(0, len(joined), 16)]


def test_one_text_with_two_images_parts_at_the_image(book: LoraBook) -> None:
    one, other = (hashes(mm_features=[image(digest, offset=20)]) for digest in ("a" * 64, "b" * 64))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, False, False, False, False]


@pytest.mark.parametrize(
    "other",
    [
        image("a" * 60 + "bbbb"),
        image("bbbb" + "a" * 60),
        image(offset=5),
        image(length=31),
        image(modality="video"),
        image("a" * 128),
    ],
    ids=["last digits", "first digits", "offset", "length", "modality", "longer digest"],
)
def test_an_image_counts_in_full_and_at_its_place(other: Any) -> None:
    assert hashes(mm_features=[image()])[0] != hashes(mm_features=[other])[0]


def test_two_images_in_the_other_order_are_another_prompt() -> None:
    one, two = "a" * 64, "b" * 64
    assert hashes(mm_features=[image(one, 0, 5), image(two, 5, 5)]) != hashes(
        mm_features=[image(two, 0, 5), image(one, 5, 5)]
    )


def test_an_image_in_the_second_chunk_leaves_the_first_one_shared_with_text_alone() -> None:
    with_image, without = hashes(mm_features=[image(offset=16)]), hashes()
    assert [a == b for a, b in zip(with_image, without, strict=True)] == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("different", "why"),
    [
        ({"prompt_embeds": object()}, "its prompt is given as embeddings, which tokens do not describe"),
        ({"resumable": True}, "its input is streamed, so tokens that were computed can still be taken back"),
        (
            {"mm_features": [image("picture-17")]},
            "a multimodal item is known by a name and not by a digest of its content",
        ),
        (
            {"mm_features": [image("a" * 63)]},
            "a multimodal item is known by a name and not by a digest of its content",
        ),
    ],
    ids=["embeddings", "streamed", "named image", "short digest"],
)
def test_what_the_keys_cannot_tell_is_never_cached(book: LoraBook, different: dict[str, Any], why: str) -> None:
    assert content_of(request(**different), "", book) == NeverCached(why)


def test_a_request_that_is_not_cached_for_another_reason_still_shows_its_lora_to_the_book(
    book: LoraBook, tmp_path: Path
) -> None:
    one, two = lora_folder(tmp_path / "one"), lora_folder(tmp_path / "two", fill=b"b")
    content_of(request(lora(one, 1), prompt_embeds=object()), "", book)
    assert "number 1 was given to" in reason(book, lora(two, 1))


def test_salts_and_loras_are_told_apart(book: LoraBook, tmp_path: Path) -> None:
    path = lora_folder(tmp_path / "lora")
    found = [
        content_of(request(lora_request, cache_salt=salt), generation, book)
        for lora_request in (None, lora(path))
        for salt in (None, "a", "b", "a/b@c", "é" * 40, "\ud800")
        for generation in ("", "g")
    ]
    assert len({content.root for content in found}) == len(found)
    assert content_of(request(cache_salt=""), "", book).root == content_of(request(), "", book).root


def test_roots_are_the_same_in_any_process_whatever_its_hash_seed(book: LoraBook, tmp_path: Path) -> None:
    path = lora_folder(tmp_path / "lora")
    code = """
import sys
sys.path += sys.argv[2:]
from test_content_of_requests import *
found = content_of(request(lora(sys.argv[1]), cache_salt="s", mm_features=[image()]), "", LoraBook(begins_later()))
print(found.root.hex(), found.items, found.tenant)
"""
    said = set()
    for seed in ("", "0", "1", "random"):
        environment = {"PYTHONHASHSEED": seed} if seed else {}
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                code,
                str(path),
                str(Path(__file__).parent),
                str(Path(__file__).parents[2] / "_plugins"),
            ],
            check=True,
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin", "XDG_CACHE_HOME": str(tmp_path / "none"), **environment},
        )
        said.add(done.stdout)
    assert len(said) == 1
    assert len(json.dumps(said.pop())) > 100
