"""Object stores that refuse, fail, drip, hang or send what nobody stored: misses, in time, and no more."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from s3_stand import WaywardServer, object_store_runtime, wayward_server  # noqa: F401 - a fixture

from lmcache.core.tier import TierLocation
from lmcache.errors import TierError
from lmcache.plugins.storage.object_store import S3Tier

pytestmark = pytest.mark.usefixtures("object_store_runtime")

KEYS = [hashlib.sha1(b"%d" % number).hexdigest() for number in range(20)]
BLOB = bytes(range(256)) * 16


@pytest.fixture
def server() -> Iterator[WaywardServer]:
    with wayward_server() as server:
        yield server


@pytest.fixture
def tier(server: WaywardServer) -> Iterator[S3Tier]:
    tier = S3Tier(server.location())
    for key in KEYS:
        tier.store(key, [BLOB], within(20))
    server.requests.clear()
    yield tier
    tier.close()


def within(seconds: float) -> float:
    return time.monotonic() + seconds


def load(tier: S3Tier, seconds: float = 20, size: int = len(BLOB)) -> tuple[int, bytes]:
    buffer = bytearray(size)
    return tier.load(KEYS[0], [memoryview(buffer)[:100], memoryview(buffer)[100:]], within(seconds)), bytes(buffer)


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(TierError) as raised:
        call()
    return str(raised.value)


def each_call(tier: S3Tier, seconds: float = 20) -> list[Callable[[], object]]:
    return [
        lambda: tier.store(KEYS[0], [b"new"], within(seconds)),
        lambda: load(tier, seconds),
        lambda: tier.contains(KEYS[:3], within(seconds)),
        lambda: tier.delete(KEYS[:1], within(seconds)),
    ]


@pytest.mark.parametrize(("status", "told"), [(400, "400 Bad Request"), (403, "403 Forbidden"), (401, "401")])
def test_a_refusal_is_told_once_and_is_not_tried_again(
    server: WaywardServer, tier: S3Tier, status: int, told: str
) -> None:
    server.mood = status
    messages = [error_of(call) for call in each_call(tier)]

    assert all(told in message for message in messages)
    assert all("Debug source" not in message and len(message) < 700 for message in messages)
    assert len(server.requests) == 6
    if status == 403:
        assert all("access_key_env" in message for message in messages)
    server.mood = "good"
    assert load(tier) == (len(BLOB), BLOB)


def test_failures_of_the_server_are_tried_again_and_then_told(server: WaywardServer, tier: S3Tier) -> None:
    server.mood = 500

    assert "500 Internal Server Error" in error_of(lambda: load(tier))
    assert len(server.requests) == 4  # one, and three retries


def test_a_server_that_asks_to_slow_down_is_served_after_a_pause(server: WaywardServer, tier: S3Tier) -> None:
    for mood in (2, 3):
        server.mood = mood
        assert load(tier) == (len(BLOB), BLOB)
        server.mood = mood
        tier.store(KEYS[0], [BLOB], within(20))
    assert len(server.requests) == 3 + 3 + 4 + 4


def test_retries_can_be_switched_off(server: WaywardServer) -> None:
    tier = S3Tier(server.location(retries="0"))
    server.mood = 1

    assert "503" in error_of(lambda: load(tier))
    tier.close()


def test_retries_end_at_the_deadline(server: WaywardServer) -> None:
    tier = S3Tier(server.location(retries="1000"))
    server.mood = 500

    assert "did not answer in time" in error_of(lambda: load(tier, 0.5))
    tier.close()


def test_the_shorter_of_two_deadlines_ends_first(server: WaywardServer, tier: S3Tier) -> None:
    server.mood = "never"
    patient = threading.Thread(target=lambda: error_of(lambda: load(tier, seconds=3)))
    patient.start()

    error_of(lambda: load(tier, seconds=0.2))

    assert patient.is_alive()
    patient.join()


@pytest.mark.parametrize("call", range(4))
def test_a_server_that_never_answers_costs_one_deadline(server: WaywardServer, tier: S3Tier, call: int) -> None:
    server.mood = "never"
    begin = time.monotonic()

    assert "did not answer in time" in error_of(each_call(tier, 0.3)[call])

    assert time.monotonic() - begin >= 0.3
    server.released.set()
    server.mood = "good"
    assert tier.contains(KEYS[1:2], within(20)) == [True]


def test_a_body_that_drips_does_not_outlast_the_deadline_nor_touch_the_buffers_afterwards(
    server: WaywardServer, tier: S3Tier
) -> None:
    server.mood = "slow"
    buffer = bytearray(len(BLOB))

    assert "in time" in error_of(lambda: tier.load(KEYS[0], [memoryview(buffer)], within(0.4)))

    kept = bytes(buffer)
    server.released.set()
    server.mood = "good"
    assert load(tier) == (len(BLOB), BLOB)
    assert buffer == kept


def test_a_body_that_ends_early_is_an_error(server: WaywardServer, tier: S3Tier) -> None:
    server.mood = "short"

    error_of(lambda: load(tier))


def test_bytes_that_nobody_stored_come_through_as_they_are(server: WaywardServer, tier: S3Tier) -> None:
    server.mood = "other"

    assert load(tier) == (len(BLOB), b"x" * len(BLOB))


def test_a_much_longer_object_of_somebody_else_is_not_read_to_its_end(server: WaywardServer, tier: S3Tier) -> None:
    server.objects[f"/test/{KEYS[0][:2]}/{KEYS[0]}"] = bytes(30_000_000)

    assert load(tier, size=1000) == (30_000_000, bytes(1000))
    assert tier.contains(KEYS[:2], within(20)) == [True, True]


def test_contains_says_no_where_no_answer_came(server: WaywardServer, tier: S3Tier) -> None:
    answer = server.answer
    hanging = {f"/test/{key[:2]}/{key}" for key in KEYS[5:]}

    def some_never(request: object) -> None:
        if request.path in hanging:  # type: ignore[attr-defined]
            server.released.wait(20)
        answer(request)

    server.answer = some_never  # type: ignore[method-assign]

    assert tier.contains(KEYS, within(2)) == [True] * 5 + [False] * 15


def test_no_more_requests_are_in_progress_than_permitted(server: WaywardServer) -> None:
    tier = S3Tier(server.location(connections="3"))
    answer, lock = server.answer, threading.Lock()
    now = most = 0

    def counted(request: object) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1
        answer(request)

    server.answer = counted  # type: ignore[method-assign]

    assert tier.contains(KEYS, within(20)) == [False] * 20
    assert 1 < most <= 3
    tier.close()


def test_nobody_listening_is_told_and_the_tier_opens_all_the_same() -> None:
    with wayward_server() as gone:
        location = gone.location(retries="1")
    tier = S3Tier(location)

    assert "s3://test: " in error_of(lambda: load(tier))
    assert "did not answer in time" in error_of(lambda: tier.contains(KEYS, within(0)))
    tier.close()


def test_a_server_that_answers_in_clear_where_tls_is_expected_is_told() -> None:
    with wayward_server() as server:
        options = {"endpoint": server.endpoint.replace("http:", "https:"), "retries": "0"}
        secrets = {"access_key": "a", "secret_key": "b"}
        tier = S3Tier(TierLocation("s3", "test", options=options, secrets=secrets))
        error_of(lambda: load(tier))
        tier.close()


def test_closing_gives_up_what_is_in_progress(server: WaywardServer, tier: S3Tier) -> None:
    server.mood = "never"
    told: list[BaseException] = []

    def stuck() -> None:
        try:
            load(tier, 30)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is counted
            told.append(error)

    thread = threading.Thread(target=stuck)
    thread.start()
    while not server.requests:
        time.sleep(0.01)
    tier.close()
    thread.join()

    assert len(told) == 1
