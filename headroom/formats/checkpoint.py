"""Checkpoint: a model on disk, with the same names and keys in both formats."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any

from headroom.errors import FormatError
from headroom.formats.gguf import read_split_gguf
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata
from headroom.formats.names import Format, Namings
from headroom.formats.read_header import gguf_header, model_title, safetensors_header
from headroom.formats.safetensors import find_safetensors, read_json, read_model_files
from headroom.formats.sampling import (
    SamplingDefaults,
    config_sampling,
    fallback_sampling,
    gguf_sampling,
)
from headroom.formats.tensor import TensorInfo, map_file
from headroom.formats.vocabulary import Vocabulary, read_vocabulary

BESIDE_SAFETENSORS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja",
)  # fmt: skip
# Samples of weights that go into a checkpoint's identity: about so many in all, but at least two of
# each file, each of so many bytes. More reads would slow down opening on slow disks.
SAMPLES, LEAST_SAMPLES, SAMPLE_BYTES = 64, 2, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model on disk: its settings, where its tensors lie, and its tokenizer."""

    path: Path  # the file that was opened: a .gguf, .safetensors or index file
    format: Format
    architecture: str  # GGUF's name of the architecture
    metadata: Metadata
    tensors: Mapping[str, TensorInfo] = field(repr=False)  # by our names, see names.py
    vocabulary: Vocabulary | None = field(repr=False)  # of a GGUF file
    tokenizer_file: Path | None  # tokenizer.json beside safetensors
    tokenizer_config: Mapping[str, Any] = field(repr=False)  # {} for GGUF
    chat_template: str | None = field(repr=False)
    sampling: SamplingDefaults  # what the model's files recommend, or what suits its size
    identity: str  # a digest of the contents, equal for equal files at any path

    @property
    def files(self) -> frozenset[Path]:
        """All files that the checkpoint is read from; some beside safetensors may be absent."""
        found = {self.path, *(tensor.path for tensor in self.tensors.values())}
        if self.format == "safetensors":
            found |= {self.path.with_name(name) for name in BESIDE_SAFETENSORS}
        return frozenset(found)

    @property
    def header(self) -> ModelHeader:
        """The part of this checkpoint that a plan needs."""
        return ModelHeader(
            name=model_title(self.path),
            format=self.format,
            architecture=self.architecture,
            metadata=self.metadata,
            tensors=self.tensors,
        )


def open_checkpoint(path: Path, namings: Namings) -> Checkpoint:
    """Open a .gguf file, a .safetensors file or index, or a folder with one of them.

    `namings` give tensors and settings of known architectures their names; callers outside this
    package use `families.files`, which passes those of all families.
    """
    if not path.exists():
        raise FormatError(f"There is no file or folder {path}.")
    if (gguf := gguf_file(path)) is not None:
        return _open_gguf(gguf, namings)
    return _open_safetensors(_main_file(path) if path.is_dir() else path, namings)


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that a path names or that its folder holds; None for safetensors."""
    if path.is_dir():
        path = _main_file(path)
    return None if path.name.endswith((".safetensors", ".json")) else path


def _main_file(folder: Path) -> Path:
    """Return the file of a folder to open: its safetensors, or else its one GGUF model."""
    if any(folder.glob("*.safetensors")):
        return find_safetensors(folder)
    parts = _gguf_models(folder)
    if len(parts) > 1:
        raise FormatError(
            f"{folder} holds {len(parts)} GGUF models: {', '.join(p.name for p in parts[:4])}.",
            hint="Give the path of one of them.",
        )
    return parts[0] if parts else find_safetensors(folder)


def model_files(folder: Path) -> list[Path]:
    """Return the models in a folder and in the folders directly in it, each as a path to open.

    A folder with safetensors is one model. Projectors of pictures (`mmproj`) are left out.
    """
    if any(folder.glob("*.safetensors")):
        return [folder]
    found = [file for file in _gguf_models(folder) if "mmproj" not in file.name.lower()]
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if any(inner.glob("*.safetensors")):
            found.append(inner)
        else:
            found += [file for file in _gguf_models(inner) if "mmproj" not in file.name.lower()]
    return found or [folder]


def _gguf_models(folder: Path) -> list[Path]:
    """Return the GGUF models of a folder, of one in several parts the first part."""
    whole = [file for file in sorted(folder.glob("*.gguf")) if "-of-" not in file.name]
    return whole + sorted(folder.glob("*-00001-of-*.gguf"))


def _open_gguf(path: Path, namings: Namings) -> Checkpoint:
    parts = read_split_gguf(path)
    header = gguf_header(parts, path, namings)
    template = header.metadata.get_str("tokenizer.chat_template", "")
    return Checkpoint(
        path=path,
        format="gguf",
        architecture=header.architecture,
        metadata=header.metadata,
        tensors=header.tensors,
        vocabulary=read_vocabulary(header.metadata),
        tokenizer_file=None,
        tokenizer_config={},
        chat_template=template or None,
        sampling=gguf_sampling(header.metadata, path) or _fallback(header.tensors),
        identity=_identity((part.path, part.header) for part in parts),
    )


def _open_safetensors(path: Path, namings: Namings) -> Checkpoint:
    path = find_safetensors(path)
    config_path = path.with_name("config.json")
    config = read_json(config_path)
    parts = read_model_files(path)
    header = safetensors_header(config, config_path, parts, model_title(path), namings)
    tokenizer_file = path.with_name("tokenizer.json")
    generation_path = path.with_name("generation_config.json")
    generation = read_json(generation_path) if generation_path.is_file() else {}
    tokenizer_config = _tokenizer_config(path.parent, config, generation)
    files = [(config_path, map_file(config_path)), *((part.path, part.header) for part in parts)]
    return Checkpoint(
        path=path,
        format="safetensors",
        architecture=header.architecture,
        metadata=header.metadata,
        tensors=header.tensors,
        vocabulary=None,
        tokenizer_file=tokenizer_file if tokenizer_file.is_file() else None,
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(path.parent, tokenizer_config),
        sampling=config_sampling(generation, generation_path) or _fallback(header.tensors),
        identity=_identity(files),
    )


def open_header(path: Path, namings: Namings) -> ModelHeader:
    """Open what a plan needs of a checkpoint; a config.json without weights will do."""
    config = bare_config(path)
    if config is None:
        return open_checkpoint(path, namings).header
    return safetensors_header(read_json(config), config, (), model_title(config), namings)


def bare_config(path: Path) -> Path | None:
    """Return the config.json that a path names, or its folder holds without weights, or None."""
    if path.is_dir() and (path / "config.json").is_file() and not _has_weights(path):
        return path / "config.json"
    return path if path.name == "config.json" else None


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf"))


def _tokenizer_config(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token) is int for token in listed):
        raise FormatError(f"{folder}: eos_token_id is {short(ids)}, not token numbers.")
    return {**settings, "eos_token_ids": listed}


def _fallback(tensors: Mapping[str, TensorInfo]) -> SamplingDefaults:
    return fallback_sampling(sum(prod(tensor.shape) for tensor in tensors.values()))


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        try:
            return str(map_file(separate), "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{separate} is not UTF-8 text: {error}.") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = [entry for entry in template if isinstance(entry, dict)]
        chosen = [entry for entry in named if entry.get("name") == "default"] or named
        template = chosen[0].get("template") if chosen else None
    return template if isinstance(template, str) and template else None


def _identity(files: Iterable[tuple[Path, memoryview]]) -> str:
    """Return a digest of headers, sizes and samples of weights; all weights would take too long."""
    digest, parts = hashlib.sha256(), list(files)
    samples = max(LEAST_SAMPLES, SAMPLES // len(parts))
    for path, header in parts:
        size = path.stat().st_size
        digest.update(f"{size} {len(header)}\n".encode())
        digest.update(header)
        with path.open("rb") as file:
            for sample in range(samples):
                file.seek(len(header) + (size - len(header)) * sample // samples)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
