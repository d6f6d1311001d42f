"""The parts of a load that are timed do what a load does: every byte is read, into its buffer."""

from pathlib import Path

import numpy as np
import pytest

from tests.gpu import load_parts
from tests.gpu.load_parts import UPLOAD_BUFFERS, Buffers, reader_speeds

SLOT, PIECE = 8192, 1024


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_parts, "BUFFER_BYTES", SLOT)
    monkeypatch.setattr(load_parts, "READ_BYTES", PIECE)


@pytest.mark.parametrize("readers", [1, 3, 12])
@pytest.mark.parametrize("way", ["_shares", "_in_turn"])
def test_each_piece_of_a_file_is_read_once(way: str, readers: int) -> None:
    asked: list[tuple[int, int]] = []
    fill = lambda offset, room: asked.append((offset, len(room)))  # noqa: E731
    getattr(load_parts, way)(fill, 9 * SLOT, readers, Buffers("cpu"))
    assert sorted(asked) == [(offset, PIECE) for offset in range(0, 9 * SLOT, PIECE)]


def test_buffers_hold_the_end_of_the_file(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 9 * SLOT + 77, np.uint8)
    path = tmp_path / "file"
    path.write_bytes(data.tobytes())
    buffers = Buffers("cpu")
    assert list(reader_speeds(path, 2, buffers)) == ["read", "mapped", "in turn"]
    for slot in range(9 - UPLOAD_BUFFERS, 9):
        held = buffers.host[slot % UPLOAD_BUFFERS].numpy()
        assert np.array_equal(held, data[slot * SLOT : (slot + 1) * SLOT])
