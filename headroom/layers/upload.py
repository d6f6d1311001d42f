"""Upload: weights from their files to a device, through pinned buffers that are used in turn."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from headroom.errors import FormatError
from headroom.kernels.cuda.pack import pack, pack_at
from headroom.kernels.cuda.sizes import TILE_ROWS, tile_bytes
from headroom.kernels.weight import PLAIN_TYPES
from headroom.layers.pieces import FileMatrices, Piece, pieces
from headroom.units import MIB

STAGING_BYTES = 128 * MIB  # on the device; more does not load faster
LEAST_STAGING_BYTES = 16 * MIB  # sixteen rows of any real matrix fit into half a slot of it
SLOTS = 4  # half of them are read into while the other half is on its way
SLOT_STEP = 2 * MIB  # what torch rounds large pieces of GPU memory up to
READ_BYTES = 4 * MIB  # that one thread reads at a time
READERS = 8  # enough for a disk's queue; tests/gpu/check_load.py times others

Finish = Callable[[torch.Tensor, torch.Tensor | None], None]  # the buffer, places of its rows


@dataclass(slots=True, eq=False)
class _Slot:
    """A buffer on both sides, and what is on its way through it."""

    host: torch.Tensor  # uint8, pinned where the device is a GPU
    device: torch.Tensor
    # Of its own, so that one piece is copied while another is packed; None where there is no GPU.
    stream: torch.cuda.Stream | None
    sent: torch.cuda.Event | None  # done when both sides are free again
    reads: list[Future[None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class TilesBack:
    """How tiles come back to host memory, which only a GPU's kernels make."""

    rooms: torch.Tensor  # uint8 [SLOTS, bytes] on the device, to pack them in
    places: Sequence[torch.Tensor | None]  # of each matrix in host memory; None: it does not

    def take(
        self, first: int, room: torch.Tensor, part: FileMatrices, piece: Piece, staged: torch.Tensor
    ) -> None:
        """Pack a piece that begins with matrix `first`, and copy what comes back to its place."""
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
    """Brings matrices to one device; those of earlier calls may still be on their way.

    Nothing may be read on the device before `wait`. Used as a context, it gives its buffers back
    at the end, whatever happened.
    """

    def __init__(
        self,
        device: str,
        staging_bytes: int = STAGING_BYTES,
        memory: torch.Tensor | None = None,  # uint8 on the device, lent for the buffers there
    ) -> None:
        self._device = torch.device(device)
        self._gpu = self._device.type == "cuda"
        self._memory = memory
        share = max(staging_bytes, LEAST_STAGING_BYTES) // SLOTS
        self._slot_bytes = share // SLOT_STEP * SLOT_STEP
        self._slots = [self._open_slot(number) for number in range(SLOTS)]
        self._reading: deque[tuple[_Slot, Piece, Finish]] = deque()
        self._turn = 0
        self._addresses: list[torch.Tensor] = []  # that kernels of other streams have yet to read
        self._files: dict[Path, int] = {}
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
            for piece in pieces(part, self._slot_bytes, TILE_ROWS):
                size = tile_bytes(part.quant, piece.rows, part.columns) * piece.matrices
                at = piece.matrix * matrix + piece.row // TILE_ROWS * tile
                self._send(part, piece, partial(_pack, part, piece.rows, room[at : at + size]))
        return out

    def tiles_at(
        self, parts: Sequence[FileMatrices], addresses: torch.Tensor, back: TilesBack | None
    ) -> None:
        """Bring the tiles of matrices to addresses of their own, some of them back to the host.

        `addresses`, int64 `[matrices]` on the device, are 0 for those that go back.
        """
        self._addresses.append(addresses)
        first = 0
        for part in parts:
            for piece in pieces(part, self._capacity(part, back), TILE_ROWS):
                begin, take = first + piece.matrix, None
                where = addresses[begin : begin + piece.matrices]
                if back is not None:  # by the room of the buffer whose turn it is
                    take = partial(back.take, begin, back.rooms[self._turn % SLOTS])
                self._send(part, piece, partial(_spread, part, piece, where, take))
            first += part.count

    def _capacity(self, part: FileMatrices, back: TilesBack | None) -> int:
        """How many bytes of a file go at once, if their tiles must fit into a room."""
        if back is None:
            return self._slot_bytes
        room = back.rooms.shape[1]
        if matrices := room // tile_bytes(part.quant, part.rows, part.columns):
            return min(self._slot_bytes, matrices * part.matrix_bytes)
        tiles = room // tile_bytes(part.quant, TILE_ROWS, part.columns)
        return min(self._slot_bytes, tiles * TILE_ROWS * part.row_bytes)

    def rows(self, source: FileMatrices, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a matrix as its file has it, plain types as floats or, if given, in `dtype`."""
        plain = PLAIN_TYPES.get(source.quant.name)
        wanted = dtype or plain or torch.uint8
        columns = source.columns if plain else source.row_bytes
        out = torch.empty(source.rows, columns, dtype=wanted, device=self._device)
        # Rows in another order are put in order within the buffer, which needs twice the room.
        capacity = self._slot_bytes if source.order is None else self._slot_bytes // 2
        for piece in pieces(source, capacity, 1 if source.order is None else TILE_ROWS):
            room = out[piece.row : piece.row + piece.rows]
            self._send(source, piece, partial(_place, plain or torch.uint8, room))
        return out

    def wait(self) -> None:
        """Return when all that was asked for is on the device."""
        while self._reading:
            self._pass_on()
        self._synchronize()
        self._addresses.clear()

    def _synchronize(self) -> None:
        for slot in self._slots:
            if slot.stream is not None:
                slot.stream.synchronize()

    def _open_slot(self, number: int) -> _Slot:
        size = self._slot_bytes
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._gpu)
        if self._memory is not None and len(self._memory) >= SLOTS * size:
            device = self._memory[number * size : (number + 1) * size]
        else:
            device = torch.empty(size, dtype=torch.uint8, device=self._device)
        if not self._gpu:
            return _Slot(host, device, None, None)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return _Slot(host, device, stream, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def _send(self, source: FileMatrices, piece: Piece, finish: Finish) -> None:
        """Begin to read a piece; it goes on to the device in its turn."""
        slot = self._slots[self._turn % SLOTS]
        self._turn += 1
        if slot.sent is not None:
            slot.sent.synchronize()
        file, at = self._file(source.path), 0
        view = memoryview(slot.host.numpy())  # type: ignore[arg-type]
        for offset, size in piece.runs:
            for begin in range(0, size, READ_BYTES):
                part = view[at + begin : at + min(begin + READ_BYTES, size)]
                read = self._pool.submit(_read, file, part, offset + begin, source)
                slot.reads.append(read)
            at += size
        if piece.order is not None:
            order_bytes = piece.order.view(torch.uint8)
            slot.host[piece.order_at : piece.order_at + len(order_bytes)] = order_bytes
        self._reading.append((slot, piece, finish))
        while len(self._reading) > SLOTS // 2:
            self._pass_on()

    def _pass_on(self) -> None:
        """Send the oldest piece to the device's buffer when it is read, and on to its place."""
        slot, piece, finish = self._reading.popleft()
        for read in slot.reads:
            read.result()
        slot.reads.clear()
        size, order = piece.nbytes, None
        if piece.order is not None:
            size = piece.order_at + piece.order.nbytes
            order = slot.device[piece.order_at : size].view(torch.int32)
        if slot.stream is not None:  # memory that it writes may have had another use there
            slot.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(slot.stream):
            slot.device[:size].copy_(slot.host[:size], non_blocking=True)
            finish(slot.device, order)
            if slot.sent is not None:
                slot.sent.record()

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
        self._slots.clear()
        if self._gpu:
            torch.cuda.empty_cache()
            # Older ones of torch keep pinned memory for later and have no call to give it back.
            give_back = getattr(torch.accelerator, "empty_host_cache", None)
            if give_back is not None:
                give_back()


@contextmanager
def open_upload(
    device: str, staging_bytes: int, memory: torch.Tensor | None = None
) -> Iterator[Upload | None]:
    """Return a way to a GPU with at most so many bytes of buffers there; None for a CPU.

    Memory that is lent there holds the buffers, if it is large enough.
    """
    if not device.startswith("cuda"):
        yield None
        return
    staging = min(staging_bytes, STAGING_BYTES)
    with torch.cuda.device(device), Upload(device, staging, memory) as upload:
        yield upload


def _read(file: int, room: memoryview, offset: int, source: FileMatrices) -> None:
    """Fill a part of a buffer from a file; other threads run meanwhile."""
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


def _spread(
    part: FileMatrices,
    piece: Piece,
    addresses: torch.Tensor,
    back: Callable[[FileMatrices, Piece, torch.Tensor], None] | None,
    staged: torch.Tensor,
    order: torch.Tensor | None,
) -> None:
    first_tile = piece.row // TILE_ROWS
    pack_at(staged, part.quant, piece.rows, part.columns, addresses, first_tile)
    if back is not None:
        back(part, piece, staged)


def _place(
    dtype: torch.dtype, out: torch.Tensor, staged: torch.Tensor, order: torch.Tensor | None
) -> None:
    """Copy rows of a buffer to their place, put in order in its second half where one is given."""
    size, columns, half = out.numel(), out.shape[1], len(staged) // 2
    if order is None:
        out.copy_(staged.view(dtype)[:size].view(out.shape))
        return
    first, second = (part.view(dtype) for part in (staged[:half], staged[half:]))
    ordered = second[:size].view(out.shape)
    whole = first[: len(first) // columns * columns].view(-1, columns)
    out.copy_(torch.index_select(whole, 0, order, out=ordered))
