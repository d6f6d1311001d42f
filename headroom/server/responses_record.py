"""ResponseRecord: the state of one response, and the Response object that clients get."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from headroom.answers import AnswerDelta
from headroom.server.openai_shared import usage_and_timings
from headroom.server.refusals import Problem
from headroom.server.responses_output import ResponseEvent, new_id

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
# The event that ends a stream, by status. The API has none for a cancelled response.
LAST_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}


@dataclass(slots=True, eq=False)
class ResponseRecord:
    """The state of one response, while it is being written and afterwards."""

    model: str
    asked: Mapping[str, Any]  # the fields that repeat the request
    seed: int | None  # None before the model is loaded
    id: str = field(default_factory=lambda: new_id("resp"))
    created_at: int = field(default_factory=lambda: int(time.time()))
    status: Status = "in_progress"
    output: Sequence[dict[str, Any]] = ()
    completed_at: int | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    last: AnswerDelta | None = None  # the last delta so far: it has the counts and times

    def shown(self) -> dict[str, Any]:
        """Return the Response object as it is now."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": self.completed_at,
            "status": self.status,
            "error": self.error,
            "incomplete_details": self.incomplete_details,
            "model": self.model,
            "output": list(self.output),
            **self.asked,
            **self._totals(),
            "seed": self.seed,
        }

    def at_start(self) -> "ResponseRecord":
        """Return the response as it was before the model wrote anything."""
        return ResponseRecord(self.model, self.asked, self.seed, self.id, self.created_at)

    def end(self, status: Status, problem: Problem | None = None) -> None:
        """Record how the response ended."""
        self.status = status
        if status == "completed":
            self.completed_at = int(time.time())
        if status == "incomplete":
            self.incomplete_details = {"reason": "max_output_tokens"}
        if problem is not None:
            self.error = {"code": "server_error", "message": problem.message}

    def first_events(self) -> Iterator[ResponseEvent]:
        """Yield the events that a stream begins with."""
        yield {"type": "response.created", "response": self.shown()}
        yield {"type": "response.in_progress", "response": self.shown()}

    def last_event(self) -> ResponseEvent:
        """Return the event that a stream ends with."""
        return {"type": LAST_EVENTS[self.status], "response": self.shown()}

    def _totals(self) -> dict[str, Any]:
        if self.last is None or self.status == "in_progress":
            return {"usage": None}
        totals = usage_and_timings([self.last], 1)
        counted = totals["usage"]
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        usage = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": counted["completion_tokens_details"],
            "total_tokens": counted["total_tokens"],
        }
        details = self.last.finish_details
        more = {} if details is None else {"finish_details": asdict(details)}
        return {"usage": usage, "timings": totals["timings"], **more}
