"""/tokenize and /detokenize."""

from typing import Any

import httpx
import pytest

from tests.server.fakes import BOS


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"content": "ab"}, {"tokens": [97, 98], "count": 2}),
        ({"text": "ab"}, {"tokens": [97, 98], "count": 2}),
        ({"content": ""}, {"tokens": [], "count": 0}),
        ({"content": "a", "add_special": True}, {"tokens": [BOS, 97], "count": 2}),
        ({"content": "<s>a", "parse_special": False}, {"tokens": [97], "count": 1}),
        (
            {"content": "é", "with_pieces": True},
            {"tokens": [195, 169], "count": 2, "pieces": ["\ufffd", "\ufffd"]},
        ),
    ],
)
def test_a_text_becomes_tokens(shared: httpx.Client, body: Any, answer: Any) -> None:
    assert shared.post("/tokenize", json=body).json() == answer


def test_tokens_become_their_text(shared: httpx.Client) -> None:
    answer = shared.post("/detokenize", json={"tokens": [195, 169, 97]}).json()
    assert answer == {"content": "éa"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": "a", "add_special": "yes"}, "add_special"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [1e300]}, "tokens"),
        ("/detokenize", {"tokens": [10**300]}, "tokens"),
    ],
)
def test_wrong_texts_and_tokens_are_refused(
    shared: httpx.Client, path: str, body: Any, param: str
) -> None:
    response = shared.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
