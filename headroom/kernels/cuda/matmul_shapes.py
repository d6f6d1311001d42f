"""How the warps of a GPU share a product with few rows; see matmul.cu."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from headroom.kernels.cuda.matmul_scratch import half_rows_bytes
from headroom.kernels.cuda.sizes import DECODE_ROWS, GROUP_ROWS, RECORD_COLUMNS

SUM_PITCH = 20  # PITCH of matmul.cu
BARRIER_BYTES = 640  # most static shared memory of matmul.cu
# Dynamic shared memory of a block on sm_75 and on sm_90.
SMALL_BLOCK_BYTES, LARGE_BLOCK_BYTES = 64 << 10, 227 << 10
LONG_RECORD = 3072  # bytes; Q6_K, Q8_0, F16 and BF16 have longer records
FEW_TILES, SOME_TILES, MANY_TILES = 200, 600, 2000
# The first shape is taken whose busiest processor has at most 1.05 x the fewest tiles.
NEARLY = 1.05


@dataclass(frozen=True, slots=True)
class Gpu:
    """The resources of a GPU that shapes depend on."""

    shared_bytes: int = LARGE_BLOCK_BYTES  # most shared memory of a block
    processors: int = 132


@dataclass(frozen=True, slots=True)
class Product:
    """A weight in tiles and the rows that it is multiplied with."""

    tiles: int
    records: int  # records of a tile
    record_bytes: int
    rows: int

    @property
    def groups(self) -> int:
        """The number of groups of eight rows."""
        return -(-self.rows // GROUP_ROWS)


@dataclass(frozen=True, slots=True)
class ProductShape:
    """How warps share a product; the order of sums depends on `split` alone."""

    split: int  # partial sums of a tile's columns
    ways: int  # warps that share a tile's columns: `split`, or half as many
    side: int  # groups of warps in a block, each with its own tiles
    height: int  # tiles of a warp
    stages: int  # records that a warp loads ahead
    # Records of activations in shared memory that warps with the same columns share.
    shared: int = 0

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
        """Return whether a block's shared memory is large enough."""
        return self.shared_bytes(record, groups) <= gpu.shared_bytes - BARRIER_BYTES


def split_for(product: Product, gpu: Gpu) -> int:
    """Return the partial sums of a tile's columns: they depend on the weight and the GPU alone."""
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

    Measured 2026-11-15 on an H200, Q4_K and Q6_K. From nine rows on, activations have as many bytes
    as weights, so warps with different tiles share them in shared memory. On sm_75, whose blocks
    have 64 KiB, copies to shared memory are not asynchronous: a second stage gains nothing.
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


# Shapes whose warps share activations, the best first: (ways, side, height, shared), by (split,
# whether there are more than 16 rows).
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
    """Return the most tiles of any multiprocessor, if each runs one block at a time."""
    return -(-product.tiles // (shape.tiles * gpu.processors)) * shape.tiles


def _wanted(product: Product, split: int) -> Iterator[ProductShape]:
    """Yield shapes whose warps read activations separately, the best first."""
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
