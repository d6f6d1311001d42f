"""What loading is made of, each part by itself: readers, copies and packing, in GB/s."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from headroom.kernels.cuda.pack import pack
from headroom.kernels.cuda.sizes import tile_bytes
from headroom.layers.upload import READ_BYTES, UPLOAD_BUFFERS
from headroom.plan.device_scratch import UPLOAD_BYTES
from tests.gpu.check_matmul import random_weight

BUFFER_BYTES = UPLOAD_BYTES // UPLOAD_BUFFERS
READER_COUNTS = (4, 8, 12, 16)
MOST_BYTES = 8 << 30  # of a file that readers are timed with: a second or less for each figure

Fill = Callable[[int, memoryview], object]  # reads from an offset of the file into a room


class Buffers:
    """The buffers of a load: pinned where the device is a GPU, and used in turn."""

    def __init__(self, device: str) -> None:
        self.gpu = device != "cpu"
        whole = torch.empty(UPLOAD_BUFFERS * BUFFER_BYTES, dtype=torch.uint8, pin_memory=self.gpu)
        whole.zero_()  # its pages are there before anything is timed
        self.host = whole.split(BUFFER_BYTES)
        self.there = [torch.empty_like(part, device=device) for part in self.host]
        self._views = [memoryview(part.numpy()) for part in self.host]

    def room(self, offset: int, size: int) -> memoryview:
        """Where bytes from an offset of the file go."""
        slot, at = divmod(offset, BUFFER_BYTES)
        return self._views[slot % UPLOAD_BUFFERS][at : at + size]


def reader_speeds(path: Path, readers: int, buffers: Buffers) -> dict[str, float]:
    """Return the GB/s at which so many threads fill the buffers from a file in the page cache.

    "read": each reads a share of its own; "mapped": the same, copied from a mapping; "in turn": as
    a load asks for it, by pieces and half of the buffers at a time, with no copies to wait for.
    """
    size = min(path.stat().st_size, MOST_BYTES) // BUFFER_BYTES * BUFFER_BYTES
    file, mapped = os.open(path, os.O_RDONLY), np.memmap(path, np.uint8, "r")

    def read(offset: int, room: memoryview) -> object:
        found = os.preadv(file, [room], offset)
        assert found == len(room), "less than all was read, and the speed would be wrong"
        return found

    def copy(offset: int, room: memoryview) -> object:
        return np.copyto(np.frombuffer(room, np.uint8), mapped[offset : offset + len(room)])

    ways = {
        "read": lambda: _shares(read, size, readers, buffers),
        "mapped": lambda: _shares(copy, size, readers, buffers),
        "in turn": lambda: _in_turn(read, size, readers, buffers),
    }
    try:
        return {name: size / seconds(way) / 1e9 for name, way in ways.items()}
    finally:
        os.close(file)


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for offset in range(begin, end, READ_BYTES):
        yield offset, min(READ_BYTES, end - offset)


def _shares(fill: Fill, size: int, readers: int, buffers: Buffers) -> None:
    """Each thread reads its own part of the file, without synchronisation."""
    slots = size // BUFFER_BYTES
    ends = [slots * number // readers * BUFFER_BYTES for number in range(readers + 1)]

    def share(number: int) -> None:
        # Each thread has its own buffers, one per piece: no two threads write the same memory.
        rooms = UPLOAD_BUFFERS * BUFFER_BYTES // readers // READ_BYTES or 1
        for turn, (offset, count) in enumerate(_pieces(ends[number], ends[number + 1])):
            place = (number * rooms + turn % rooms) * READ_BYTES % (UPLOAD_BUFFERS * BUFFER_BYTES)
            fill(offset, buffers.room(place, count))

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(share, range(readers)))


def _in_turn(fill: Fill, size: int, readers: int, buffers: Buffers) -> None:
    """One thread asks for a buffer's pieces and waits for the oldest one, as a load does."""
    waiting: deque[list[Future[object]]] = deque()
    with ThreadPoolExecutor(readers) as pool:
        for begin in range(0, size, BUFFER_BYTES):
            pieces = _pieces(begin, begin + BUFFER_BYTES)
            waiting.append([pool.submit(fill, at, buffers.room(at, n)) for at, n in pieces])
            while len(waiting) > UPLOAD_BUFFERS // 2:
                for piece in waiting.popleft():
                    piece.result()


def copy_speed(buffers: Buffers, count: int = 200) -> float:
    """Return the GB/s of copies to the device from buffers that are full."""

    def work() -> None:
        for turn in range(count):
            buffers.there[turn % UPLOAD_BUFFERS].copy_(
                buffers.host[turn % UPLOAD_BUFFERS], non_blocking=True
            )

    work()
    return count * BUFFER_BYTES / seconds(work, buffers.gpu) / 1e9


def pack_speed(buffers: Buffers, name: str = "q4_k", count: int = 200) -> float:
    """Return the GB/s, read, at which the device packs what its buffers hold."""
    columns, blocks = 2048, 8
    quant = random_weight(name, 1, columns).quant
    rows = BUFFER_BYTES // (blocks * 144) // 16 * 16
    out = torch.empty(tile_bytes(quant, rows, columns), dtype=torch.uint8)
    out = out.to(buffers.there[0].device)

    def work() -> None:
        for turn in range(count):
            pack(buffers.there[turn % UPLOAD_BUFFERS], quant, rows, columns, out)

    work()
    return count * rows * blocks * 144 / seconds(work, buffers.gpu) / 1e9


def seconds(work: Callable[[], object], gpu: bool = False) -> float:
    """Return the seconds of some work, the device's included."""
    if gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started
