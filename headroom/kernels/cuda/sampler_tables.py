"""The memory of a device's sampler: tables of settings, scratch and drawn tokens, without torch.

Each row of a step has a row in every table. A table of one number per row is named as the field of
a request's settings (`SamplingParams`) that fills it, so a new sampling setting is one line of
`SamplerTables` here, besides its declaration in engine/request.py and its arithmetic in
engine/sampler.py, kernels/cuda/sampler.py and kernels/cuda/sampler.cu.
"""

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, Generic, TypeVar

from headroom.kernels.cuda.buffers import Buffer, Buffers, floats

RECENT = 1024  # most tokens that penalties look at on a device; the host draws rows with more
BIASES = 512  # most biased tokens of a row; the host draws rows with more
SLICES = 64  # parts of a row of logits; one block of sampler.cu sums and searches each

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Table:
    """The type of a table, and what it holds for a row that takes the likeliest token."""

    dtype: str
    start: int = 0
    width: int | None = None  # entries of a row; None: one number, not a list


def _table(dtype: str, start: int = 0, width: int | None = None) -> dict[str, Table]:
    return {"table": Table(dtype, start, width)}


@dataclass(frozen=True, slots=True, eq=False)
class SamplerTables(Generic[T]):
    """How each row's token is drawn; `T` is a tensor, or what stands for one without torch."""

    temperature: T = field(metadata=_table("f64"))  # 0 takes the likeliest
    top_p: T = field(metadata=_table("f64", start=1))  # 1 keeps all
    min_p: T = field(metadata=_table("f64"))  # 0 keeps all
    frequency_penalty: T = field(metadata=_table("f64"))
    repetition_penalty: T = field(metadata=_table("f32", start=1))  # 1 changes nothing
    presence_penalty: T = field(metadata=_table("f32"))
    top_k: T = field(metadata=_table("i64"))  # 0 keeps all
    seed: T = field(metadata=_table("i64"))
    draw: T = field(metadata=_table("i64"))  # which of several answers with the same seed
    position: T = field(metadata=_table("i64"))  # tokens before the one that is drawn
    limited: T = field(metadata=_table("i32"))  # 1: drawn on its own, when its mask is known
    # [rows, RECENT]: tokens that penalties look at; -1 is none.
    recent: T = field(metadata=_table("i64", start=-1, width=RECENT))
    # [rows, BIASES]: biased tokens, each once; -1 is none.
    bias_ids: T = field(metadata=_table("i64", start=-1, width=BIASES))
    bias: T = field(metadata=_table("f32", width=BIASES))


def _table_of(declared: "Field[Any]") -> Table:
    table: Table = declared.metadata["table"]
    return table


TABLES = {declared.name: _table_of(declared) for declared in fields(SamplerTables)}
# Tables of one number per row. They lie in one piece of memory that a single copy fills, those of
# larger numbers first, so that all are aligned.
NUMBERS = tuple(
    sorted(
        (name for name, table in TABLES.items() if table.width is None),
        key=lambda name: -Buffer((1,), TABLES[name].dtype).nbytes,
    )
)
# Fields of a request's settings; the other two numbers belong to the draw.
SAMPLER_SETTINGS = tuple(name for name in NUMBERS if name not in ("position", "limited"))
LISTS = tuple(name for name in TABLES if name not in NUMBERS)


def table_buffer(name: str, rows: int) -> Buffer:
    """Return the shape and type of a table for so many rows."""
    table = TABLES[name]
    return Buffer((rows,) if table.width is None else (rows, table.width), table.dtype)


def build_tables(make: Callable[[str], T]) -> SamplerTables[T]:
    """Return the tables that `make` makes by their names."""
    return SamplerTables(**{name: make(name) for name in TABLES})


@dataclass(frozen=True, slots=True)
class ScratchBuffers(Buffers):
    """Memory that sampler.cu works in."""

    scores: Buffer  # float32 [rows, vocabulary]
    counts: Buffer  # int32 [rows, vocabulary]; zeros between calls
    best: Buffer  # int64 [rows, SLICES]
    masses: Buffer  # float64 [rows, SLICES]


def sampler_scratch(rows: int, vocabulary: int) -> ScratchBuffers:
    """Return the scratch for so many rows of logits."""
    return ScratchBuffers(
        floats(rows, vocabulary),
        Buffer((rows, vocabulary), "i32"),
        Buffer((rows, SLICES), "i64"),
        Buffer((rows, SLICES), "f64"),
    )


def mask_words(vocabulary: int) -> int:
    """Return the words of a mask, in which token t is bit t % 32 of word t // 32."""
    return -(-vocabulary // 32)


def token_masks(rows: int, vocabulary: int) -> Buffer:
    """Return the buffer of the masks of rows whose draws are limited."""
    return Buffer((rows, mask_words(vocabulary)), "i32")


def drawn_tokens(rows: int) -> Buffer:
    """Return the buffer of the tokens that a step draws."""
    return Buffer((rows,), "i64")


def numbers_bytes(rows: int) -> int:
    """Return the bytes of all tables of one number per row."""
    return sum(table_buffer(name, rows).nbytes for name in NUMBERS)


def sampler_bytes(rows: int, vocabulary: int) -> int:
    """Return the bytes of a device's sampler: its tables, masks, scratch and drawn tokens."""
    lists = sum(table_buffer(name, rows).nbytes for name in LISTS)
    scratch = sampler_scratch(rows, vocabulary).nbytes
    masks = token_masks(rows, vocabulary).nbytes
    return numbers_bytes(rows) + lists + masks + scratch + drawn_tokens(rows).nbytes
