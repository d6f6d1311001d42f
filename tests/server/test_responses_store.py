"""ResponseStore: which responses are kept, and which are dropped."""

import pytest

from headroom.server.refusals import RefusalError
from headroom.server.responses_record import ResponseRecord
from headroom.server.responses_store import ResponseStore, StoredResponse


def stored(previous: StoredResponse | None = None, text: str = "x") -> StoredResponse:
    record = ResponseRecord("model", {}, 0)
    record.output = [{"id": f"msg_{record.id}", "type": "message", "text": text}]
    record.end("completed")
    return StoredResponse(record, [{"id": f"in_{record.id}"}], lambda: None, previous)


def has(store: ResponseStore, response: StoredResponse) -> bool:
    try:
        return store.get(response.id) is response
    except RefusalError:
        return False


def test_the_response_that_was_used_last_stays() -> None:
    store = ResponseStore(2, 1 << 20)
    first, second, third = stored(), stored(), stored()
    store.add(first)
    store.add(second)
    assert store.get(first.id) is first
    store.add(third)
    assert [has(store, one) for one in (first, second, third)] == [True, False, True]


def test_bytes_are_limited_with_those_of_earlier_responses() -> None:
    store = ResponseStore(100, 40_000)
    first = stored(text="x" * 10_000)
    second = stored(first, text="x" * 10_000)
    third = stored(second, text="x" * 10_000)
    store.add(first)
    store.add(second)
    assert has(store, first)
    assert second.bytes > 20_000
    store.add(third)
    assert [has(store, one) for one in (first, second, third)] == [False, False, True]
    # The responses that it continues are still kept for it.
    assert len(third.items()) == 6
    third.record.output = [{"id": "msg", "text": "x" * 50_000}]
    store.changed(third)
    assert not has(store, third)


def test_a_chain_of_thousands_is_read() -> None:
    last = stored()
    for _ in range(3000):
        last = stored(last)
    assert len(last.items()) == 2 * 3001


def test_items_are_found_by_their_ids() -> None:
    store = ResponseStore(5, 1 << 20)
    one = stored()
    store.add(one)
    assert store.find_item(f"in_{one.id}") == {"id": f"in_{one.id}"}
    assert store.find_item(f"msg_{one.id}") == one.record.output[0]
    assert store.find_item("msg_none") is None


def test_an_unknown_response_is_not_found() -> None:
    store = ResponseStore(5, 1 << 20)
    with pytest.raises(RefusalError) as refused:
        store.get("resp_none")
    assert refused.value.status == 404
    with pytest.raises(RefusalError) as refused:
        store.delete("resp_none")
    assert refused.value.status == 404
    store.discard("resp_none")


def test_only_ended_responses_are_continued() -> None:
    store = ResponseStore(5, 1 << 20)
    failed = stored()
    failed.record.end("failed")
    store.add(failed)
    with pytest.raises(RefusalError, match="it is failed"):
        store.previous(failed.id)
    assert store.previous(None) is None
