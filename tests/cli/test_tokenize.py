"""`headroom tokenize`: tokens as lines and as JSON."""

import json
from typing import Any

import pytest

from headroom.cli.main import run_command


class WordTokenizer:
    """One token for each word; the special text `<s>` is token 1."""

    @classmethod
    def from_checkpoint(cls, checkpoint: object) -> "WordTokenizer":
        assert checkpoint == "model.gguf, opened"
        return cls()

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [1 if special and word == "<s>" else 100 + len(word) for word in text.split()]

    def token_text(self, token_id: int) -> str:
        return "<s>" if token_id == 1 else "é" * (token_id - 100)


@pytest.fixture(autouse=True)
def _word_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(path: Any) -> str:
        return f"{path}, opened"

    monkeypatch.setattr("headroom.cli.tokenize.Tokenizer", WordTokenizer)
    monkeypatch.setattr("headroom.cli.tokenize.open_checkpoint", opened)
    monkeypatch.setattr("headroom.cli.tokenize.ready_model", lambda options: options.model)


def test_json_has_ids_and_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["tokenize", "model.gguf", "<s> ab", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ids": [1, 102], "pieces": ["<s>", "éé"]}


def test_no_special_reads_special_tokens_as_plain_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["tokenize", "model.gguf", "<s>", "--no-special", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == [103]


def test_people_get_one_token_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["tokenize", "model.gguf", "<s> ab"]) == 0
    assert capsys.readouterr().out == "       1  '<s>'\n     102  'éé'\n"
