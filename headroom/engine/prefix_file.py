"""Files of prefixes: one file for each, written at once, and checked block by block when read.

A file begins with `MAGIC` and the version, then come the blocks: one for each page of the prefix,
one for each snapshot, one for the logits after each snapshot that has them, and one for the picks
of experts, if they are known. The head stands at the end, because it has the checksums of the
blocks. It is JSON, followed by its length, its checksum and `MAGIC`.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from headroom.errors import FormatError

MAGIC = b"headroom-prefix\n"
VERSION = 2
SUFFIX = ".prefix"
_BEGIN = struct.Struct("<16sI")
_END = struct.Struct("<II16s")
MOST_HEAD_BYTES = 64 << 20


class DamagedFileError(FormatError):
    """A file is not what was written: cut short, changed, or of another version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHead:
    """What a file says of its prefix."""

    layout: str  # of the caches: only equal ones can take the blocks
    key: str  # a digest of the requests' cache key
    tokens: tuple[int, ...]
    page_size: int
    snapshots: tuple[int, ...]  # after how many tokens each was taken, in the order of their blocks
    logits: tuple[int, ...] = ()  # after how many tokens: those kept, in the order of their blocks
    picks: tuple[int, ...] = ()  # layers and experts of the last block, float32; (): there is none
    sizes: tuple[int, ...] = ()  # bytes of each block
    checksums: tuple[int, ...] = ()  # of each block

    @property
    def pages(self) -> int:
        """How many blocks are pages; the last one may be partly filled."""
        return self.pages_of(len(self.tokens))

    def pages_of(self, tokens: int) -> int:
        """Return how many blocks have the first `tokens` tokens."""
        return -(-tokens // self.page_size)


def write_prefix(path: Path, head: PrefixHead, blocks: Iterable[memoryview]) -> int:
    """Write a file under another name, then rename it; return its bytes.

    Other processes see the whole file or none of it, whenever this one is killed.
    """
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    sizes, checksums = [], []
    try:
        with unfinished.open("wb") as file:
            file.write(_BEGIN.pack(MAGIC, VERSION))
            for block in blocks:
                file.write(block)
                sizes.append(len(block))
                checksums.append(zlib.crc32(block))
            told = asdict(head) | {"sizes": sizes, "checksums": checksums}
            data = json.dumps(told, separators=(",", ":")).encode()
            file.write(data)
            file.write(_END.pack(len(data), zlib.crc32(data), MAGIC))
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return size


def sync_folder(folder: Path) -> None:
    """Let the names in a folder outlast a loss of power."""
    end = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(end)
    finally:
        os.close(end)


def read_head(path: Path) -> PrefixHead:
    """Return the head of a file, or raise an error if it is damaged."""
    with path.open("rb") as file:
        return _read_head(file, path)


def read_blocks(path: Path, head: PrefixHead, wanted: Iterable[int]) -> list[bytes]:
    """Return some blocks of a file, by their numbers; refuse a file that is not `head`'s."""
    starts = [_BEGIN.size]
    for size in head.sizes:
        starts.append(starts[-1] + size)
    found = []
    with path.open("rb") as file:
        if _read_head(file, path) != head:
            raise DamagedFileError(f"{path} is another file than before.")
        for number in wanted:
            file.seek(starts[number])
            block = file.read(head.sizes[number])
            if len(block) != head.sizes[number] or zlib.crc32(block) != head.checksums[number]:
                raise DamagedFileError(f"{path} is damaged: block {number} has a wrong checksum.")
            found.append(block)
    return found


def _read_head(file: BinaryIO, path: Path) -> PrefixHead:
    size = file.seek(0, os.SEEK_END)
    if size < _BEGIN.size + _END.size:
        raise DamagedFileError(f"{path} is damaged: it has {size} bytes.")
    file.seek(0)
    magic, version = _BEGIN.unpack(file.read(_BEGIN.size))
    if (magic, version) != (MAGIC, VERSION):
        raise DamagedFileError(f"{path} is no file of version {VERSION}.")
    file.seek(size - _END.size)
    length, checksum, magic = _END.unpack(file.read(_END.size))
    start = size - _END.size - length
    if magic != MAGIC or length > MOST_HEAD_BYTES or start < _BEGIN.size:
        raise DamagedFileError(f"{path} is damaged: its end is missing.")
    file.seek(start)
    data = file.read(length)
    if zlib.crc32(data) != checksum:
        raise DamagedFileError(f"{path} is damaged: its head has a wrong checksum.")
    head = _parsed(data, path)
    if _BEGIN.size + sum(head.sizes) != start or len(head.sizes) != len(head.checksums):
        raise DamagedFileError(f"{path} is damaged: its blocks have other sizes.")
    blocks = head.pages + len(head.snapshots) + len(head.logits) + bool(head.picks)
    if len(head.sizes) != blocks:
        raise DamagedFileError(f"{path} is damaged: it has {len(head.sizes)} blocks.")
    return head


def _parsed(data: bytes, path: Path) -> PrefixHead:
    try:
        told = json.loads(data)
        values = {field.name: told[field.name] for field in fields(PrefixHead)}
        given: dict[str, Any] = {
            name: tuple(x) if isinstance(x, list) else x for name, x in values.items()
        }
        return PrefixHead(**given)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{path} is damaged: its head cannot be read.") from error
