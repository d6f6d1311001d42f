"""Vectors of texts against transformers' hidden states, pooled by the file's setting."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers import Tokenizer, processors

from headroom import LLM
from headroom.errors import ContextLengthError, ModelError, RequestError
from tests.families.oracles import variant
from tests.tiny import byte_tokenizer

TEXTS = ["a", "The cat sat.", "x" * 70, "What would the people say? " * 6]
SETTINGS = {"context": 256, "parallel": 3, "chunk": 32, "threads": 1, "kv_type": "f32"}


def wanted(name: str, ids: list[int], pooling: str) -> npt.NDArray[np.float64]:
    """Return transformers' last hidden state, pooled and scaled to length 1."""
    with torch.no_grad():
        states = variant(name).model().model(torch.tensor([ids])).last_hidden_state[0].double()
    vector = (states.mean(0) if pooling == "mean" else states[-1]).numpy()
    scaled: npt.NDArray[np.float64] = vector / np.linalg.norm(vector)
    return scaled


def save(name: str, folder: Path, pooling: str | None) -> Path:
    variant(name).save_safetensors(folder)
    if pooling is not None:
        settings = {
            "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
            "pooling_mode_lasttoken": pooling == "last",
        }
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "gemma4-e2b"])
@pytest.mark.parametrize("pooling", ["mean", "last", None])
def test_vectors_are_those_of_transformers(name: str, pooling: str | None, tmp_path: Path) -> None:
    with LLM(str(save(name, tmp_path, pooling)), **SETTINGS) as llm:
        assert llm.pooling == (pooling or "last")
        vectors = llm.embed(TEXTS)
        for text, vector in zip(TEXTS, vectors, strict=True):
            expected = wanted(name, llm.tokenizer.encode(text), llm.pooling)
            np.testing.assert_allclose(vector, expected, atol=2e-5)
            assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
        np.testing.assert_array_equal(llm.embed(TEXTS[1])[0], vectors[1])
        ids = llm.tokenizer.encode(TEXTS[1])
        np.testing.assert_array_equal(llm.embed([ids])[0], vectors[1])
        (cut,) = llm.embed(TEXTS[1], dimensions=5)
        np.testing.assert_allclose(cut, vectors[1][:5] / np.linalg.norm(vectors[1][:5]), atol=1e-6)


def test_more_texts_than_the_queue_holds_are_embedded_in_their_order(tiny_path: Path) -> None:
    with LLM(str(tiny_path), **SETTINGS, queue=2) as llm:
        texts = [f"text {number}" for number in range(23)]
        for text, vector in zip(texts, llm.embed(texts), strict=True):
            np.testing.assert_array_equal(vector, llm.embed(text)[0])
        assert llm.engine.stats().generated_tokens == 0


def test_a_text_ends_with_the_token_that_its_tokenizer_adds(tmp_path: Path) -> None:
    save("qwen3-tied", tmp_path, "last")
    tokenizer: Tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", tokenizer.token_to_id("<|end|>"))]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("hello").ids
    assert ids[-1] == tokenizer.token_to_id("<|end|>")
    with LLM(str(tmp_path), **SETTINGS) as llm:
        assert llm.tokenizer.encode("hello") == ids[:-1]
        expected = wanted("qwen3-tied", ids, "last")
        np.testing.assert_allclose(llm.embed("hello")[0], expected, atol=2e-5)
        np.testing.assert_allclose(llm.embed("hello<|end|>")[0], expected, atol=2e-5)


def test_what_cannot_be_embedded_is_refused(tmp_path: Path) -> None:
    with LLM(str(save("llama", tmp_path, "cls")), **SETTINGS) as llm:
        with pytest.raises(ModelError, match="of the kind 'cls'"):
            llm.embed("a")
        llm.pooling = "last"
        with pytest.raises(RequestError, match="5000 dimensions"):
            llm.embed("a", dimensions=5000)
        with pytest.raises(ContextLengthError, match="300 tokens"):
            llm.embed("a" * 300)
        assert len(llm.embed("a")[0]) == llm.hidden_size
