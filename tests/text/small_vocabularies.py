"""Vocabularies as GGUF files hold them, small enough to read."""

from headroom.formats.vocabulary import Vocabulary


def sentencepiece_vocabulary() -> Vocabulary:
    """Return control tokens, all bytes, letters and some words with falling scores."""
    words = ["▁", *"helowrd", "▁w", "he", "ll", "llo", "hello", "▁hello", "or", "ld", "▁world"]
    words += ["▁wor", "▁he", "hel", "lo", "orl", "é", "▁▁", "▁▁▁▁"]
    control = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    return Vocabulary(
        model="llama",
        pre="",
        tokens=[*control, *bytes_, *words],
        types=[2, 3, 3, *[6] * 256, *[1] * len(words)],
        scores=[*[0.0] * 259, *(-float(rank) for rank in range(len(words)))],
        merges=[],
        special_ids={"unknown": 0, "bos": 1, "eos": 2},
        add_bos=True,
    )


def gemma_vocabulary() -> Vocabulary:
    """Return a vocabulary of merges over plain text, a user-defined run of blanks among it."""
    words = ["▁", *"helo\n", "he", "ll", "hell", "hello", "▁hello", "\n\n", "▁h"]
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*control, *bytes_, *words, "  "]
    return Vocabulary(
        model="gemma4",
        pre="",
        tokens=tokens,
        types=[3, 3, 3, 2, 3, *[6] * 256, *[1] * len(words), 4],
        scores=[],
        merges=["h e", "l l", "he ll", "hell o", "▁ hello", "\n \n", "▁ ▁", "▁ h"],
        special_ids={"unknown": 3, "bos": 2, "eos": 1},
        add_bos=True,
    )
