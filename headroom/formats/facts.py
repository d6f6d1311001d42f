"""ModelFacts: what a model's files say about it, for people who choose among models."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from headroom.formats.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a checkpoint is; an empty text or 0 where the files do not say it."""

    path: Path  # the file that was opened
    format: str  # "gguf" or "safetensors"
    architecture: str  # GGUF's name of the family
    title: str  # the name inside the file
    parameters: int
    active_parameters: int  # that one token uses: fewer if experts are routed
    tensor_bytes: int
    types: Mapping[str, int]  # bytes of tensors by type, most first
    trained_context: int  # tokens that the model was made for
    licence: str
    changed: float  # seconds since 1970: when the file was last written
    identity: str  # a digest of headers and samples of weights, equal for equal contents

    @property
    def quant(self) -> str:
        """The type that most of the bytes have."""
        return next(iter(self.types), "")


def model_facts(checkpoint: Checkpoint) -> ModelFacts:
    """Return what a checkpoint's files say about it."""
    tensors = checkpoint.tensors.values()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.stored_type] += tensor.stored_bytes
    parameters = sum(prod(tensor.shape) for tensor in tensors)
    metadata = checkpoint.metadata
    return ModelFacts(
        path=checkpoint.path,
        format=checkpoint.format,
        architecture=checkpoint.architecture,
        title=_text(checkpoint, "general.name"),
        parameters=parameters,
        active_parameters=parameters - _idle_parameters(checkpoint),
        tensor_bytes=sum(sizes.values()),
        types=dict(sizes.most_common()),
        trained_context=metadata.get_int("context_length", 0),
        licence=_text(checkpoint, "general.license") or _text(checkpoint, "hf.license"),
        changed=checkpoint.path.stat().st_mtime,
        identity=checkpoint.identity,
    )


def _text(checkpoint: Checkpoint, key: str) -> str:
    value = checkpoint.metadata.values.get(key)
    return value if isinstance(value, str) else ""


def _idle_parameters(checkpoint: Checkpoint) -> int:
    """Return the parameters of the routed experts that one token does not visit."""
    counts = [checkpoint.metadata.values.get(f"expert_{word}") for word in ("count", "used_count")]
    experts, used = (count if isinstance(count, int) else 0 for count in counts)
    if not 0 < used <= experts:
        return 0
    names = [name for name in checkpoint.tensors if ".experts." in name]
    routed = sum(prod(checkpoint.tensors[name].shape) for name in names)
    return routed - routed * used // experts
