"""Decoding under a JSON schema, compared with free decoding."""

import json
from pathlib import Path

import numpy as np
import pytest

from headroom.bench.figures import BenchSettings, SchemaFigure
from headroom.bench.report import report_json
from headroom.bench.run import run_bench
from headroom.bench.schema import ITEMS, TYPICAL, endless_list, full_vocabulary
from headroom.errors import RequestError
from headroom.families.files import open_checkpoint
from headroom.families.synth.recipe import find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf
from headroom.kernels.native import measure
from headroom.options import Options
from headroom.text.grammar import GrammarCompiler
from headroom.text.tokenizer import Tokenizer

SMALL = BenchSettings(
    contexts=(8,), batches=(1, 3), tokens=3, rounds=2, warm=1, only=("decode",), schema=TYPICAL
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "llama.gguf"
    write_gguf(Source(find_recipe("llama", "tiny", 2), 0), path, "q8_0")
    return path


def test_every_batch_is_measured_freely_and_under_the_schema(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "TOUCHED_BYTES", 8 << 20)
    report = run_bench(model, Options(model=str(model), threads=1, parallel=2), SMALL)
    assert [(one.batch, one.context) for one in report.figures.schemas] == [(1, 8)]
    assert any("schema with batch 3: at most 2" in text for text in report.figures.left_out)
    found = json.loads(json.dumps(report_json(report)))["schema"][0]
    figure = report.figures.schemas[0]
    assert found["tokens_per_s"] == pytest.approx(1 / figure.step_s)
    assert found["free_tokens_per_s"] == pytest.approx(1 / figure.free_s)
    assert found["loss"] == pytest.approx(1 - found["tokens_per_s"] / found["free_tokens_per_s"])
    assert min(figure.mask_s, figure.step_s, figure.free_s) > 0


def test_the_loss_is_a_share_of_the_free_speed() -> None:
    figure = SchemaFigure(batch=4, context=8, free_s=0.019, step_s=0.02, mask_s=1e-5)
    assert figure.loss == pytest.approx(0.05)
    assert figure.tokens_per_s == pytest.approx(200)


def test_an_answer_is_a_list_that_does_not_end() -> None:
    schema = {"$defs": {"x": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/x"}}}
    made = endless_list(schema).value
    assert made["minItems"] == ITEMS
    assert made["items"] == {"properties": {"a": {"$ref": "#/$defs/x"}}}
    assert made["$defs"] == schema["$defs"]


def test_a_vocabulary_of_few_tokens_is_filled_up(model: Path) -> None:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(model))
    vocab = 5000
    full = full_vocabulary(tokenizer, vocab)
    texts = {full.token_text(token) for token in range(vocab)}
    assert full.vocab_size == vocab
    assert len(texts) > 0.95 * vocab - 128  # half of the single bytes are no characters
    assert full_vocabulary(full, vocab) is full
    grammar = GrammarCompiler(full, vocab).compile([endless_list(TYPICAL)])
    bits = np.unpackbits(grammar.begin().mask().view(np.uint8), bitorder="little")
    first = {full.token_text(int(token)) for token in np.flatnonzero(bits)}
    assert first
    assert all(text.startswith("[") for text in first)


def test_a_schema_that_cannot_be_compiled_is_refused(model: Path) -> None:
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(model))
    with pytest.raises(RequestError, match="at /items: "):
        GrammarCompiler(tokenizer, tokenizer.vocab_size).compile([endless_list({"not": {}})])
