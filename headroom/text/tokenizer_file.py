"""From a GGUF vocabulary to the tokenizer.json beside safetensors."""

from tokenizers import decoders

from headroom.formats.vocabulary import BLANK_MARK, Vocabulary
from headroom.text.spelling import Spelling
from headroom.text.vocabulary_coder import build_coder, spelling_of


def tokenizer_file(vocabulary: Vocabulary) -> str:
    """Return the content of a tokenizer.json that encodes and decodes as the vocabulary does."""
    tokens = list(vocabulary.tokens)
    coder = build_coder(vocabulary, tokens, blank_prefix=False)
    if spelling_of(vocabulary) is Spelling.BYTE_LEVEL:
        coder.decoder = decoders.ByteLevel()
    else:
        steps = [decoders.Replace(BLANK_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        coder.decoder = decoders.Sequence(steps)
    return coder.to_str(pretty=False)
