"""ModelHeader: what is known about a model without its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headroom.formats.metadata import Metadata
from headroom.formats.names import Format
from headroom.formats.tensor import TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHeader:
    """A model's settings and where its tensors lie; without tensors if only settings are known."""

    name: str  # what people call the model, see `read_header.model_title`
    format: Format
    architecture: str  # GGUF's name of the architecture
    metadata: Metadata
    tensors: Mapping[str, TensorInfo] = field(repr=False)  # by our names, see names.py
