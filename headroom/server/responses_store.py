"""ResponseStore: the responses that clients can fetch or continue, within limits."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headroom.server.invalid_bodies import short
from headroom.server.refusals import RefusalError
from headroom.server.responses_output import count_json_bytes
from headroom.server.responses_record import ResponseRecord

Item = dict[str, Any]


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A response, its input, and the response that it continues."""

    record: ResponseRecord
    input: Sequence[Item]
    cancel: Callable[[], None]  # ends the answer, if it still runs
    previous: "StoredResponse | None" = None
    bytes: int = 0  # size as JSON, with all responses that it continues

    @property
    def id(self) -> str:
        """The id of the response."""
        return self.record.id

    def items(self) -> list[Item]:
        """Return all items of the conversation up to the end of this response."""
        chain: list[StoredResponse] = []
        response: StoredResponse | None = self
        while response is not None:
            chain.append(response)
            response = response.previous
        return [item for one in reversed(chain) for item in (*one.input, *one.record.output)]

    def weigh(self) -> None:
        """Compute `bytes` again."""
        own = count_json_bytes([list(self.input), self.record.shown()])
        self.bytes = own + (0 if self.previous is None else self.previous.bytes)


class ResponseStore:
    """Keeps the most recently used responses, limited in number and in bytes.

    Other threads may look for responses while the event loop's thread adds and drops them.

    A response refers to those that it continues, even after the store has dropped them. So their
    bytes count for each response that refers to them, and the limit holds.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()  # least recent first

    def add(self, response: StoredResponse) -> None:
        """Store a response; drop others if a limit is exceeded."""
        response.weigh()
        self._responses[response.id] = response
        self._make_room()

    def changed(self, response: StoredResponse) -> None:
        """Measure a response that has grown; drop it or others if a limit is exceeded."""
        response.weigh()
        self._make_room()

    def get(self, response_id: str) -> StoredResponse:
        """Return a response; raise a RefusalError with 404 if it is not stored."""
        found = self._find(response_id)
        if found is None:
            raise RefusalError(
                404,
                "not_found",
                f"Response with id {short(response_id)!r} not found.",
                hint="The server keeps the last ones: --stored-responses, --stored-bytes.",
                param="id",
            )
        return found

    def previous(self, response_id: str | None) -> StoredResponse | None:
        """Return the response that a new one continues; it must be stored and finished."""
        if response_id is None:
            return None
        found = self._find(response_id)
        if found is None:
            raise RefusalError(
                400,
                "previous_response_not_found",
                f"Previous response with id {short(response_id)!r} not found.",
                hint="The server keeps the last ones: --stored-responses, --stored-bytes.",
                param="previous_response_id",
            )
        if (status := found.record.status) not in ("completed", "incomplete"):
            raise RefusalError(
                400,
                "invalid_value",
                f"The response {short(response_id)!r} cannot be continued: it is {status}.",
                param="previous_response_id",
            )
        return found

    def find_item(self, item_id: str) -> Item | None:
        """Return the input or output item with this id, from the most recent response."""
        for response in reversed([*self._responses.values()]):
            for item in (*response.input, *response.record.output):
                if item.get("id") == item_id:
                    return item
        return None

    def delete(self, response_id: str) -> StoredResponse:
        """Drop a response and return it; raise a RefusalError with 404 if it is not stored."""
        found = self.get(response_id)
        del self._responses[response_id]
        return found

    def discard(self, response_id: str) -> None:
        """Drop a response, if it is stored."""
        self._responses.pop(response_id, None)

    def _find(self, response_id: str) -> StoredResponse | None:
        found = self._responses.get(response_id)
        with contextlib.suppress(KeyError):  # another thread may have dropped it meanwhile
            self._responses.move_to_end(response_id)
        return found

    def _make_room(self) -> None:
        total = sum(response.bytes for response in self._responses.values())
        while len(self._responses) > self._most or total > self._most_bytes:
            _, gone = self._responses.popitem(last=False)
            total -= gone.bytes
