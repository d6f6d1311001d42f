"""Published vocabularies give the ids that their original tokenizers gave.

llama.cpp's repository has GGUF files of vocabularies alone in its folder `models`, each with texts
(`.inp`) and the ids of the tokenizer from which the file was made (`.out`). They are not part of
this repository: the variable VOCABS names a folder with them.
"""

import os
from pathlib import Path

import pytest

from headroom.formats.gguf import read_gguf
from headroom.formats.metadata import Metadata
from headroom.formats.vocabulary import read_vocabulary
from headroom.text.tokenizer import Tokenizer

VOCABS = os.environ.get("VOCABS", "")
END = "\n__ggml_vocab_test__\n"  # after each text
SKIPPED = ("bert", "t5")  # tokenizer models that are refused


def published() -> list[Path]:
    """Return the vocabularies that have texts and ids beside them."""
    found = sorted(Path(VOCABS).glob("ggml-vocab-*.gguf")) if VOCABS else []
    return [x for x in found if x.stat().st_size and x.with_name(f"{x.name}.out").exists()]


@pytest.mark.skipif(not published(), reason="VOCABS names no folder with vocabularies")
@pytest.mark.parametrize("path", published(), ids=lambda path: path.stem)
def test_a_published_vocabulary_gives_the_ids_of_its_tokenizer(path: Path) -> None:
    file = read_gguf(path)
    vocabulary = read_vocabulary(Metadata(file.values, path, tied=False))
    assert vocabulary is not None
    if vocabulary.model in SKIPPED:
        pytest.skip(f"tokenizer model {vocabulary.model}")
    tokenizer = Tokenizer.from_vocabulary(vocabulary)
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split(END)[:-1]
    lines = path.with_name(f"{path.name}.out").read_text().splitlines()
    assert len(texts) == len(lines)
    for text, line in zip(texts, lines, strict=True):
        expected = [int(token) for token in line.split()]
        assert tokenizer.encode(text, special=False, add_bos=False) == expected, repr(text)
