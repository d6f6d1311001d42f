"""Draws: how a device draws tokens from the logits of a step, and what it reads for that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from headroom.kernels.cuda.sampler import SamplerScratch, SamplerTables, sample, sample_fast
from headroom.layers.step_timing import part_of_step
from headroom.machine.devices import torch_name

RECENT = 1024  # most tokens that penalties look at on a device; a row with more is the host's
BIASES = 512  # most biased tokens of a row
_DOUBLES = ("temperature", "top_p", "min_p", "frequency")
_WHOLES = ("top_k", "seed", "draw", "position")
_SINGLES = ("repetition", "presence")

Numbers = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawSettings:
    """How all tokens of one request are drawn."""

    temperature: float  # 0 takes the likeliest
    top_k: int  # 0 keeps all
    top_p: float
    min_p: float
    repetition: float  # 1 changes nothing
    frequency: float
    presence: float
    window: int  # last tokens that penalties look at; 0: all
    bias: Mapping[int, float]
    seed: int
    draw: int

    @property
    def penalises(self) -> bool:
        """Whether tokens that came before matter."""
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One token to draw; a device compares both by identity with what it holds already."""

    settings: DrawSettings
    history: Sequence[int]  # prompt and generated; only ever appended to

    @property
    def fits(self) -> bool:
        """Whether a device's tables hold what the draw looks at."""
        settings = self.settings
        if len(settings.bias) > BIASES:
            return False
        seen = len(self.history) if settings.window == 0 else settings.window
        return not settings.penalises or min(seen, len(self.history)) <= RECENT


@dataclass(slots=True)
class _Held:
    """What the tables hold of one row."""

    settings: DrawSettings | None = None
    history: Sequence[int] | None = None
    length: int = 0
    biased: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSampler:
    """Tables, scratch and tokens at fixed places, so that a captured step may end with drawing."""

    tables: SamplerTables
    scratch: SamplerScratch | None  # None where no CUDA GPU draws
    tokens: torch.Tensor  # int64 [rows]: those of the last step
    _host: dict[str, torch.Tensor]  # pinned twins of the tables
    _arrays: dict[str, Numbers]  # the same memory
    _packed: tuple[torch.Tensor, torch.Tensor]  # bytes of all narrow tables: here, there
    _held: list[_Held]
    _copied: "torch.cuda.Event | None"  # the copies of the last filling are done

    @classmethod
    def allocate(cls, rows: int, vocabulary: int, device: str) -> "DeviceSampler":
        """Return a sampler for steps of at most so many rows on a device of the plan."""
        place = torch_name(device)
        here, packed = _tables(rows, "cpu", pin=place != "cpu")
        tables, there = _tables(rows, place)
        cuda = device.startswith("cuda")  # AMD's GPUs draw by torch's own operations
        names = [table.name for table in fields(SamplerTables)]
        host = {name: getattr(here, name) for name in names}
        return cls(
            tables=tables,
            scratch=SamplerScratch.allocate(rows, vocabulary, place) if cuda else None,
            tokens=torch.zeros(rows, dtype=torch.int64, device=place),
            _host=host,
            _arrays={name: table.numpy() for name, table in host.items()},
            _packed=(packed, there),
            _held=[_Held() for _ in range(rows)],
            _copied=copy_event(place),
        )

    @property
    def nbytes(self) -> int:
        """The bytes that it takes on the device."""
        tables = [self.tables.recent, self.tables.bias_ids, self.tables.bias]
        scratch = [] if self.scratch is None else [self.scratch.scores, self.scratch.counts]
        if self.scratch is not None:
            scratch += [self.scratch.best, self.scratch.masses]
        return sum(part.nbytes for part in (*tables, *scratch, self.tokens, self._packed[1]))

    def fill(self, draws: Sequence[tuple[int, Draw]]) -> None:
        """Set the rows that draw, in ascending order; the others take the likeliest token."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copies must have left this memory
        arrays, held = self._arrays, self._held
        recent = biased = at = 0
        for row, draw in draws:
            for idle in range(at, row):
                self._rest(idle)
            at = row + 1
            mine, settings, length = held[row], draw.settings, len(draw.history)
            if mine.settings is not settings or mine.history is not draw.history:
                biased |= self._take(row, draw)
            arrays["position"][row] = length
            if settings.penalises:
                recent = at
                self._remember(row, draw)
            mine.length = length
        for idle in range(at, len(held)):
            self._rest(idle)
        packed, there = self._packed
        there.copy_(packed, non_blocking=True)
        if recent:
            self.tables.recent[:recent].copy_(self._host["recent"][:recent], non_blocking=True)
        if biased:
            self.tables.bias_ids.copy_(self._host["bias_ids"], non_blocking=True)
            self.tables.bias.copy_(self._host["bias"], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    @part_of_step("sampling")
    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw a token for each row of `logits [rows, vocabulary]`, which stay as they are."""
        rows = len(logits)
        tables = _first_rows(self.tables, rows)
        if self.scratch is None:
            return self.tokens[:rows].copy_(sample(logits, tables))
        return sample_fast(logits, tables, self.scratch, self.tokens[:rows])

    def _take(self, row: int, draw: Draw) -> bool:
        """Write the settings of a row's new request; tell whether biases changed."""
        arrays, mine, settings = self._arrays, self._held[row], draw.settings
        for name in (*_DOUBLES, *_SINGLES, "top_k", "seed", "draw"):
            arrays[name][row] = getattr(settings, name)
        mine.settings, mine.history, mine.length = settings, draw.history, 0
        changed = bool(settings.bias) or mine.biased
        if changed:
            count = len(settings.bias)
            arrays["bias_ids"][row] = -1
            arrays["bias_ids"][row, :count] = list(settings.bias)
            arrays["bias"][row, :count] = list(settings.bias.values())
            mine.biased = count > 0
        return changed

    def _remember(self, row: int, draw: Draw) -> None:
        """Write the recent tokens, each at its position modulo the window: order is no matter."""
        window, history, mine = draw.settings.window, draw.history, self._held[row]
        size, length = min(window, RECENT) or RECENT, len(draw.history)
        places = self._arrays["recent"][row]
        if length == mine.length + 1 and mine.length:
            places[mine.length % size] = history[-1]
        elif length != mine.length:
            first = max(0, length - size)
            places[:] = -1
            places[np.arange(first, length) % size] = history[first:length]

    def _rest(self, row: int) -> None:
        """Let a row take the likeliest token, which costs least."""
        mine = self._held[row]
        if mine.settings is not None:
            mine.settings = mine.history = None
            self._arrays["temperature"][row] = 0


def copy_event(device: str) -> "torch.cuda.Event | None":
    """Return an event for copies to or from a device; None for the CPU, where none is awaited."""
    if torch.device(device).type == "cpu":
        return None
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _tables(rows: int, device: str, *, pin: bool = False) -> tuple[SamplerTables, torch.Tensor]:
    """Return tables whose narrow ones lie in one piece of memory, and that piece."""
    plain = SamplerTables.allocate(rows, RECENT, BIASES, device)
    packed = torch.zeros(8 * rows * 9, dtype=torch.uint8, device=device, pin_memory=pin)
    made = {}
    for index, name in enumerate((*_DOUBLES, *_WHOLES, *_SINGLES)):
        start = getattr(plain, name)
        first = 8 * rows * min(index, 8) + 4 * rows * max(0, index - 8)
        view = packed[first : first + start.nbytes].view(start.dtype)
        made[name] = view.copy_(start)
    for name in ("recent", "bias_ids", "bias"):
        wide = getattr(plain, name)
        made[name] = wide.pin_memory() if pin else wide
    return SamplerTables(**made), packed


def _first_rows(tables: SamplerTables, rows: int) -> SamplerTables:
    return SamplerTables(
        **{table.name: getattr(tables, table.name)[:rows] for table in fields(SamplerTables)}
    )
