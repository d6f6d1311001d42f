"""How the warps of a GPU share a product of few rows; see matmul.cu."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from headroom.kernels.cuda.matmul_scratch import half_rows_bytes
from headroom.kernels.cuda.sizes import DECODE_ROWS, GROUP_ROWS, RECORD_COLUMNS

SUM_PITCH = 20  # PITCH of matmul.cu
BARRIER_BYTES = 640  # of shared memory that matmul.cu has at fixed places, at most
SMALL_BLOCK_BYTES, LARGE_BLOCK_BYTES = 64 << 10, 227 << 10  # of shared memory, on sm_75 and sm_90
LONG_RECORD = 3072  # bytes; of Q6_K, Q8_0, F16 and BF16
FEW_TILES, SOME_TILES, MANY_TILES = 200, 600, 2000
NEARLY = 1.05  # as many tiles for the busiest processor are as good as the fewest


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU has for blocks."""

    shared_bytes: int = LARGE_BLOCK_BYTES  # that a block may have
    processors: int = 132


@dataclass(frozen=True, slots=True)
class Product:
    """A weight in tiles and the rows that it is multiplied with."""

    tiles: int
    records: int  # of a tile
    record_bytes: int
    rows: int

    @property
    def groups(self) -> int:
        """Groups of eight rows."""
        return -(-self.rows // GROUP_ROWS)


@dataclass(frozen=True, slots=True)
class ProductShape:
    """How warps share a product; sums are taken in an order that follows from `split` alone."""

    split: int  # sums that a tile's columns are cut into
    ways: int  # warps that share a tile's columns: as many, or half of them
    side: int  # warps of a block with tiles of their own
    height: int  # tiles of a warp
    stages: int  # records that a warp has asked for
    shared: int = 0  # records of activations that warps of the same columns ask for together

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.ways * self.side

    @property
    def tiles(self) -> int:
        """Tiles that a block works on at a time."""
        return self.side * self.height

    @property
    def defines(self) -> dict[str, int]:
        """The macros of matmul.cu."""
        return {
            "SPLIT": self.split, "WAYS": self.ways, "SIDE": self.side, "HEIGHT": self.height,
            "STAGES": self.stages, "SHARED": self.shared,
        }  # fmt: skip

    def shared_bytes(self, record: int, groups: int) -> int:
        """Return the shared memory of a block for records of so many bytes."""
        sums = GROUP_ROWS * groups * SUM_PITCH * 4
        pieces = self.ways * self.shared * half_rows_bytes(GROUP_ROWS * groups, RECORD_COLUMNS)
        return self.warps * self.height * (self.stages * record + sums) + pieces

    def fits(self, record: int, groups: int, gpu: Gpu) -> bool:
        """Say whether a block has room for it."""
        return self.shared_bytes(record, groups) <= gpu.shared_bytes - BARRIER_BYTES


def split_for(product: Product, gpu: Gpu) -> int:
    """Return how many sums a tile's columns have: it depends on the weight and the GPU alone."""
    wanted = 16 if product.tiles < FEW_TILES else 8 if product.tiles < SOME_TILES else 4
    most = -(-DECODE_ROWS // GROUP_ROWS)
    while wanted > 1 and (
        wanted > product.records
        or not ProductShape(wanted, wanted, 1, 1, 1).fits(product.record_bytes, most, gpu)
    ):
        wanted //= 2
    return wanted


@cache
def shape_for(product: Product, gpu: Gpu) -> ProductShape:
    """Return how a product's warps share the work.

    Measured 2026-11-15 on an H200, Q4_K and Q6_K. From nine rows on activations are as many bytes
    as weights: there warps with other tiles read them from the same shared memory. On sm_75, whose
    blocks have 64 KiB, a copy is done when it was asked for: a second stage is of no use there.
    """
    split = split_for(product, gpu)
    record, groups = product.record_bytes, product.groups
    if gpu.shared_bytes > SMALL_BLOCK_BYTES:
        if groups > 1 and gpu.shared_bytes >= LARGE_BLOCK_BYTES and split in {4, 8}:
            found = [x for x in _sharing(split, groups) if x.fits(record, groups, gpu)]
            if found:
                least = min(_busiest(product, shape, gpu) for shape in found)
                return next(x for x in found if _busiest(product, x, gpu) <= least * NEARLY)
        for shape in _wanted(product, split):
            if shape.fits(record, groups, gpu):
                return shape
    side = max(1, 8 // split)
    while side > 1 and not ProductShape(split, split, side, 1, 1).fits(record, groups, gpu):
        side //= 2
    return ProductShape(split, split, side, 1, 1)


# Shapes whose warps share activations, the best first: (ways, side, height, shared), for up to 16
# rows and for more, with four sums a tile and with eight.
_SHARING = {
    (4, False): (
        (2, 4, 2, 4),
        (4, 3, 2, 2),
        (4, 2, 2, 2),
        (4, 4, 1, 2),
        (4, 3, 1, 2),
        (4, 2, 1, 2),
    ),
    (4, True): ((2, 4, 2, 2), (2, 6, 1, 3), (4, 3, 1, 2), (2, 4, 1, 2), (4, 2, 1, 2)),
    (8, False): ((4, 3, 1, 3), (4, 3, 1, 2), (4, 4, 1, 2), (4, 2, 1, 2)),
    (8, True): ((4, 3, 1, 2), (4, 4, 1, 2), (4, 2, 1, 2)),
}


def _sharing(split: int, groups: int) -> Iterator[ProductShape]:
    for ways, side, height, shared in _SHARING[split, groups > 2]:
        yield ProductShape(split, ways, side, height, 2, shared)


def _busiest(product: Product, shape: ProductShape, gpu: Gpu) -> int:
    """Tiles that a processor works on at most, with one block at a time."""
    return -(-product.tiles // (shape.tiles * gpu.processors)) * shape.tiles


def _wanted(product: Product, split: int) -> Iterator[ProductShape]:
    """Shapes whose warps read activations for themselves, the best first."""
    long = product.record_bytes > LONG_RECORD
    if split < 4:
        yield ProductShape(split, split, 8 // split, 1, 2)
    elif split > 4:
        if product.rows == 1 and split > 8:
            yield ProductShape(split, split, 1, 1, 4)
        yield ProductShape(split, split, 1, 1, 2)
    elif product.rows == 1:
        if not long:
            yield (
                ProductShape(4, 4, 1, 1, 4)
                if product.tiles >= MANY_TILES
                else ProductShape(4, 4, 1, 2, 2)
            )
        yield ProductShape(4, 4, 2, 1, 2)
    elif product.groups == 1:
        if product.tiles < MANY_TILES:
            yield ProductShape(4, 4, 2, 2, 2)
        yield ProductShape(4, 4, 1, 2 if long else 1, 2)
    else:
        yield ProductShape(4, 4, 2, 1, 2)
    yield ProductShape(split, split, 1, 1, 2)
