"""From parsed files to a ModelHeader, whose tensors have one name in both formats."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headroom.errors import FormatError
from headroom.formats.gguf import PART_NAME, GgufFile
from headroom.formats.header import ModelHeader
from headroom.formats.metadata import Metadata, config_architecture, config_values
from headroom.formats.names import Format, Naming, Namings, canonical_name, find_naming
from headroom.formats.quantised import join_quantised
from headroom.formats.safetensors import SafetensorsFile
from headroom.formats.stacks import in_usual_order
from headroom.formats.tensor import TensorInfo


def gguf_header(parts: Sequence[GgufFile], path: Path, namings: Namings) -> ModelHeader:
    """Return the header of a GGUF model from its parsed parts."""
    values = parts[0].values
    written = values.get("general.architecture")
    if not isinstance(written, str) or not written:
        raise FormatError(f"{path} has no general.architecture.", hint="It is not a model file.")
    naming = find_naming(written, namings)
    tensors = _by_name(_all_tensors(parts), naming, "gguf", path)
    metadata = Metadata(values.without_prefix(f"{written}."), path, "head" not in tensors)
    return ModelHeader(
        name=model_title(path),
        format="gguf",
        architecture=naming.architecture,
        metadata=metadata,
        tensors=tensors,
    )


def safetensors_header(
    config: Mapping[str, Any],
    config_path: Path,
    parts: Sequence[SafetensorsFile],
    name: str,
    namings: Namings,
) -> ModelHeader:
    """Return the header of a safetensors model from its config.json and its parsed parts.

    Without parts, the header has settings and no tensors.
    """
    architecture = config_architecture(config, config_path, namings)
    naming = find_naming(architecture, namings)
    stored = _all_tensors(parts)
    values = config_values(config)
    if parts:
        quantisation = values.pop("hf.quantization_config", values.pop("hf.compression_config", {}))
        stored = join_quantised(stored, quantisation, config_path)
    layers = values.get("block_count")
    known = layers if isinstance(layers, int) else 0
    tensors = _by_name(stored, naming, "safetensors", config_path, known)
    values["general.architecture"] = architecture
    values["general.name"] = name
    tied_if_unsaid = "head" not in tensors if parts else naming.tied_by_default
    tied = values.get("hf.tie_word_embeddings", tied_if_unsaid) is True
    return ModelHeader(
        name=name,
        format="safetensors",
        architecture=architecture,
        metadata=Metadata(values, config_path, tied),
        tensors=tensors,
    )


def model_title(path: Path) -> str:
    """Return what people call a model: the name of its GGUF file, or of the folder that it is in.

    The title inside a file is often that of a training run. A folder's own name is not always the
    model's: Hugging Face's cache names folders by revisions, and pulled repositories lie in
    `models/org--repo`.
    """
    if path.suffix not in (".safetensors", ".json"):
        part = PART_NAME.fullmatch(path.name)
        return path.stem if part is None else part["stem"]
    folder = path.absolute().parent
    cache = folder.parent.parent
    if folder.parent.name == "snapshots" and cache.name.startswith("models--"):
        return cache.name.removeprefix("models--").replace("--", "/", 1)
    pulled = folder.parent.name == "models"
    return folder.name.replace("--", "/", 1) if pulled else folder.name


def _all_tensors(parts: Sequence[GgufFile] | Sequence[SafetensorsFile]) -> list[TensorInfo]:
    return [info for part in parts for info in part.tensors.values()]


def _by_name(
    found: Iterable[TensorInfo],
    naming: Naming,
    format: Format,
    path: Path,
    layers: int = 0,
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for info in found:
        name = canonical_name(info.name, naming, format, layers)
        if name in tensors:
            raise FormatError(
                f"{path}: {tensors[name].name!r} and {info.name!r} are the same tensor, {name}."
            )
        tensors[name] = in_usual_order(name, info, naming) if format == "safetensors" else info
    return tensors
