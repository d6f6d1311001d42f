"""RoutingTrace: which experts each token chose in each layer, in the order of the tokens.

Routing statistics say how often an expert is chosen; a trace also says when, which is what a cache
of experts lives on. `headroom profile --trace` records one, `headroom synth-trace` makes one up,
`headroom experts --policies` replays one, and `headroom bench --routing-trace` imposes one.

A file is three parts, one after another: a line of magic, a line of JSON (the header), and the ids,
unsigned 16-bit little-endian: token after token, layer after layer, the best expert first.
"""

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from headroom.errors import FormatError
from headroom.formats.atomic import replacing, write_all
from headroom.formats.json_files import TRACE_MAGIC
from headroom.units import GIB, MIB, gib

VERSION = 1
MOST_BYTES = 4 * GIB  # of the ids in a file
MOST_HEADER_BYTES = 16 * MIB
MOST_LAYERS = 4096
MOST_EXPERTS = 1 << 16  # of a layer: ids have 16 bits
_CHECKED_TOKENS = 1 << 14  # ids are checked in pieces of so many tokens

Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer with routed experts in a trace."""

    layer: int  # its number in the model, from 0
    experts: int
    used: int  # experts that a token visits


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """The choices of some tokens; sequences follow each other."""

    model: str  # identity of the checkpoint; "" if the trace is made up
    source: str  # what it was recorded from, or how it was made, for people
    layers: tuple[TracedLayer, ...]  # ascending
    ids: Ids  # [tokens, sum of `used`]: layer after layer, the best expert first
    starts: tuple[int, ...]  # the first token of each sequence, ascending, the first one 0

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return len(self.ids)

    def of_layer(self, index: int) -> Ids:
        """Return the ids `[tokens, used]` of the traced layer with this index in `layers`."""
        first = sum(layer.used for layer in self.layers[:index])
        return self.ids[:, first : first + self.layers[index].used]

    def sequences(self) -> list[range]:
        """Return the tokens of each sequence."""
        return [
            range(first, end)
            for first, end in zip(self.starts, (*self.starts[1:], self.tokens), strict=True)
        ]


def save_trace(path: Path, trace: RoutingTrace) -> None:
    """Write a trace in one step, so that a reader never sees half a file."""
    header = {
        "version": VERSION,
        "model": trace.model,
        "source": trace.source,
        "tokens": trace.tokens,
        "layers": [[layer.layer, layer.experts, layer.used] for layer in trace.layers],
        "starts": list(trace.starts),
    }
    ids = np.ascontiguousarray(trace.ids, dtype="<u2")
    with replacing(path) as file:
        write_all(file, memoryview(TRACE_MAGIC))
        write_all(file, memoryview(json.dumps(header, separators=(",", ":")).encode() + b"\n"))
        write_all(file, memoryview(ids.tobytes()))


def load_trace(path: Path) -> RoutingTrace:
    """Read a trace and check all of it; a file that is none, or is damaged, is refused."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except OSError as error:
        raise FormatError(
            f"Cannot read {path}: {error.strerror}.", hint="Name a routing trace."
        ) from error
    except ValueError as error:
        raise FormatError(
            f"{path} is not a routing trace: {error}.",
            hint="headroom profile --trace records one, headroom synth-trace makes one.",
        ) from error


def check_shape(trace: RoutingTrace, layers: Sequence[TracedLayer], path: Path) -> None:
    """Refuse a trace that cannot be imposed on a model with these layers.

    Layers with experts are compared in their order, whatever their numbers are.
    """
    if len(trace.layers) != len(layers):
        why = f"it has {len(trace.layers)} layers with experts and the model has {len(layers)}"
    else:
        pairs = zip(layers, trace.layers, strict=True)
        unlike = [
            pair
            for pair in pairs
            if (pair[0].experts, pair[0].used) != (pair[1].experts, pair[1].used)
        ]
        if not unlike:
            return
        own, other = unlike[0]
        why = (
            f"it uses {other.used} of {other.experts} experts in layer {other.layer} and the model "
            f"{own.used} of {own.experts} in layer {own.layer}"
        )
    raise FormatError(
        f"{path} does not fit the model: {why}.",
        hint="headroom synth-trace makes a trace for a model.",
    )


def _read(file: IO[bytes]) -> RoutingTrace:
    if file.read(len(TRACE_MAGIC)) != TRACE_MAGIC:
        raise ValueError("it does not begin as one")
    line = file.readline(MOST_HEADER_BYTES)
    if not line.endswith(b"\n"):
        raise ValueError("its header does not end")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("its header is not JSON") from error
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    if header.get("version") != VERSION:
        raise ValueError(f"its version is {header.get('version')!r}, and {VERSION} can be read")
    layers = _layers(header.get("layers"))
    tokens = _number(header, "tokens", 1)
    width = sum(layer.used for layer in layers)
    size = 2 * tokens * width
    if size > MOST_BYTES:
        raise ValueError(f"its ids take {gib(size)}, and {gib(MOST_BYTES)} can be read")
    left = os.fstat(file.fileno()).st_size - file.tell()
    if left != size:
        raise ValueError(f"its ids take {left} bytes, and its header says {size}")
    ids = np.frombuffer(file.read(size), dtype="<u2").astype(np.uint16, copy=False)
    trace = RoutingTrace(
        model=_text(header, "model"),
        source=_text(header, "source"),
        layers=layers,
        ids=ids.reshape(tokens, width),
        starts=_starts(header.get("starts"), tokens),
    )
    check_ids(trace)
    return trace


def check_ids(trace: RoutingTrace) -> None:
    """Raise a ValueError if a token has an expert that its layer lacks, or one expert twice."""
    for index, layer in enumerate(trace.layers):
        ids = trace.of_layer(index)
        for first in range(0, len(ids), _CHECKED_TOKENS):
            ordered = np.sort(ids[first : first + _CHECKED_TOKENS], axis=1)
            if int(ordered[:, -1].max()) >= layer.experts:
                raise ValueError(
                    f"layer {layer.layer} has {layer.experts} experts, and a token chose "
                    f"expert {int(ordered[:, -1].max())}"
                )
            if (ordered[:, 1:] == ordered[:, :-1]).any():
                raise ValueError(f"a token chose an expert of layer {layer.layer} twice")


def _layers(rows: object) -> tuple[TracedLayer, ...]:
    if not isinstance(rows, list) or not 0 < len(rows) <= MOST_LAYERS:
        raise ValueError("its header has no list of layers")
    layers = []
    for row in rows:
        if not isinstance(row, list) or len(row) != 3 or not all(type(x) is int for x in row):
            raise ValueError("a layer of its header is not three numbers")
        layer = TracedLayer(*row)
        if not 0 < layer.used <= layer.experts <= MOST_EXPERTS:
            raise ValueError(f"its header has {layer.used} of {layer.experts} experts in a layer")
        layers.append(layer)
    numbers = [layer.layer for layer in layers]
    if numbers[0] < 0 or any(b <= a for a, b in itertools.pairwise(numbers)):
        raise ValueError("the layers of its header are not in order")
    return tuple(layers)


def _starts(rows: object, tokens: int) -> tuple[int, ...]:
    if not isinstance(rows, list) or not all(type(x) is int for x in rows) or rows[:1] != [0]:
        raise ValueError("its header does not say where sequences start")
    if any(b <= a for a, b in itertools.pairwise(rows)) or rows[-1] >= tokens:
        raise ValueError("the starts of its sequences are not in order")
    return tuple(rows)


def _number(header: dict[str, Any], name: str, least: int) -> int:
    value = header.get(name)
    if type(value) is not int or value < least:
        raise ValueError(f"its header has {name} {value!r}")
    return value


def _text(header: dict[str, Any], name: str) -> str:
    value = header.get(name)
    if not isinstance(value, str):
        raise ValueError(f"its header has {name} {value!r}, not a text")
    return value
