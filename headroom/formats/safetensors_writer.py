"""Safetensors writer: which tensor lies in which file, their headers, and the index."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from headroom.formats.gguf_writer import TensorEntry
from headroom.formats.quants import BF16, F16, F32
from headroom.formats.safetensors import INDEX_NAME

DTYPE_NAMES = {F32: "F32", F16: "F16", BF16: "BF16"}
MAX_FILE_BYTES = 5 * 10**9  # a larger model is written as several files
HEADER_ALIGNMENT = 8  # bytes; blanks fill a header up


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a model and the tensors in it."""

    file: str
    entries: tuple[TensorEntry, ...]

    def header(self) -> bytes:
        """Return the bytes before the tensors: the header and its length."""
        offset, table = 0, {}
        for entry in self.entries:
            end = offset + prod(entry.shape) * entry.quant.block_bytes
            table[entry.name] = {
                "dtype": DTYPE_NAMES[entry.quant],
                "shape": list(entry.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps({"__metadata__": {"format": "pt"}, **table}).encode()
        text += b" " * (-len(text) % HEADER_ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def make_shards(entries: Sequence[TensorEntry], limit: int = MAX_FILE_BYTES) -> list[Shard]:
    """Return the files that hold all tensors, each within the limit where its tensors allow it."""
    groups: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0]))]
    count = len(groups)
    return [
        Shard(f"model-{i:05d}-of-{count:05d}.safetensors", tuple(group))
        for i, group in enumerate(groups, 1)
    ]


def index_file(shards: Sequence[Shard]) -> dict[str, str]:
    """Return the index of several files by its name; none is needed for one."""
    if len(shards) == 1:
        return {}
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    places = {entry.name: shard.file for shard in shards for entry in shard.entries}
    content = {"metadata": {"total_size": total}, "weight_map": places}
    return {INDEX_NAME: json.dumps(content, indent=2) + "\n"}
