"""Write a synthesised checkpoint: one GGUF file, or a folder of safetensors."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headroom.errors import OptionError
from headroom.families.family import Recipe
from headroom.families.registry import find_family
from headroom.families.synth.convert import Origin, safetensors_jobs, safetensors_table
from headroom.families.synth.settings import config_json, gguf_keys
from headroom.families.synth.values import Source
from headroom.families.synth.vocabulary import make_vocabulary, tokenizer_kind, vocabulary_keys
from headroom.families.tables import tensor_types
from headroom.formats.gguf_writer import GgufValue, TensorEntry, gguf_bytes, gguf_jobs
from headroom.formats.mixes import MIXES, find_mix
from headroom.formats.quants import BF16, F16, F32, QuantType
from headroom.formats.safetensors_writer import Shard, index_file, make_shards
from headroom.formats.vocabulary import Vocabulary
from headroom.formats.writing import Job, check_space, ignore, write_pieces

# GGUF's general.file_type of each mix. Readers look at the types of the tensors instead.
FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18,
    "bf16": 32, "mxfp4": 38,
}  # fmt: skip
SAFETENSORS_TYPES: dict[str, tuple[QuantType, str]] = {
    "f32": (F32, "float32"), "f16": (F16, "float16"), "bf16": (BF16, "bfloat16"),
}  # fmt: skip
WriteProgress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class WriteSettings:
    """The number of threads that write a checkpoint, and the callback for progress."""

    threads: int = 1
    progress: WriteProgress = ignore  # called with the bytes of each piece that is written


ONE_THREAD = WriteSettings()


def mix_name(name: str) -> str:
    """Return the name of a mix as formats/mixes.py spells it; refuse unknown names."""
    short = name.lower().replace("-", "_")
    short = "mxfp4" if short == "mxfp4_moe" else short
    if short not in MIXES:
        known = ", ".join(name.upper() for name in MIXES)
        raise OptionError(f"{name!r} is no quantisation.", hint=f"Choose {known}.", param="quant")
    return short


def gguf_table(recipe: Recipe, mix: str) -> list[TensorEntry]:
    """Return every tensor of a model's GGUF file, in order."""
    types = tensor_types(recipe.dims, find_mix(mix))
    return [TensorEntry(name, shape, quant) for name, (shape, quant) in types.items()]


def gguf_values(recipe: Recipe, mix: str) -> dict[str, GgufValue]:
    """Return every key of a model's GGUF file."""
    return {
        "general.architecture": recipe.family,
        "general.type": "model",
        "general.name": f"{recipe.family} {recipe.name}, random weights",
        "general.quantization_version": 2,
        "general.file_type": FILE_TYPES[mix],
        **gguf_keys(find_family(recipe.family).synthesis, recipe),
        **vocabulary_keys(make_vocabulary(recipe), tokenizer_kind(recipe).template),
    }


def gguf_header(recipe: Recipe, mix: str) -> bytes:
    """Return the bytes of a GGUF file before its tensors."""
    return gguf_bytes(gguf_values(recipe, mix), gguf_table(recipe, mix))


def checkpoint_bytes(recipe: Recipe, mix: str, format: str) -> int:
    """Return the bytes of a checkpoint's tensors."""
    if format == "gguf":
        return sum(entry.nbytes for entry in gguf_table(recipe, mix))
    quant, _ = safetensors_type(mix)
    return sum(entry.nbytes for entry, _ in safetensors_table(recipe.dims, quant))


def write_gguf(source: Source, path: Path, mix: str, settings: WriteSettings = ONE_THREAD) -> None:
    """Write a model as one GGUF file."""
    entries = gguf_table(source.recipe, mix)
    check_space(path, checkpoint_bytes(source.recipe, mix, "gguf"))
    jobs = gguf_jobs(gguf_values(source.recipe, mix), entries, source.jobs)
    write_pieces(path, jobs, threads=settings.threads, progress=settings.progress)


def write_safetensors(
    source: Source,
    folder: Path,
    mix: str,
    tokenizer_file: Callable[[Vocabulary], str],
    settings: WriteSettings = ONE_THREAD,
) -> None:
    """Write a model as a folder of the files that transformers reads, the weights last."""
    quant, dtype = safetensors_type(mix)
    dims = source.recipe.dims
    origins = dict(safetensors_table(dims, quant))
    check_space(folder / "model", checkpoint_bytes(source.recipe, mix, "safetensors"))
    shards = make_shards(list(origins))
    texts = side_files(source.recipe, dtype, tokenizer_file) | index_file(shards)
    for name, text in texts.items():
        write_pieces(folder / name, [text.encode])
    for shard in shards:
        jobs = _shard_jobs(source, shard, origins)
        write_pieces(
            folder / shard.file, jobs, threads=settings.threads, progress=settings.progress
        )


def safetensors_type(mix: str) -> tuple[QuantType, str]:
    """Return the tensor type of a mix and torch's name of it; refuse packed types."""
    if mix not in SAFETENSORS_TYPES:
        known = ", ".join(name.upper() for name in SAFETENSORS_TYPES)
        raise OptionError(
            f"Safetensors do not hold {mix.upper()}.", hint=f"Choose {known}.", param="quant"
        )
    return SAFETENSORS_TYPES[mix]


def side_files(
    recipe: Recipe, dtype: str, tokenizer_file: Callable[[Vocabulary], str]
) -> dict[str, str]:
    """Return the small files beside the weights by their names."""
    vocabulary = make_vocabulary(recipe)
    ids = vocabulary.special_ids
    ends = sorted({ids[name] for name in ("eos", "eot") if name in ids})
    tokens = {
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ends if len(ends) > 1 else ends[0],
        "pad_token_id": ids["padding"],
    }
    if "mask" in ids and recipe.taps:  # a draft, whose input tokens are masks
        tokens["mask_token_id"] = ids["mask"]
    texts = {
        "config.json": config_json(find_family(recipe.family).synthesis, recipe, dtype, tokens),
        "generation_config.json": tokens,
        "tokenizer_config.json": _tokenizer_config(recipe, vocabulary),
    }
    return {
        **{name: json.dumps(text, indent=2) + "\n" for name, text in texts.items()},
        "chat_template.jinja": tokenizer_kind(recipe).template,
        "tokenizer.json": tokenizer_file(vocabulary),
    }


def _tokenizer_config(recipe: Recipe, vocabulary: Vocabulary) -> dict[str, object]:
    ids = vocabulary.special_ids
    named = {
        f"{key}_token": vocabulary.tokens[ids[role]]
        for key, role in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if role in ids
    }
    return {
        "add_bos_token": vocabulary.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.dims.context,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
    }


def _shard_jobs(
    source: Source, shard: Shard, origins: Mapping[TensorEntry, Origin]
) -> Iterator[Job]:
    yield shard.header
    for entry in shard.entries:
        yield from safetensors_jobs(source, entry, origins[entry])
