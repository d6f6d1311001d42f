"""Bodies with too many JSON values are refused."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.server import json_limits
from headroom.server.json_limits import MOST_CONTAINERS, MOST_VALUES, check_json_size
from headroom.server.refusals import RefusalError

texts = st.text(alphabet='[]{},"\\\\ a\\n')
values = st.recursive(
    texts | st.integers() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=20,
)


def containers(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


@given(values)
def test_objects_and_lists_are_counted_exactly(value: Any) -> None:
    count = containers(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_limits, "MOST_CONTAINERS", count)
        check_json_size(json.dumps(value).encode())
        patch.setattr(json_limits, "MOST_CONTAINERS", count - 1)
        if count:
            with pytest.raises(RefusalError, match=f"The body has {count} objects and lists"):
                check_json_size(json.dumps(value).encode())


def test_long_texts_and_as_many_token_ids_as_allowed_pass() -> None:
    check_json_size(json.dumps({"text": "[{,}] " * MOST_VALUES}).encode())
    check_json_size(b"[" + b"1," * MOST_VALUES + b"1]")
    with pytest.raises(RefusalError, match="values"):
        check_json_size(b"[" + b"1," * (MOST_VALUES + 1) + b"1]")


def test_an_unclosed_string_takes_no_longer_than_a_closed_one() -> None:
    check_json_size(b'"' + b"\\\\[" * MOST_CONTAINERS)


@pytest.mark.parametrize(
    ("path", "start", "piece"),
    [
        ("/v1/completions", '{"prompt":[', "[]"),
        ("/v1/chat/completions", '{"messages":[', '{"role":"user","content":""}'),
        ("/detokenize", '{"tokens":[', "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1"),
    ],
)
def test_a_body_with_too_many_values_is_refused(
    shared: httpx.Client, path: str, start: str, piece: str
) -> None:
    body = start + ",".join([piece] * (MOST_CONTAINERS + 1)) + "]}"
    response = shared.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
