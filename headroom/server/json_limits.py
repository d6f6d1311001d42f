"""Limits the number of JSON values in a body: reading too many would hold up other clients."""

import re

from headroom.server.refusals import RefusalError

# Parsing and checking a value takes up to 1 us, and an object or a list up to 20 us. It is done in
# a thread, which holds the interpreter lock for much of that time. Agents send hundreds of messages
# and tools, each of a few objects.
MOST_VALUES = 1_000_000
MOST_CONTAINERS = 20_000
STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def check_json_size(data: bytes) -> None:
    """Raise RefusalError for a body with too many values, or too many objects and lists."""
    if not _is_large(data):
        return
    # Commas and brackets inside of strings do not count.
    outside = STRING.sub(b"", data)
    for most, count, what in (
        (MOST_CONTAINERS, _containers(outside), "objects and lists"),
        (MOST_VALUES, outside.count(b","), "values"),
    ):
        if count > most:
            raise RefusalError(
                413,
                "request_too_large",
                f"The body has {count} {what}; the server reads at most {most}.",
                hint="Send fewer messages, prompts or token ids in one request.",
            )


def _is_large(data: bytes) -> bool:
    return _containers(data) > MOST_CONTAINERS or data.count(b",") > MOST_VALUES


def _containers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")
