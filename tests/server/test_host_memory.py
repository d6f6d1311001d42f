"""What a large piece of work took goes back to the system, also from threads that live on."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from headroom.server import host_memory
from headroom.server.host_memory import MOST_KEPT_BYTES, giving_back, resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")


def take(blocks: int) -> list[bytes]:
    """Take a block of 1,000 bytes so often, and return a few of them, which hold their place."""
    return [bytes([number % 256]) * 1000 for number in range(blocks)][::1000]


def test_threads_keep_nothing_of_what_they_took() -> None:
    with ThreadPoolExecutor(4) as threads:
        before = resident_bytes()
        kept = [threads.submit(giving_back, take, blocks=200_000) for _ in range(4)]
        assert [len(one.result()) for one in kept] == [200] * 4
        assert resident_bytes() - before < MOST_KEPT_BYTES


def test_work_that_begins_beside_other_work_is_measured_from_before_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = [0]
    given_back: list[int] = []
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: held[0])
    monkeypatch.setattr(host_memory, "give_back_unused", lambda: given_back.append(held[0]))

    def inner() -> None:
        held[0] = MOST_KEPT_BYTES + 2  # what the outer work held is gone, and this is kept

    def outer() -> None:
        held[0] = MOST_KEPT_BYTES + 1
        giving_back(inner)

    giving_back(outer)
    assert given_back == [MOST_KEPT_BYTES + 2] * 2


def test_an_error_passes_and_small_work_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(host_memory, "give_back_unused", lambda: given_back.append(True))
    assert giving_back(take, 1000) == [bytes(1000)]
    with pytest.raises(ZeroDivisionError):
        giving_back(divmod, 1, 0)
    assert given_back == []
