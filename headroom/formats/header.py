"""ModelHeader: what a model's files say without their weights, for plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headroom.errors import FormatError
from headroom.formats.gguf import GgufFile
from headroom.formats.metadata import Metadata, config_architecture, config_values
from headroom.formats.names import Format, canonical_name
from headroom.formats.safetensors import SafetensorsFile
from headroom.formats.tensor import TensorInfo

TIED_BY_DEFAULT = ("gemma4",)  # families whose config.json need not say that the head is tied


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeader:
    """A model's settings and where its tensors lie; no tensors where only settings are known."""

    name: str
    architecture: str  # GGUF's name of the family
    metadata: Metadata
    tensors: Mapping[str, TensorInfo] = field(repr=False)  # by our names, see names.py


def gguf_header(parts: Sequence[GgufFile], path: Path) -> ModelHeader:
    """Return what the parts of a GGUF model say together."""
    values = parts[0].values
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise FormatError(f"{path} has no general.architecture.", hint="It is not a model file.")
    tensors = _by_name([part.tensors for part in parts], architecture, "gguf", path)
    metadata = Metadata(values.without_prefix(f"{architecture}."), path, "head" not in tensors)
    return ModelHeader(
        name=metadata.get_str("general.name", path.stem),
        architecture=architecture,
        metadata=metadata,
        tensors=tensors,
    )


def safetensors_header(
    config: Mapping[str, Any], config_path: Path, parts: Sequence[SafetensorsFile], name: str
) -> ModelHeader:
    """Return what a config.json and the parts of a safetensors model say; there may be none."""
    architecture = config_architecture(config, config_path)
    files = [part.tensors for part in parts]
    tensors = _by_name(files, architecture, "safetensors", config_path)
    values = config_values(config)
    values["general.architecture"] = architecture
    values["general.name"] = name
    tied_if_unsaid = "head" not in tensors if parts else architecture in TIED_BY_DEFAULT
    tied = values.get("hf.tie_word_embeddings", tied_if_unsaid) is True
    return ModelHeader(
        name=name,
        architecture=architecture,
        metadata=Metadata(values, config_path, tied),
        tensors=tensors,
    )


def _by_name(
    files: Sequence[Mapping[str, TensorInfo]], architecture: str, format: Format, path: Path
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for info in (info for file in files for info in file.values()):
        name = canonical_name(info.name, architecture, format)
        if name in tensors:
            raise FormatError(
                f"{path}: {tensors[name].name!r} and {info.name!r} are the same tensor, {name}."
            )
        tensors[name] = info
    return tensors
