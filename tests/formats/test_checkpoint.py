"""A checkpoint is the same thing to its users whatever the files are."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headroom.errors import FormatError
from headroom.families.files import open_checkpoint
from headroom.families.synth.recipe import find_recipe
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf
from headroom.formats.checkpoint import model_files
from tests.formats.raw_files import LLAMA_CONFIG, STRING, Key, gguf_bytes, small_gguf, write_folder


def test_the_default_model_has_our_names_and_keys(smollm2_path: Path) -> None:
    model = open_checkpoint(smollm2_path)
    assert (model.format, model.architecture, len(model.tensors)) == ("gguf", "llama", 272)
    metadata = model.metadata
    assert [metadata.get_int(key) for key in ("block_count", "embedding_length")] == [30, 576]
    assert metadata.get_int("attention.head_count_kv") == 3
    assert metadata.get_float("rope.freq_base") == 100000
    assert metadata.tied
    assert model.tensors["embed"].shape == (49152, 576)
    assert str(model.tensors["layers.29.ffn.down"].quant) == "q4_1"
    assert model.vocabulary is not None
    assert len(model.vocabulary.tokens) == 49152
    assert model.vocabulary.special_ids["eos"] == 2
    assert model.chat_template is not None
    assert "<|im_start|>" in model.chat_template


def test_a_folder_of_safetensors_has_our_names_and_keys(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "hi", "bos_token": "<s>"}')
    model = open_checkpoint(folder)
    assert (model.format, model.architecture, list(model.tensors)) == (
        "safetensors",
        "llama",
        ["embed"],
    )
    assert model.metadata.get_int("block_count") == 2
    assert model.metadata.get_str("general.name") == "tiny"
    assert model.metadata.tied
    assert model.tokenizer_file == folder / "tokenizer.json"
    assert model.chat_template == "hi"
    assert model.tokenizer_config["bos_token"] == "<s>"
    assert model.tokenizer_config["eos_token_ids"] == [2]
    for other in ("model.safetensors", "config.json"):
        assert (folder / other).is_file()
    assert open_checkpoint(folder / "model.safetensors").identity == model.identity


def test_an_indexed_folder_is_one_checkpoint(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    names = {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    for name, file in names.items():
        save_file({name: torch.ones(2)}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    model = open_checkpoint(folder)
    assert set(model.tensors) == {"norm", "head"}
    assert open_checkpoint(index).tensors.keys() == model.tensors.keys()
    assert {folder / "a.safetensors", folder / "b.safetensors", index} < model.files
    assert {folder / "config.json", folder / "tokenizer.json"} < model.files


@pytest.mark.parametrize(
    ("tie", "head", "tied"),
    [(True, True, True), (False, True, False), (None, True, False), (None, False, True)],
)
def test_whether_the_head_is_the_embedding(
    tmp_path: Path, tie: bool | None, head: bool, tied: bool
) -> None:
    folder = write_folder(tmp_path / "m", {**LLAMA_CONFIG, "tie_word_embeddings": tie})
    if head:
        save_file({"lm_head.weight": torch.ones(2)}, folder / "model.safetensors")
    assert open_checkpoint(folder).metadata.tied is tied


def test_generation_settings_give_the_tokens_that_end_an_answer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert open_checkpoint(folder).tokenizer_config["eos_token_ids"] == [5, 6]
    (folder / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(FormatError, match=r"eos_token_id is .* not token numbers"):
        open_checkpoint(folder)


def test_the_chat_template_is_the_separate_file_or_the_one_named_default(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("separate")
    assert open_checkpoint(folder).chat_template == "separate"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(FormatError, match=r"chat_template.jinja is not UTF-8 text"):
        open_checkpoint(folder)


def test_identity_follows_the_contents_and_not_the_path(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.gguf" for name in "abc"]
    for path, content in zip(paths, (small_gguf(), small_gguf(), small_gguf() + b"1"), strict=True):
        path.write_bytes(content)
    first, same, longer = (open_checkpoint(path).identity for path in paths)
    assert first == same != longer
    assert len(first) == 16


def test_models_with_the_same_header_and_other_weights_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.gguf" for name in "ab"]
    for path, seed in zip(paths, (1, 2), strict=True):
        write_gguf(Source(find_recipe("qwen3moe", "tiny"), seed), path, "q4_k_m")
    one, other = (open_checkpoint(path).identity for path in paths)
    assert paths[0].stat().st_size == paths[1].stat().st_size
    assert one != other


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(small_gguf())
    assert open_checkpoint(tmp_path).path == tmp_path / "a.gguf"
    assert open_checkpoint(tmp_path).files == {tmp_path / "a.gguf"}
    (tmp_path / "b.gguf").write_bytes(small_gguf())
    with pytest.raises(FormatError, match=r"holds 2 GGUF models: a.gguf, b.gguf"):
        open_checkpoint(tmp_path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="There is no file or folder"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(FormatError, match="holds no model file"):
        open_checkpoint(tmp_path)
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes())
    with pytest.raises(FormatError, match=r"has no general.architecture"):
        open_checkpoint(path)
    keys: list[Key] = [
        ("general.architecture", STRING, "a"),
        ("x", STRING, ""),
        ("a.x", STRING, ""),
    ]
    path.write_bytes(gguf_bytes(keys))
    with pytest.raises(FormatError, match=r"Two keys differ only by the prefix 'a.'"):
        open_checkpoint(path)


def test_safetensors_without_a_config_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").unlink()
    with pytest.raises(FormatError, match=r"There is no file .*config.json"):
        open_checkpoint(folder)


def test_a_folder_of_several_models_lists_each_of_them_once(tmp_path: Path) -> None:
    for name in (
        "b.gguf", "a.gguf", "mmproj-a.gguf", "notes.txt",
        "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "inner/c.gguf", "inner/deep/d.gguf",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    write_folder(tmp_path / "tensors")
    (tmp_path / "empty").mkdir()
    found = [str(path.relative_to(tmp_path)) for path in model_files(tmp_path)]
    assert found == ["a.gguf", "b.gguf", "big-00001-of-00002.gguf", "inner/c.gguf", "tensors"]
    assert model_files(tmp_path / "tensors") == [tmp_path / "tensors"]
    assert model_files(tmp_path / "empty") == [tmp_path / "empty"]
