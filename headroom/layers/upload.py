"""Upload: weights from their files to a GPU, through pinned buffers that are used in turn.

Matrices are read in pieces that fit into a buffer. Reader threads fill a buffer in host memory, a
CUDA stream copies it to its twin on the GPU, and a kernel there packs the piece into tiles (or a
copy puts its rows) where the weight lies.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import torch

from headroom.errors import FormatError, PlanError
from headroom.formats.quants import QuantType
from headroom.formats.tensor import ComposedTensor
from headroom.kernels.cuda.pack import pack, pack_at
from headroom.kernels.cuda.sizes import TILE_ROWS, tile_bytes
from headroom.kernels.weight import PLAIN_TYPES
from headroom.plan.device_scratch import UPLOAD_BYTES
from headroom.units import MIB, gib

if TYPE_CHECKING:
    from headroom.formats.tensor import Bytes

LEAST_STAGING_BYTES = 16 * MIB  # half a buffer holds TILE_ROWS rows of any real matrix
UPLOAD_BUFFERS = 4  # half of them are being read into while the other half is being copied
BUFFER_STEP = 2 * MIB  # torch rounds large allocations on a GPU up to this
READ_BYTES = 4 * MIB  # of one read by one thread
READERS = 8  # threads; enough for a disk's queue (tests/gpu/check_load.py times other numbers)
INDEX_BYTES = 4  # of one entry of a row order
ORDER_ALIGNMENT = 16  # bytes, of a row order in a buffer


@dataclass(frozen=True, slots=True, eq=False)
class FileMatrices:
    """Matrices of one size that lie in a file, or in a composed tensor, at equal distances."""

    name: str  # of their tensor, as in the file
    path: Path
    quant: QuantType
    rows: int  # of each
    columns: int
    offset: int  # of the first one, bytes from the start of the file or of the composed tensor
    count: int = 1
    apart: int = 0  # bytes from the start of one to the start of the next; 0: no gaps
    # int64 [rows]: which row of the file becomes each row of the result; for a single matrix only
    order: torch.Tensor | None = None
    composed: ComposedTensor | None = None  # computes their bytes; None: they are in the file

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.quant.bytes_for(self.columns)

    @property
    def matrix_bytes(self) -> int:
        """The bytes of one matrix."""
        return self.rows * self.row_bytes


def matrices_between(parts: Sequence[FileMatrices], first: int, end: int) -> list[FileMatrices]:
    """Return the matrices numbered `first` to `end - 1`, counted over all parts."""
    found, passed = [], 0
    for part in parts:
        low, high = max(0, first - passed), min(part.count, end - passed)
        if low < high:
            begin = part.offset + low * (part.apart or part.matrix_bytes)
            found.append(replace(part, offset=begin, count=high - low))
        passed += part.count
    return found


@dataclass(frozen=True, slots=True)
class FileRange:
    """Neighbouring bytes of a file."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class UploadPiece:
    """The part of some matrices that goes through a buffer at once: whole matrices, or rows of one.

    The buffer gets the ranges of the file one after another, then the row order, if there is one.
    """

    matrix: int  # the first one
    row: int  # the first row of the result, in each matrix
    rows: int  # of the result, in each matrix
    ranges: tuple[FileRange, ...]
    matrices: int = 1
    order: torch.Tensor | None = None  # int32 [rows]: which row of the buffer becomes each row

    @property
    def nbytes(self) -> int:
        """The bytes read from the file."""
        return sum(part.nbytes for part in self.ranges)

    @property
    def order_at(self) -> int:
        """The offset of the row order in the buffer."""
        return -(-self.nbytes // ORDER_ALIGNMENT) * ORDER_ALIGNMENT


def split_matrices(source: FileMatrices, capacity: int, unit: int) -> Iterator[UploadPiece]:
    """Yield pieces of at most `capacity` bytes; pieces of one matrix begin at multiples of `unit`.

    `unit` counts rows. Rows in another order are yielded in the order of the result.
    """
    size, row_bytes = source.matrix_bytes, source.row_bytes
    apart = source.apart or size
    if source.order is not None:
        yield from _split_ordered(source, source.order, capacity, unit)
    elif size <= capacity:
        together = capacity // size
        for first in range(0, source.count, together):
            count, at = min(together, source.count - first), source.offset + first * apart
            if apart == size:
                ranges: tuple[FileRange, ...] = (FileRange(at, count * size),)
            else:
                ranges = tuple(FileRange(at + number * apart, size) for number in range(count))
            yield UploadPiece(first, 0, source.rows, ranges, count)
    else:
        step = capacity // row_bytes // unit * unit
        if not step:
            raise _too_small(source, unit * row_bytes, capacity)
        for matrix in range(source.count):
            at = source.offset + matrix * apart
            for row in range(0, source.rows, step):
                rows = min(step, source.rows - row)
                whole = FileRange(at + row * row_bytes, rows * row_bytes)
                yield UploadPiece(matrix, row, rows, (whole,))


def _split_ordered(
    source: FileMatrices, order: torch.Tensor, capacity: int, unit: int
) -> Iterator[UploadPiece]:
    """Yield pieces of a matrix whose rows are reordered.

    A piece reads all rows of the file between its lowest and its highest one, so it has as many
    rows of the result as keep that range within the buffer.
    """
    starts = range(0, len(order), unit)
    lows, highs = (f.reduceat(order.numpy(), starts).tolist() for f in (np.minimum, np.maximum))
    first = 0
    while first < len(starts):
        low, high, end = lows[first], highs[first], first
        while end < len(starts):
            new_low, new_high = min(low, lows[end]), max(high, highs[end])
            if _ordered_bytes(source, new_low, new_high, (end + 1 - first) * unit) > capacity:
                break
            low, high, end = new_low, new_high, end + 1
        if end == first:
            raise _too_small(source, _ordered_bytes(source, low, high, unit), capacity)
        rows = order[first * unit : end * unit]
        part = FileRange(
            source.offset + low * source.row_bytes, (high + 1 - low) * source.row_bytes
        )
        yield UploadPiece(0, first * unit, len(rows), (part,), order=(rows - low).int())
        first = end


def _ordered_bytes(source: FileMatrices, low: int, high: int, rows: int) -> int:
    """Return the bytes of a buffer with rows `low` to `high` of a file and an order of `rows`."""
    return (high + 1 - low) * source.row_bytes + ORDER_ALIGNMENT + rows * INDEX_BYTES


def _too_small(source: FileMatrices, needed: int, capacity: int) -> PlanError:
    return PlanError(
        f"{source.name} goes to its device in pieces of {gib(needed)} or more, "
        f"and the buffers hold {gib(capacity)}.",
        hint="Plan for steps of more rows with a larger --chunk: the buffers are their workspace.",
    )


# Puts a piece that is in a device buffer where its weight lies; given the buffer and the row order.
Finish = Callable[[torch.Tensor, torch.Tensor | None], None]


@dataclass(slots=True, eq=False)
class _StagingBuffer:
    """A buffer in host memory with its twin on the device, and the reads that fill it."""

    host: torch.Tensor  # uint8, pinned where the device is a GPU
    device: torch.Tensor
    # Each buffer has its own, so that one piece is copied while another is packed; None: no GPU.
    stream: torch.cuda.Stream | None
    done: torch.cuda.Event | None  # recorded when the piece has left both sides
    reads: list[Future[None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class HostTiles:
    """Where matrices go that are packed into tiles on the GPU and then copied to host memory."""

    rooms: torch.Tensor  # uint8 [UPLOAD_BUFFERS, bytes] on the device: where tiles are packed
    places: Sequence[torch.Tensor | None]  # by matrix: its tiles in host memory; None: not wanted

    def copy_piece(
        self,
        first: int,
        room: torch.Tensor,
        part: FileMatrices,
        piece: UploadPiece,
        staged: torch.Tensor,
    ) -> None:
        """Pack a piece that begins with matrix `first`, and copy its tiles to their places."""
        wanted = self.places[first : first + piece.matrices]
        if all(place is None for place in wanted):
            return
        size = tile_bytes(part.quant, piece.rows, part.columns)
        tiles = room[: piece.matrices * size]
        pack(staged, part.quant, piece.rows, part.columns, tiles)
        at = piece.row // TILE_ROWS * tile_bytes(part.quant, TILE_ROWS, part.columns)
        for place, matrix in zip(wanted, tiles.view(piece.matrices, size), strict=True):
            if place is not None:
                place[at : at + size].copy_(matrix, non_blocking=True)


class Upload:
    """Loads matrices to one device; copies of earlier calls may still be running.

    Nothing may be read on the device before `wait`. As a context manager it waits at the end, and
    frees its buffers, threads and files even after an error.
    """

    def __init__(
        self,
        device: str,
        staging_bytes: int = UPLOAD_BYTES,
        memory: torch.Tensor | None = None,  # uint8 on the device, lent for the buffers there
    ) -> None:
        self._device = torch.device(device)
        self._gpu = self._device.type == "cuda"
        self._memory = memory
        share = max(staging_bytes, LEAST_STAGING_BYTES) // UPLOAD_BUFFERS
        self._buffer_bytes = share // BUFFER_STEP * BUFFER_STEP
        self._buffers = [self._open_buffer(number) for number in range(UPLOAD_BUFFERS)]
        self._reading: deque[tuple[_StagingBuffer, UploadPiece, Finish]] = deque()
        self._pieces = 0  # sent so far; they use the buffers in turn
        self._addresses: list[torch.Tensor] = []  # kept until kernels on other streams read them
        self._files: dict[Path, int] = {}
        # The tensor whose bytes were computed last: most go to the device in several pieces.
        self._composed: tuple[ComposedTensor, Bytes] | None = None
        self._pool = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), "upload")

    def __enter__(self) -> "Upload":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._close()

    def tiles(self, parts: Sequence[FileMatrices]) -> torch.Tensor:
        """Return the tiles of matrices, one after another in uint8 `[bytes]`."""
        sizes = [part.count * tile_bytes(part.quant, part.rows, part.columns) for part in parts]
        out = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        for part, room in zip(parts, torch.split(out, sizes), strict=True):
            matrix = tile_bytes(part.quant, part.rows, part.columns)
            tile = tile_bytes(part.quant, TILE_ROWS, part.columns)
            for piece in split_matrices(part, self._buffer_bytes, TILE_ROWS):
                size = tile_bytes(part.quant, piece.rows, part.columns) * piece.matrices
                at = piece.matrix * matrix + piece.row // TILE_ROWS * tile
                self._send(part, piece, partial(_pack, part, piece.rows, room[at : at + size]))
        return out

    def tiles_at(
        self, parts: Sequence[FileMatrices], addresses: torch.Tensor, to_host: HostTiles | None
    ) -> None:
        """Write the tiles of each matrix to its own address, or to host memory, or to both.

        `addresses`, int64 `[matrices]` on the device, is 0 for a matrix without tiles there.
        """
        self._addresses.append(addresses)
        first = 0
        for part in parts:
            for piece in split_matrices(part, self._capacity(part, to_host), TILE_ROWS):
                begin, copy = first + piece.matrix, None
                where = addresses[begin : begin + piece.matrices]
                if to_host is not None:  # packs in the room of the buffer that the piece uses
                    copy = partial(
                        to_host.copy_piece, begin, to_host.rooms[self._pieces % UPLOAD_BUFFERS]
                    )
                self._send(part, piece, partial(_pack_at, part, piece, where, copy))
            first += part.count

    def _capacity(self, part: FileMatrices, to_host: HostTiles | None) -> int:
        """Return the most bytes of a piece: its tiles must fit into a room of `to_host`."""
        if to_host is None:
            return self._buffer_bytes
        room = to_host.rooms.shape[1]
        if matrices := room // tile_bytes(part.quant, part.rows, part.columns):
            return min(self._buffer_bytes, matrices * part.matrix_bytes)
        tiles = room // tile_bytes(part.quant, TILE_ROWS, part.columns)
        return min(self._buffer_bytes, tiles * TILE_ROWS * part.row_bytes)

    def rows(self, source: FileMatrices, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a matrix in the layout of its file: floats for plain types, else packed bytes.

        `dtype` converts the floats of a plain type.
        """
        plain = PLAIN_TYPES.get(source.quant.name)
        wanted = dtype or plain or torch.uint8
        columns = source.columns if plain else source.row_bytes
        out = torch.empty(source.rows, columns, dtype=wanted, device=self._device)
        # Rows in another order are put in order within the buffer, which needs twice the room.
        ordered = source.order is not None
        capacity = self._buffer_bytes // 2 if ordered else self._buffer_bytes
        for piece in split_matrices(source, capacity, TILE_ROWS if ordered else 1):
            room = out[piece.row : piece.row + piece.rows]
            self._send(source, piece, partial(_write_rows, plain or torch.uint8, room))
        return out

    def wait(self) -> None:
        """Return when everything that was asked for is on the device."""
        while self._reading:
            self._copy_oldest()
        self._synchronize()
        self._addresses.clear()
        self._composed = None

    def _synchronize(self) -> None:
        for buffer in self._buffers:
            if buffer.stream is not None:
                buffer.stream.synchronize()

    def _open_buffer(self, number: int) -> _StagingBuffer:
        size = self._buffer_bytes
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._gpu)
        if self._memory is not None and len(self._memory) >= UPLOAD_BUFFERS * size:
            device = self._memory[number * size : (number + 1) * size]
        else:
            device = torch.empty(size, dtype=torch.uint8, device=self._device)
        if not self._gpu:
            return _StagingBuffer(host, device, None, None)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return _StagingBuffer(host, device, stream, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def _send(self, source: FileMatrices, piece: UploadPiece, finish: Finish) -> None:
        """Start to read a piece into the next buffer; older pieces go on to the device."""
        buffer = self._buffers[self._pieces % UPLOAD_BUFFERS]
        self._pieces += 1
        if buffer.done is not None:
            buffer.done.synchronize()
        if source.composed is None:
            self._start_reads(source, piece, buffer)
        else:
            held, at = self._compose(source.composed), 0
            for part in piece.ranges:
                here = torch.from_numpy(held[part.offset : part.offset + part.nbytes])
                buffer.host[at : at + part.nbytes] = here
                at += part.nbytes
        if piece.order is not None:
            order_bytes = piece.order.view(torch.uint8)
            buffer.host[piece.order_at : piece.order_at + len(order_bytes)] = order_bytes
        self._reading.append((buffer, piece, finish))
        while len(self._reading) > UPLOAD_BUFFERS // 2:
            self._copy_oldest()

    def _start_reads(
        self, source: FileMatrices, piece: UploadPiece, buffer: _StagingBuffer
    ) -> None:
        file, at = self._file(source.path), 0
        view = memoryview(buffer.host.numpy())  # type: ignore[arg-type]
        for part in piece.ranges:
            for begin in range(0, part.nbytes, READ_BYTES):
                room = view[at + begin : at + min(begin + READ_BYTES, part.nbytes)]
                read = self._pool.submit(_read, file, room, part.offset + begin, source)
                buffer.reads.append(read)
            at += part.nbytes

    def _compose(self, tensor: ComposedTensor) -> "Bytes":
        if self._composed is None or self._composed[0] is not tensor:
            self._composed = None  # free the older one's bytes first
            self._composed = tensor, tensor.data()
        return self._composed[1]

    def _copy_oldest(self) -> None:
        """Wait until the oldest piece is read, then copy it to the device and finish it there."""
        buffer, piece, finish = self._reading.popleft()
        for read in buffer.reads:
            read.result()
        buffer.reads.clear()
        size, order = piece.nbytes, None
        if piece.order is not None:
            size = piece.order_at + piece.order.nbytes
            order = buffer.device[piece.order_at : size].view(torch.int32)
        if buffer.stream is not None:
            # The current stream may still use the memory that this stream is about to write.
            buffer.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(buffer.stream):
            buffer.device[:size].copy_(buffer.host[:size], non_blocking=True)
            finish(buffer.device, order)
            if buffer.done is not None:
                buffer.done.record()

    def _file(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise FormatError(f"Cannot read {path}: {error.strerror}.") from error
        return self._files[path]

    def _close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file)
        self._synchronize()
        self._addresses.clear()
        self._reading.clear()
        self._buffers.clear()
        self._composed = None
        if self._gpu:
            torch.cuda.empty_cache()
            # Older torch keeps freed pinned memory and has no call that returns it to the system.
            empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)
            if empty_host_cache is not None:
                empty_host_cache()


@contextmanager
def open_upload(
    device: str, staging_bytes: int, memory: torch.Tensor | None = None
) -> Iterator[Upload | None]:
    """Yield an upload to a GPU with at most `staging_bytes` of buffers there; None for a CPU.

    The buffers lie in `memory`, uint8 on the GPU, if it is given and large enough.
    """
    if not device.startswith("cuda"):
        yield None
        return
    staging = min(staging_bytes, UPLOAD_BYTES)
    with torch.cuda.device(device), Upload(device, staging, memory) as upload:
        yield upload


def _read(file: int, room: memoryview, offset: int, source: FileMatrices) -> None:
    """Fill a part of a buffer from a file; the read does not hold the interpreter lock."""
    done = 0
    while done < len(room):
        try:
            count = os.preadv(file, [room[done:]], offset + done)
        except OSError as error:
            raise FormatError(
                f"Cannot read {source.name} at byte {offset + done} of {source.path}: "
                f"{error.strerror}."
            ) from error
        if not count:
            raise FormatError(
                f"{source.path} ends at byte {os.fstat(file).st_size}, and {source.name} needs "
                f"bytes up to {offset + len(room)}.",
                hint="The file was cut short after it was opened: fetch it again.",
            )
        done += count


def _pack(
    part: FileMatrices,
    rows: int,
    out: torch.Tensor,
    staged: torch.Tensor,
    order: torch.Tensor | None,
) -> None:
    pack(staged, part.quant, rows, part.columns, out, order)


def _pack_at(
    part: FileMatrices,
    piece: UploadPiece,
    addresses: torch.Tensor,
    copy: Callable[[FileMatrices, UploadPiece, torch.Tensor], None] | None,
    staged: torch.Tensor,
    order: torch.Tensor | None,
) -> None:
    first_tile = piece.row // TILE_ROWS
    pack_at(staged, part.quant, piece.rows, part.columns, addresses, first_tile)
    if copy is not None:
        copy(part, piece, staged)


def _write_rows(
    dtype: torch.dtype, out: torch.Tensor, staged: torch.Tensor, order: torch.Tensor | None
) -> None:
    """Copy the rows in a buffer to `out`; with an order, through the buffer's second half."""
    size, columns, half = out.numel(), out.shape[1], len(staged) // 2
    if order is None:
        out.copy_(staged.view(dtype)[:size].view(out.shape))
        return
    first, second = (part.view(dtype) for part in (staged[:half], staged[half:]))
    ordered = second[:size].view(out.shape)
    whole = first[: len(first) // columns * columns].view(-1, columns)
    out.copy_(torch.index_select(whole, 0, order, out=ordered))
