"""Routing traces: what is written is read again, and a damaged file is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.errors import FormatError
from headroom.experts.traces import trace as traces
from headroom.experts.traces.trace import (
    Ids,
    RoutingTrace,
    TracedLayer,
    check_ids,
    check_shape,
    load_trace,
    save_trace,
)
from headroom.formats.json_files import TRACE_MAGIC

LAYERS = (TracedLayer(1, 5, 2), TracedLayer(4, 300, 3))


def some_ids(tokens: int, layers: tuple[TracedLayer, ...] = LAYERS, seed: int = 0) -> Ids:
    draw = np.random.default_rng(seed)
    rows = [
        np.concatenate([draw.permutation(layer.experts)[: layer.used] for layer in layers])
        for _ in range(tokens)
    ]
    return np.array(rows, dtype=np.uint16)


def some_trace(tokens: int = 7) -> RoutingTrace:
    return RoutingTrace("abc", "two prompts", LAYERS, some_ids(tokens), (0, 3))


@st.composite
def any_trace(draw: st.DrawFn) -> RoutingTrace:
    sizes = draw(st.lists(st.integers(1, 400), min_size=1, max_size=5))
    layers = tuple(
        TracedLayer(2 * number, experts, draw(st.integers(1, min(experts, 6))))
        for number, experts in enumerate(sizes)
    )
    tokens = draw(st.integers(1, 30))
    starts = sorted({0, *draw(st.lists(st.integers(0, tokens - 1), max_size=4))})
    ids = some_ids(tokens, layers, draw(st.integers(0, 9)))
    return RoutingTrace(draw(st.text()), draw(st.text()), layers, ids, tuple(starts))


@given(trace=any_trace())
def test_a_trace_is_read_as_it_was_written(
    trace: RoutingTrace, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("traces") / "x.trace"
    save_trace(path, trace)
    found = load_trace(path)
    assert (found.model, found.source, found.layers, found.starts) == (
        trace.model, trace.source, trace.layers, trace.starts,
    )  # fmt: skip
    assert found.ids.dtype == np.uint16
    assert np.array_equal(found.ids, trace.ids)


def test_the_file_is_magic_a_line_of_json_and_sixteen_bit_ids(tmp_path: Path) -> None:
    path, trace = tmp_path / "x", some_trace()
    save_trace(path, trace)
    magic, header, _ = path.read_bytes().split(b"\n", 2)
    assert magic == b"headroom routing trace"
    assert json.loads(header) == {
        "version": 1,
        "model": "abc",
        "source": "two prompts",
        "tokens": 7,
        "layers": [[1, 5, 2], [4, 300, 3]],
        "starts": [0, 3],
    }
    expected = b"".join(int(id_).to_bytes(2, "little") for row in trace.ids for id_ in row)
    assert path.read_bytes() == magic + b"\n" + header + b"\n" + expected


def test_a_layer_has_its_own_columns_and_sequences_their_own_tokens() -> None:
    trace = some_trace()
    assert np.array_equal(trace.of_layer(0), trace.ids[:, :2])
    assert np.array_equal(trace.of_layer(1), trace.ids[:, 2:])
    assert trace.sequences() == [range(3), range(3, 7)]


def written(path: Path, header: Any, ids: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode() + b"\n"
    path.write_bytes(TRACE_MAGIC + text + ids)
    return path


GOOD = {
    "version": 1,
    "model": "",
    "source": "",
    "tokens": 2,
    "layers": [[0, 4, 2]],
    "starts": [0],
}
IDS = bytes([0, 0, 1, 0, 3, 0, 2, 0])


def test_the_smallest_good_file_is_read(tmp_path: Path) -> None:
    assert load_trace(written(tmp_path / "x", GOOD, IDS)).ids.tolist() == [[0, 1], [3, 2]]


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"{}", "its header does not end"),
        (b"{\n", "its header is not JSON"),
        (b"[" * 100_000 + b"\n", "its header is not JSON"),
        (b"[]\n", "its header is not a JSON object"),
        ({**GOOD, "version": 2}, "its version is 2, and 1 can be read"),
        ({**GOOD, "tokens": 0}, "its header has tokens 0"),
        ({**GOOD, "tokens": True}, "its header has tokens True"),
        ({**GOOD, "tokens": 3}, "its ids take 8 bytes, and its header says 12"),
        ({**GOOD, "tokens": 1}, "its ids take 8 bytes, and its header says 4"),
        ({**GOOD, "tokens": 1 << 40}, "its ids take 4096.00 GiB, and 4.00 GiB can be read"),
        ({**GOOD, "model": 7}, "its header has model 7, not a text"),
        ({**GOOD, "source": None}, "its header has source None, not a text"),
        ({**GOOD, "layers": []}, "its header has no list of layers"),
        ({**GOOD, "layers": [[0, 4, 1]] * 5000}, "its header has no list of layers"),
        ({**GOOD, "layers": [[0, 4]]}, "a layer of its header is not three numbers"),
        ({**GOOD, "layers": [[0, 4, 2.0]]}, "a layer of its header is not three numbers"),
        ({**GOOD, "layers": [[0, 4, 0]]}, "its header has 0 of 4 experts in a layer"),
        ({**GOOD, "layers": [[0, 4, 5]]}, "its header has 5 of 4 experts in a layer"),
        ({**GOOD, "layers": [[0, 1 << 17, 2]]}, "its header has 2 of 131072 experts in a layer"),
        ({**GOOD, "layers": [[-1, 4, 2]]}, "the layers of its header are not in order"),
        ({**GOOD, "layers": [[1, 4, 1], [1, 4, 1]]}, "the layers of its header are not in order"),
        ({**GOOD, "layers": [[0, 3, 2]]}, "layer 0 has 3 experts, and a token chose expert 3"),
        ({**GOOD, "starts": []}, "its header does not say where sequences start"),
        ({**GOOD, "starts": [1]}, "its header does not say where sequences start"),
        ({**GOOD, "starts": [0, 1.0]}, "its header does not say where sequences start"),
        ({**GOOD, "starts": [0, 2]}, "the starts of its sequences are not in order"),
        ({**GOOD, "starts": [0, 1, 1]}, "the starts of its sequences are not in order"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(header: Any, why: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x", header, IDS if isinstance(header, dict) else b"")
    with pytest.raises(FormatError) as refused:
        load_trace(path)
    assert refused.value.message == f"{path} is not a routing trace: {why}."


def test_a_token_that_chose_an_expert_twice_is_refused_wherever_it_is(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="a token chose an expert of layer 0 twice"):
        load_trace(written(tmp_path / "x", GOOD, bytes([0, 0, 1, 0, 2, 0, 2, 0])))
    long = some_trace(traces._CHECKED_TOKENS + 5)
    check_ids(long)
    long.ids[-1, 4] = long.ids[-1, 2]
    with pytest.raises(ValueError, match="layer 4 twice"):
        check_ids(long)


def test_other_files_and_missing_ones_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "m.gguf"
    other.write_bytes(b"GGUF" * 100)
    with pytest.raises(FormatError, match="it does not begin as one"):
        load_trace(other)
    with pytest.raises(FormatError, match="No such file"):
        load_trace(tmp_path / "none")


def test_a_trace_fits_a_model_with_as_many_experts_in_its_layers() -> None:
    trace, path = some_trace(), Path("x.trace")
    check_shape(trace, LAYERS, path)
    check_shape(trace, [replace(layer, layer=layer.layer + 7) for layer in LAYERS], path)
    with pytest.raises(FormatError) as refused:
        check_shape(trace, LAYERS[:1], path)
    assert refused.value.message == (
        "x.trace does not fit the model: it has 2 layers with experts and the model has 1."
    )
    with pytest.raises(FormatError) as refused:
        check_shape(trace, [LAYERS[0], TracedLayer(2, 300, 4)], path)
    assert refused.value.message == (
        "x.trace does not fit the model: it uses 3 of 300 experts in layer 4 and the model "
        "4 of 300 in layer 2."
    )
