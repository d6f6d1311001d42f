"""What people call a model: by its file, or by the folder of its safetensors."""

from pathlib import Path

import pytest

from headroom.formats.checkpoint import open_checkpoint
from headroom.formats.read_header import model_title
from tests.formats.raw_files import STRING, gguf_bytes


@pytest.mark.parametrize(
    ("path", "title"),
    [
        ("/x/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1"),
        ("/x/big-00001-of-00004.gguf", "big"),
        ("/x/blobs/sha256-0a1b", "sha256-0a1b"),
        ("/data/Qwen3-8B/model.safetensors", "Qwen3-8B"),
        ("/data/Qwen3-8B/model.safetensors.index.json", "Qwen3-8B"),
        ("/data/a--b/config.json", "a--b"),
        ("/home/models/Qwen--Qwen3-8B/model.safetensors", "Qwen/Qwen3-8B"),
        ("/hub/models--Qwen--Qwen3-8B/snapshots/0a1b2c/config.json", "Qwen/Qwen3-8B"),
    ],
)
def test_a_model_is_called_by_its_file_or_its_folder(path: str, title: str) -> None:
    assert model_title(Path(path)) == title


def test_the_title_inside_a_file_is_not_its_name(tmp_path: Path) -> None:
    keys = [("general.architecture", STRING, "llama"), ("general.name", STRING, "8k Mix1 Ep2")]
    path = tmp_path / "people-say-this.gguf"
    path.write_bytes(gguf_bytes(keys))
    checkpoint = open_checkpoint(path, {})
    assert checkpoint.header.name == "people-say-this"
    assert checkpoint.metadata.get_str("general.name") == "8k Mix1 Ep2"
