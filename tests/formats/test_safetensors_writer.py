"""Written safetensors, as the `safetensors` package reads them; how tensors are shared by files."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from headroom.formats.gguf_writer import TensorEntry
from headroom.formats.quants import BF16, F16, F32
from headroom.formats.safetensors_writer import Shard, index_file, make_shards


def test_a_file_is_read_back(tmp_path: Path) -> None:
    entries = (
        TensorEntry("a", (3, 5), F32), TensorEntry("b.c", (7,), F16), TensorEntry("d", (2,), BF16),
    )  # fmt: skip
    data = {x.name: np.random.default_rng(0).bytes(x.nbytes) for x in entries}
    shard = Shard("model.safetensors", entries)
    path = tmp_path / shard.file
    path.write_bytes(shard.header() + b"".join(data.values()))
    assert len(shard.header()) % 8 == 0
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(data)
        for entry in entries:
            found = file.get_tensor(entry.name)
            assert tuple(found.shape) == entry.shape
            assert found.view(torch.uint8).numpy().tobytes() == data[entry.name]


SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@given(SIZES, st.integers(4, 120))
def test_files_hold_every_tensor_once_and_stay_within_the_limit(
    sizes: list[int], limit: int
) -> None:
    entries = [TensorEntry(f"t{i}", (size,), F32) for i, size in enumerate(sizes)]
    shards = make_shards(entries, limit)
    assert [entry for shard in shards for entry in shard.entries] == entries
    for shard in shards:
        assert len(shard.entries) == 1 or sum(x.nbytes for x in shard.entries) <= limit
    for shard, after in pairwise(shards):  # a file ends only where the next tensor does not fit
        assert sum(x.nbytes for x in shard.entries) + after.entries[0].nbytes > limit
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert [shard.file for shard in shards] == (names if count > 1 else ["model.safetensors"])


def test_an_index_names_the_file_of_each_tensor() -> None:
    entries = [TensorEntry(name, (8,), F32) for name in "abc"]
    assert index_file(make_shards(entries)) == {}
    shards = make_shards(entries, 64)
    ((name, text),) = index_file(shards).items()
    assert name == "model.safetensors.index.json"
    first, second = (shard.file for shard in shards)
    assert json.loads(text) == {
        "metadata": {"total_size": 96},
        "weight_map": {"a": first, "b": first, "c": second},
    }
