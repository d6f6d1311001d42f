"""Taps on routers: what is recorded is what was picked, and an imposed trace is obeyed exactly."""

import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from headroom.engine.batching import make_batch
from headroom.engine.engine import Engine
from headroom.engine.request import GenerationRequest, SamplingParams, TokenEvent
from headroom.engine.scheduler import Turn
from headroom.experts.ffn import Router
from headroom.experts.stats import RoutingStats
from headroom.experts.traces.taps import ImposedTrace, TapSite, TraceRecorder, traced_layers
from headroom.experts.traces.trace import Ids, RoutingTrace, TracedLayer, check_ids
from headroom.families.files import open_checkpoint
from headroom.layers.batch import Batch
from headroom.llm import LLM
from headroom.options import Options
from headroom.plan.describe import describe
from tests.families import family_configs
from tests.families.family_gguf import write_gguf
from tests.running import PAGE_SIZE, running
from tests.stand_in.gpu import stand_in_gpu
from tests.stand_in.model import ModelOnGpu, run_spans
from tests.stand_in.stage import VOCAB, TableModel, device_engine, settings
from tests.synth_models import write_model

PROMPTS = [list(range(5, 45)), [7, 7, 3], list(range(100, 40, -3))]
ANSWER = 6  # tokens


@pytest.fixture(scope="module")
def laguna(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("laguna", "q8_0", tmp_path_factory.mktemp("taps"), few_layers=True)


def layers_of(path: Path) -> tuple[TracedLayer, ...]:
    return traced_layers(describe(open_checkpoint(path)).shape)


def open_model(path: Path, tap: TraceRecorder | ImposedTrace, parallel: int = 2) -> LLM:
    options = Options(
        model=str(path), device="cpu", threads=1, context=256, chunk=16, parallel=parallel,
        routing_stats="off",
    )  # fmt: skip
    return LLM(options=options, path=path, tap=tap)


def generate(llm: LLM) -> np.ndarray:
    """Answer the prompts; return the counts of experts, `[layers, experts]`."""
    with llm:
        llm.generate(PROMPTS, llm.sampling(max_tokens=ANSWER, temperature=0.0))
        assert llm.engine.upkeep is not None
        counts = llm.engine.upkeep.history().counts
    most = max(map(len, counts))
    return np.array([[*row, *[0.0] * (most - len(row))] for row in counts])


def counts_of(ids: Ids, layers: tuple[TracedLayer, ...], tokens: list[int]) -> np.ndarray:
    """Count the picks of some tokens of a trace, one by one."""
    counts = np.zeros((1 + layers[-1].layer, max(layer.experts for layer in layers)))
    for token in tokens:
        column = 0
        for layer in layers:
            for expert in ids[token, column : column + layer.used]:
                counts[layer.layer, expert] += 1
            column += layer.used
    return counts


def random_trace(layers: tuple[TracedLayer, ...], tokens: int, seed: int = 0) -> RoutingTrace:
    draw = np.random.default_rng(seed)
    ids = np.array(
        [
            np.concatenate([draw.permutation(layer.experts)[: layer.used] for layer in layers])
            for _ in range(tokens)
        ],
        dtype=np.uint16,
    )
    return RoutingTrace("", "drawn", layers, ids, (0,))


def test_a_recorded_trace_has_every_token_and_every_pick(laguna: Path) -> None:
    recorder = TraceRecorder()
    counts = generate(open_model(laguna, recorder))
    trace = recorder.trace("abc", "three prompts")
    assert trace is not None
    assert (trace.model, trace.source) == ("abc", "three prompts")
    assert trace.layers == layers_of(laguna)
    assert trace.layers[0].layer == 1  # the first layer is dense
    check_ids(trace)
    # The last token of an answer is not read again.
    lengths = sorted(len(tokens) for tokens in trace.sequences())
    assert lengths == sorted(len(prompt) + ANSWER - 1 for prompt in PROMPTS)
    expected = counts_of(trace.ids, trace.layers, list(range(trace.tokens)))
    assert np.array_equal(counts, expected)


def test_sequences_that_run_together_are_recorded_apart_and_best_first(
    laguna: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, alone = TraceRecorder(), TraceRecorder()
    generate(open_model(laguna, together, parallel=3))
    picked: list[torch.Tensor] = []
    plain = Router.__call__

    def call(router: Router, x: torch.Tensor) -> object:
        picks = plain(router, x)
        picked.append(picks.ids.clone())
        return picks

    monkeypatch.setattr(Router, "__call__", call)
    generate(open_model(laguna, alone, parallel=1))
    one, other = together.trace("", ""), alone.trace("", "")
    assert one is not None
    assert other is not None
    found = {one.ids[tokens.start : tokens.stop].tobytes() for tokens in one.sequences()}
    wanted = {other.ids[tokens.start : tokens.stop].tobytes() for tokens in other.sequences()}
    assert found == wanted
    assert len(found) == len(PROMPTS)
    # Alone, the routers were called layer after layer for the rows of one sequence.
    count = len(other.layers)
    rows = [torch.cat(picked[at : at + count], 1) for at in range(0, len(picked), count)]
    assert np.array_equal(torch.cat(rows).numpy(), other.ids)


def test_an_imposed_trace_decides_every_pick_on_a_cpu(laguna: Path) -> None:
    layers = layers_of(laguna)
    trace = random_trace(layers, tokens=31)  # shorter than a prompt
    counts = generate(open_model(laguna, ImposedTrace(trace), parallel=1))
    read = [at % 31 for prompt in PROMPTS for at in range(len(prompt) + ANSWER - 1)]
    assert np.array_equal(counts, counts_of(trace.ids, layers, read))


def test_weights_stay_those_of_the_router(laguna: Path) -> None:
    plain, imposed = TraceRecorder(), random_trace(layers_of(laguna), 5)
    seen: list[torch.Tensor] = []
    for tap in (plain, ImposedTrace(imposed)):
        llm = open_model(laguna, tap)
        with llm:
            model = llm.engine._pipeline._stages[0]._model  # type: ignore[attr-defined]
            block = model._blocks[1]
            x = torch.randn(3, llm.hidden_size, generator=torch.Generator().manual_seed(1))
            if isinstance(tap, ImposedTrace):
                model.tap.begin_step(rows_of([(0, 3)]))
            picks = block._ffn._router(x)
            seen.append(picks.weights)
            if isinstance(tap, ImposedTrace):
                assert picks.ids.tolist() == imposed.of_layer(0)[:3].tolist()
    assert torch.equal(*seen)


def rows_of(spans: list[tuple[int, int]]) -> Batch:
    """Return a batch of sequences with so many tokens before and so many rows each."""
    turns = []
    for slot, (before, rows) in enumerate(spans):
        sequence = running([0] * (before + rows), [slot], state_slot=slot)
        sequence.cached = before
        turns.append(Turn(sequence, rows))
    return make_batch(turns, PAGE_SIZE)


def test_each_sequence_begins_at_another_token_of_the_trace() -> None:
    layers = (TracedLayer(0, 8, 2), TracedLayer(1, 9, 3))
    trace, stats = random_trace(layers, 12), RoutingStats(2, 9, "cpu")
    tap = ImposedTrace(trace).open(TapSite(layers, stats, "cpu", rows=64, sequences=4))
    tap.begin_step(rows_of([(0, 2), (10, 1), (1, 2)]))
    tokens = [0, 1, (10 + 3) % 12, 1 + 6, 2 + 6]  # 12 tokens and 4 sequences: 3 tokens apart
    for index, layer in enumerate(layers):
        own = torch.zeros(5, layer.used, dtype=torch.int32)
        found = tap.of_layer(layer.layer)(own)
        assert found.dtype == torch.int32
        assert found.is_contiguous()
        assert found.tolist() == trace.of_layer(index)[tokens].tolist()
    assert np.array_equal(stats.counts().numpy(), counts_of(trace.ids, layers, tokens))


def test_a_moved_trace_begins_at_a_later_token() -> None:
    layers = (TracedLayer(0, 8, 2),)
    trace = random_trace(layers, 12)
    whole = ImposedTrace(trace)
    tap = whole.open(TapSite(layers, RoutingStats(1, 8, "cpu"), "cpu", rows=64, sequences=2))
    for moved in (5, 5 + 9):
        whole.move(5 if moved == 5 else 9)
        tap.begin_step(rows_of([(0, 2), (3, 1)]))
        tokens = [(moved + at) % 12 for at in (0, 1, 6 + 3)]
        found = tap.of_layer(0)(torch.zeros(3, 2, dtype=torch.int32))
        assert found.tolist() == trace.of_layer(0)[tokens].tolist()


MODELS: dict[str, Callable[[], object]] = {
    "qwen3moe": lambda: family_configs.qwen3_moe(
        hidden_size=256, num_attention_heads=8, head_dim=64, moe_intermediate_size=96
    ),
    "gemma4": lambda: family_configs.gemma4_moe(hidden_size=256),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_cuda_kernels_obey_an_imposed_trace(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(MODELS[name](), path, "MIXED", fused=False, unused_keys=False)  # type: ignore[arg-type]
    layers = layers_of(path)
    trace = random_trace(layers, 17)
    given = {"context": 512, "parallel": 3, "chunk": 100, "dtype": "bf16", "kv_type": None}
    with stand_in_gpu(monkeypatch, computes=False) as gpu:
        model = ModelOnGpu(open_checkpoint(path), tap=ImposedTrace(trace), **given)
        run_spans(model, [(40, 0)])
        run_spans(model, [(2, 10), (1, 11)])
        routing = model.model.routing
        assert routing is not None
        counts, decode = (found.numpy() for found in routing.counts_with_decode())
        assert "route" in gpu.kernels  # the top-k runs apart, since a fused one hides its picks
    apart = 17 // 3
    few = [10, 11, (11 + apart) % 17]
    assert np.array_equal(decode, counts_of(trace.ids, layers, few))
    rows = [at % 17 for at in range(40)]
    assert np.array_equal(counts, counts_of(trace.ids, layers, rows + few))


class RoutedTable(TableModel):
    """A model without arithmetic whose two layers pick experts by a row's token."""

    def __init__(self, tap: TraceRecorder | ImposedTrace, site: TapSite) -> None:
        super().__init__()
        self.routing = site.routing  # type: ignore[assignment]
        self.tap = tap.open(site)  # type: ignore[assignment]
        self.used = torch.zeros(2, 4096, 2, dtype=torch.int32, device=site.device)

    def run(self, batch: Batch) -> torch.Tensor:
        """Let the tap see a step as the layers of a model do."""
        self.tap.begin_step(batch)
        for layer in (0, 1):
            first = (batch.tokens + layer) % 5
            ids = torch.stack((first, first + 1), 1).int()
            picks = self.tap.of_layer(layer)(ids)
            self.used[layer, : len(ids)].copy_(picks)
        return super().run(batch)


def open_site() -> TapSite:
    layers = (TracedLayer(0, 6, 2), TracedLayer(1, 6, 2))
    return TapSite(layers, RoutingStats(2, 6, "cuda"), "cuda", rows=64, sequences=4)


def finished(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Run prompts through an engine; return the tokens of prompts and answers."""
    texts = [list(prompt) for prompt in prompts]
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def hear(event: TokenEvent, text: list[int]) -> None:
        if event.token is not None:
            text.append(event.token)
        if event.finish_reason is not None:
            ended.put(event.finish_reason)

    params = SamplingParams(max_tokens=ANSWER, temperature=0.0)
    for text in texts:
        request = GenerationRequest(
            id=str(text), prompt=tuple(text), params=params, stop_ids=frozenset()
        )
        engine.submit(request, partial(hear, text=text))
    assert [ended.get(timeout=60) for _ in texts] == ["length"] * len(texts)
    engine.close()
    return texts


def test_captured_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TraceRecorder()
    with stand_in_gpu(monkeypatch):
        engine, _ = device_engine(RoutedTable(recorder, open_site()), settings())
        texts = finished(engine, [[9, 8, 7], list(range(1, 61))])
        trace = recorder.trace("", "")
    assert trace is not None
    found = [trace.ids[tokens.start : tokens.stop].tolist() for tokens in trace.sequences()]
    for text in texts:
        wanted = [[t % 5, t % 5 + 1, (t + 1) % 5, (t + 1) % 5 + 1] for t in text]
        # An engine may compute a row for the last token before it knows that the answer has ended.
        assert any(rows == wanted[: len(rows)] and len(rows) >= len(text) - 1 for rows in found)
    assert max(max(text) for text in texts) < VOCAB


def test_captured_steps_obey_an_imposed_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in_gpu(monkeypatch):
        site = open_site()
        trace = random_trace(site.layers, 16)
        model = RoutedTable(ImposedTrace(trace), site)
        engine, stage = device_engine(model, settings())
        captured = len(stage.kinds)
        model.tap.move(5)  # type: ignore[attr-defined]  # captured steps read it
        text = finished(engine, [[9, 8, 7]])[0]
        assert captured > 0
        counts = site.routing.counts().numpy()
        # The last step was captured before: its one row is used, the others are padding.
        last = model.used[:, 0].cpu().numpy()
        steps = int(counts[0].sum()) // 2
    assert steps >= len(text) - 1
    rows = [(at + 5) % 16 for at in range(steps)]
    assert np.array_equal(counts, counts_of(trace.ids, site.layers, rows))
    assert last.reshape(-1).tolist() == trace.ids[rows[-1]].tolist()


@pytest.mark.parametrize("first", [1, 2])
def test_stages_record_and_obey_the_parts_of_one_trace(first: int) -> None:
    layers = tuple(TracedLayer(number, 8, used) for number, used in ((0, 2), (2, 3), (3, 2)))
    trace, recorder = random_trace(layers, 12), TraceRecorder()
    imposed = ImposedTrace(trace)
    batch = rows_of([(0, 5), (0, 7)])
    for own in (layers[:first], layers[first:]):  # the stages of a model, in their order
        stats = RoutingStats(4, 8, "cpu")
        site = TapSite(own, stats, "cpu", rows=64, sequences=2)
        obeyed, recorded = imposed.open(site), recorder.open(site)
        obeyed.begin_step(batch)
        for layer in own:
            ids = torch.zeros(12, layer.used, dtype=torch.int32)
            recorded.of_layer(layer.layer)(obeyed.of_layer(layer.layer)(ids))
        recorded.end_step(batch)
        assert stats.counts().sum(1).nonzero().flatten().tolist() == [x.layer for x in own]
    found = recorder.trace("", "")
    assert found is not None
    assert found.layers == layers
    rows = [*range(5), *((6 + row) % 12 for row in range(7))]  # the sequences begin 6 tokens apart
    assert np.array_equal(found.ids, trace.ids[rows])
    assert found.starts == (0, 5)
