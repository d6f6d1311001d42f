"""Fill-in-the-middle prompts, with tokens that a file names or that are known by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tokenizers import Tokenizer as Coder

from headroom.formats.checkpoint import Checkpoint
from headroom.text.fill_in import FillIn, find_fill_in
from headroom.text.tokenizer import Tokenizer
from tests.tiny import byte_tokenizer

NO_FILE = cast(Checkpoint, SimpleNamespace(vocabulary=None))


def tokenizer_with(folder: Path, *names: str) -> Tokenizer:
    coder: Coder = byte_tokenizer()
    coder.add_special_tokens(list(names))
    coder.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_file(folder / "tokenizer.json", {})


@pytest.mark.parametrize(
    "names",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
        (
            "<\uff5cfim\u2581begin\uff5c>",
            "<\uff5cfim\u2581hole\uff5c>",
            "<\uff5cfim\u2581end\uff5c>",
        ),
    ],
)
def test_tokens_are_known_by_name(names: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, *names, "<|fim_pad|>")
    found = find_fill_in(NO_FILE, tokenizer)
    assert found is not None
    assert (found.prefix, found.suffix, found.middle) == tuple(map(tokenizer.find, names))
    assert found.stop_ids == {tokenizer.find("<|fim_pad|>")}
    text = tokenizer.decode(found.prompt(tokenizer, "def f():\n", "    return x\n"))
    assert text == f"{names[0]}def f():\n{names[1]}    return x\n{names[2]}"


def test_codestral_takes_the_suffix_first(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "[PREFIX]", "[SUFFIX]")
    found = find_fill_in(NO_FILE, tokenizer)
    assert found is not None
    assert found.middle is None
    assert tokenizer.decode(found.prompt(tokenizer, "a", "b")) == "[SUFFIX]b[PREFIX]a"


def test_a_files_own_keys_go_first(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    ids = {"fim_pre": 5, "fim_suf": 6, "fim_mid": 7}
    file = cast(Checkpoint, SimpleNamespace(vocabulary=SimpleNamespace(special_ids=ids)))
    found = find_fill_in(file, tokenizer)
    assert found is not None
    assert (found.prefix, found.suffix, found.middle) == (5, 6, 7)


def test_a_vocabulary_without_fill_in_tokens_cannot_fill_in(tmp_path: Path) -> None:
    assert find_fill_in(NO_FILE, tokenizer_with(tmp_path, "<|fim_prefix|>")) is None


def test_marks_in_the_texts_are_plain_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path)
    gap = FillIn(prefix=1, suffix=2, middle=3, stop_ids=frozenset())
    prompt = gap.prompt(tokenizer, "<|end|>", "b")
    assert tokenizer.find("<|end|>") not in prompt
    assert len(prompt) == len("<|end|>") + 1 + 3


def test_a_prompt_begins_with_bos_once_if_the_tokenizer_adds_it(tmp_path: Path) -> None:
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<s>")
    tokenizer_with(tmp_path, *marks)
    config = {"bos_token": "<s>", "add_bos_token": True}
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json", config)
    bos, a, b = (tokenizer.encode(text, add_bos=False) for text in ("<s>", "a", "b"))
    gap = find_fill_in(NO_FILE, tokenizer)
    assert gap is not None
    wanted = [*bos, gap.prefix, *a, gap.suffix, *b, gap.middle]
    for before in ("a", a, [*bos, *a]):
        assert gap.prompt(tokenizer, before, "b") == wanted
    reversed_gap = FillIn(prefix=1, suffix=2, middle=None, stop_ids=frozenset())
    assert reversed_gap.prompt(tokenizer, [*bos, *a], "b") == [*bos, 2, *b, 1, *a]


def test_a_file_that_names_only_some_tokens_is_not_believed(tmp_path: Path) -> None:
    names = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    tokenizer = tokenizer_with(tmp_path, *names)
    ids = {"fim_pre": 5, "fim_suf": 6}
    file = cast(Checkpoint, SimpleNamespace(vocabulary=SimpleNamespace(special_ids=ids)))
    found = find_fill_in(file, tokenizer)
    assert found is not None
    assert (found.prefix, found.suffix, found.middle) == tuple(map(tokenizer.find, names))
    assert find_fill_in(file, tokenizer_with(tmp_path, "[PREFIX]")) is None
    codestral = tokenizer_with(tmp_path, "[PREFIX]", "[SUFFIX]", "<EOT>")
    found = find_fill_in(file, codestral)
    assert found is not None
    assert (found.prefix, found.suffix, found.middle) == (
        codestral.find("[PREFIX]"), codestral.find("[SUFFIX]"), None
    )  # fmt: skip
    assert found.stop_ids == {codestral.find("<EOT>")}
