"""Layers with cold experts compute what all-hot ones compute, on every path."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headroom.errors import DeviceError
from headroom.experts import cache, prefill
from headroom.experts.cache import CacheModel
from headroom.experts.cold import ColdExperts, LayerPaths, StoredLayer, prompt_ends
from headroom.experts.cuda_ffn import load_paths
from headroom.experts.placement import ExpertPlacement
from headroom.experts.store import StoreRequest, blob_layout, open_store
from headroom.experts.telemetry import HitCounter, cache_totals
from headroom.experts.traces.replay import ReplaySettings, replay
from headroom.experts.traces.synth_trace import PRESETS, synth_trace
from headroom.experts.traces.trace import TracedLayer
from headroom.families.config import ExpertsConfig
from headroom.kernels.cuda import experts, experts_scratch, grouped
from headroom.kernels.cuda.expert_cache import COUNTERS
from headroom.kernels.cuda.experts import Addends
from headroom.kernels.cuda.matmul import half_rows
from headroom.kernels.native.module import MODULE
from headroom.kernels.ops import Picks
from headroom.layers import host_memory, upload
from headroom.layers.batch import Batch, Span
from headroom.layers.upload import Upload
from headroom.layers.weights import WeightSource
from headroom.plan import cost_model
from headroom.plan.cost_model import ColdSpeeds
from tests.experts.stores import exchange
from tests.gpu.weight_file import WeightFile
from tests.stand_in.cuda_on_cpu import COMPILER
from tests.stand_in.gpu import stand_in_gpu

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(MODULE is None, reason="the C++ module was not built"),
]
EXPERTS, USED, WIDTH, HIDDEN = 6, 3, 64, 256
CONFIG = ExpertsConfig(experts=EXPERTS, used=USED, width=WIDTH)
# Both sides are worth asking: of three cold picks of a row the GPU reads one.
SPEEDS = ColdSpeeds(gpu=1e12, link=1e10, cpu=2e10, handover_s=12e-6, copy=1e10, cpu_flops=1e12)
HOT = {0: (), 30: (1, 4), 60: (0, 1, 2, 5)}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(upload, "BUFFER_STEP", 32)
    # Hot experts are unpacked as cold ones are.
    monkeypatch.setattr(experts_scratch, "SORTED_PICKS", 0)
    monkeypatch.setattr(grouped, "product_way", lambda device: "loop")
    monkeypatch.setattr(cost_model, "PREFILL_HANDOVER_S", 0.0)
    with stand_in_gpu(monkeypatch):
        yield


@pytest.fixture
def file(tmp_path: Path) -> WeightFile:
    return weight_file(tmp_path, "q4_0", "q8_0")


def weight_file(folder: Path, kind: str, down: str) -> WeightFile:
    """A layer's experts, whose gates and ups are of one type."""
    made = WeightFile(folder / "weights")
    for name in ("gate", "up"):
        made.add(f"ffn.experts.{name}", kind, EXPERTS, WIDTH, HIDDEN)
    made.add("ffn.experts.down", down, EXPERTS, HIDDEN, WIDTH)
    return made


class Layer:
    """A layer's experts, all hot or some of them cold."""

    def __init__(
        self, file: WeightFile, hot: Sequence[int] | None, cold: str = "auto", **changes: object
    ) -> None:
        self.cold_experts: ColdExperts | None = None
        with Upload("cuda:0", 1 << 20) as way:
            get = file.source(way)
            stored = None if hot is None else self._open(get, tuple(hot), cold, changes)
            self.paths: LayerPaths = load_paths(CONFIG, get, stored)
        self.worker = None if self.cold_experts is None else self.cold_experts.start()

    def _open(
        self, get: WeightSource, hot: tuple[int, ...], cold: str, changes: dict[str, object]
    ) -> StoredLayer | None:
        speeds = replace(SPEEDS, **changes.pop("speeds", {}))  # type: ignore[arg-type]
        request = StoreRequest(
            placement=ExpertPlacement((hot,), "drawn", changes.pop("promised", ())),  # type: ignore[arg-type]
            cold=cold,
            speeds=speeds,
            staging_bytes=1 << 20,
            **{"pin": True, "keep_copy": False} | changes,  # type: ignore[arg-type]
        )
        store = open_store([blob_layout(CONFIG, get, tiles=True)], request, "cuda:0", _ignore)
        self.cold_experts = ColdExperts(store, "cuda:0", speeds, cold)
        assert store.layers[0] is not None
        self.store = store.layers[0]
        return self.cold_experts.layer(0)

    def run(self, x: torch.Tensor, picks: Picks) -> torch.Tensor:
        """A step as a layer runs it."""
        picks = Picks(*(one.clone() for one in picks))
        out, addends = x.clone(), Addends(residual=x)
        if len(x) > 32:
            if self.cold_experts is not None:
                self.cold_experts.store.take_places()
            return self.paths.gpu.prefill(x, picks, addends, out)
        resolver = self.paths.resolver
        if self.worker is not None:
            self.worker.begin_step()
        if resolver is not None:
            picks = resolver.resolve(x if resolver.asks_cpu else None, picks)
        self.paths.gpu.decode(half_rows(x), picks, addends, out)
        if resolver is not None:
            resolver.add_answers(out)
        return out


def _ignore(line: str, size: int) -> None: ...


def inputs(rows: int) -> tuple[torch.Tensor, Picks]:
    ids = torch.stack([torch.randperm(EXPERTS)[:USED] for _ in range(rows)]).int()
    x, weights = torch.randn(rows, HIDDEN), torch.rand(rows, USED)
    return x.to("cuda"), Picks(ids.to("cuda"), weights.to("cuda"))


def apart(found: torch.Tensor, wanted: torch.Tensor, x: torch.Tensor) -> float:
    """How far the experts' sums are from each other, in parts of their size."""
    return float((found - wanted).norm() / (wanted - x).norm())


@pytest.mark.parametrize(
    ("share", "cold", "changes"),
    [
        *((share, cold, {}) for share in HOT for cold in ("gpu", "cpu", "auto")),  # auto: shared
        (30, "auto", {"pin": False}),
        (30, "auto", {"keep_copy": True}),
        (30, "auto", {"speeds": {"cpu": 0.0}}),  # no C++ kernels
    ],
)
def test_all_paths_compute_what_hot_experts_compute(
    file: WeightFile, share: int, cold: str, changes: dict[str, object]
) -> None:
    check_paths(file, share, cold, changes)


@pytest.mark.parametrize(
    ("kind", "down", "cold"),
    [
        *(("bf16", "bf16", cold) for cold in ("gpu", "cpu", "auto")),
        *(("f16", "bf16", "auto"), ("q4_0", "f16", "gpu")),
    ],
)
def test_plain_experts_take_all_paths_too(tmp_path: Path, kind: str, down: str, cold: str) -> None:
    check_paths(weight_file(tmp_path, kind, down), 30, cold, {})


def check_paths(file: WeightFile, share: int, cold: str, changes: dict[str, object]) -> None:
    """Assert that a layer with cold experts says what one says whose experts are all hot."""
    wanted, found = Layer(file, None), Layer(file, HOT[share], cold, **changes)
    alone = cold == "gpu" or "speeds" in changes
    assert found.cold_experts is not None
    assert (found.paths.resolver is None, found.cold_experts.same_bits) == (alone, alone)
    for rows in (2, 33):
        x, picks = inputs(rows)
        answers = found.run(x, picks), wanted.run(x, picks)
        if alone:
            assert torch.equal(*answers)
        else:  # a CPU computes in f32, the GPU's kernels in f16 and bf16
            assert apart(*answers, x) < 0.01
    if found.worker is not None:
        found.worker.check()
        found.worker.close()


@pytest.mark.parametrize("policy", ["static", "lru", "spare", "counts", "auto"])
@pytest.mark.parametrize("cold", ["gpu", "auto"])
@pytest.mark.parametrize("kind", ["q4_0", "bf16"])
def test_slots_that_change_hands_within_steps_change_no_answer(
    tmp_path: Path, policy: str, cold: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LEAST_TOKENS", 1)  # so few slots that a cache thrashes
    file = weight_file(tmp_path, kind, "q8_0")
    wanted = Layer(file, None)
    found = Layer(file, (1, 2, 4), cold, keep_copy=True, policy=policy)
    assert found.store.is_cached == (policy != "static")
    residents = set()
    for rows in (1, 1, 2, 1, 33, 1, 3, 1, 1, 5, 40, 1, 2):
        x, picks = inputs(rows)
        answers = found.run(x, picks), wanted.run(x, picks)
        if cold == "gpu":
            assert torch.equal(*answers)
        else:
            assert apart(*answers, x) < 0.01
        assert found.cold_experts is not None
        residents.add(found.cold_experts.store.current_placement().hot[0])
        for expert in range(EXPERTS):  # every expert is whole where the table says that it is
            slot, row = found.store.slot_of(expert), found.store.cold_of(expert)
            assert row is not None
            assert (slot is not None) == (expert in found.store.hot)
            assert slot is None or torch.equal(slot.cpu(), row.cpu())
    if cold == "gpu":  # with "auto", so few misses are the CPU's
        assert (len(residents) > 1) == (policy != "static")
    if found.worker is not None:
        found.worker.check()
        found.worker.close()


def test_a_step_that_fails_before_a_slot_is_filled_is_repaired(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LEAST_TOKENS", 1)
    found, wanted = Layer(file, (1, 2, 4), "gpu", keep_copy=True, policy="lru"), Layer(file, None)
    x, (_, weights) = inputs(1)
    picks = Picks(torch.tensor([[0, 3, 5]], dtype=torch.int32).to("cuda"), weights)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(experts, "few_rows", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            found.run(x, picks)
    assert found.cold_experts is not None
    found.cold_experts.store.repair()
    assert found.store.hot == (0, 3, 5)
    assert torch.equal(found.run(x, picks), wanted.run(x, picks))
    for expert in found.store.hot:
        slot, row = found.store.slot_of(expert), found.store.cold_of(expert)
        assert slot is not None
        assert row is not None
        assert torch.equal(slot.cpu(), row.cpu())


@pytest.mark.parametrize("policy", ["lru", "spare", "counts"])
@pytest.mark.parametrize("sequences", [1, 4])
def test_the_simulator_counts_what_the_layer_counts(
    file: WeightFile, policy: str, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LEAST_TOKENS", 1)
    layers = [TracedLayer(0, EXPERTS, USED)]
    trace = synth_trace(layers, PRESETS["qwen3-30b-a3b"].model, tokens=80, sequences=4)
    simulated = replay(trace, [[1, 2, 4]], ReplaySettings(policy, sequences))  # type: ignore[arg-type]
    layer = Layer(file, (1, 2, 4), "gpu", keep_copy=True, policy=policy)
    steps = trace.tokens // sequences
    for step in range(steps):
        rows = [row * steps + step for row in range(sequences)]
        ids = torch.from_numpy(trace.ids[rows].astype("int32"))
        x, weights = torch.randn(sequences, HIDDEN), torch.rand(ids.shape)
        layer.run(x.to("cuda"), Picks(ids.to("cuda"), weights.to("cuda")))
    assert layer.cold_experts is not None
    counts = layer.cold_experts.store.cache_counts.cpu()[0].tolist()
    assert counts == [getattr(simulated.counts[0], name) for name in COUNTERS]


@pytest.mark.parametrize(
    ("slots", "changes"),
    [
        (3, {"keep_copy": False}),  # host memory does not hold the experts in slots
        (3, {"pin": False}),  # the GPU cannot read host memory
        (3, {"cold": "cpu"}),  # nothing crosses the link
        (2, {}),  # fewer slots than a token's experts
    ],
)
def test_slots_change_hands_only_where_that_can_help(
    file: WeightFile, slots: int, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LEAST_TOKENS", 1)
    given = {"cold": "auto", "keep_copy": True, "policy": "auto"} | changes
    layer = Layer(file, range(slots), **given)  # type: ignore[arg-type]
    assert not layer.store.is_cached
    if layer.worker is not None:
        layer.worker.close()


def test_a_policy_that_was_named_is_refused_where_the_driver_pins_nothing(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LEAST_TOKENS", 1)
    monkeypatch.setattr(host_memory, "lock_pages", lambda *given: "out of memory")
    with pytest.raises(DeviceError, match="--expert-policy lru cannot be had: the GPU's driver"):
        Layer(file, (1, 2, 4), keep_copy=True, policy="lru")
    layer = Layer(file, (1, 2, 4), keep_copy=True, policy="auto")
    assert not layer.store.is_cached
    assert layer.worker is not None
    layer.worker.close()


def test_a_policy_that_was_named_is_refused_where_no_layer_has_slots_for_it(
    file: WeightFile,
) -> None:
    told = "--expert-policy lru cannot be had: in all 1 layers .* slots for fewer than 4 tokens"
    with pytest.raises(DeviceError, match=told):
        Layer(file, (1, 2, 4), "gpu", keep_copy=True, policy="lru")


def test_a_shared_layer_asks_both_sides_and_says_how_much(file: WeightFile) -> None:
    layer = Layer(file, ())
    assert (layer.store.path, layer.store.choice.in_place) == ("cpu", (0, 0, 0, 1))
    assert layer.worker is not None
    assert layer.cold_experts is not None
    x, picks = inputs(2)
    layer.run(x, picks)
    size, figures = layer.store.expert_bytes, layer.cold_experts.meter.figures()
    misses = len({*picks.ids.flatten().tolist()})  # of the step, whichever rows chose them
    assert layer.paths.resolver is not None
    assert layer.paths.resolver.table.link is not None
    over_link = int(layer.paths.resolver.table.link[misses])
    assert 0 < over_link < misses
    assert figures.read_bytes["gpu"] == over_link * size  # each once, whichever rows chose it
    assert figures.read_bytes["cpu"] == (misses - over_link) * size
    assert figures.read_bytes["stream"] == 0
    layer.run(*inputs(60))  # so many picks of each expert that all are copied
    assert layer.cold_experts.meter.figures().read_bytes["stream"] == EXPERTS * size
    layer.worker.close()


def test_what_the_cpu_reads_for_prompts_is_counted(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "most_counted_rows", lambda *facts: 33)
    layer = Layer(file, ())
    assert layer.worker is not None
    assert layer.cold_experts is not None
    x, (ids, weights) = inputs(33)
    layer.run(x, (ids, weights))
    found, size = layer.cold_experts.meter.figures().read_bytes, layer.store.expert_bytes
    assert found["cpu"] > 0
    assert found["cpu"] + found["stream"] == EXPERTS * size
    layer.worker.close()


@pytest.mark.parametrize(("promised", "picks"), [((0.9,), 0.3), ((), 2.0)])
def test_long_steps_go_by_the_hit_rate_that_statistics_promise(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch, promised: tuple[float, ...], picks: float
) -> None:
    asked: list[cost_model.ColdLayer] = []
    monkeypatch.setattr(prefill, "most_counted_rows", lambda cold, speeds: asked.append(cold) or 0)
    Layer(file, HOT[30], "gpu", promised=promised)
    assert [(cold.experts, cold.picks) for cold in asked] == [(4, pytest.approx(picks))]


def test_what_a_gpu_alone_reads_in_place_is_counted_by_choices(file: WeightFile) -> None:
    layer = Layer(file, HOT[30], "gpu")
    assert layer.cold_experts is not None
    counter = HitCounter((USED,), EXPERTS)
    counter.set_placement(ExpertPlacement((HOT[30],), "drawn"))
    choices = torch.tensor([[1, 0, 2, 0, 5, 4]])
    counter.count(choices + 7, choices)  # seven more of each in steps of many rows
    found = counter.reading(layer.cold_experts.meter)
    assert found.cold_bytes == {"gpu": 7 * layer.store.expert_bytes, "stream": 0}


@pytest.mark.parametrize(
    ("cold", "cpu", "path", "same"),
    [
        ("gpu", 2e10, "gpu", True),
        ("auto", 1e8, "gpu", False),  # too slow for small steps; prompts may still ask it
        ("auto", 0.0, "gpu", True),  # there are no kernels of a CPU
        ("cpu", 2e10, "cpu", False),
    ],
)
def test_hot_and_cold_experts_give_equal_bits_if_no_step_asks_the_cpu(
    file: WeightFile, cold: str, cpu: float, path: str, same: bool
) -> None:
    layer = Layer(file, HOT[30], cold, speeds={"cpu": cpu})
    assert layer.cold_experts is not None
    assert (layer.store.path, layer.cold_experts.same_bits) == (path, same)
    if layer.worker is not None:
        layer.worker.close()


def test_without_cold_experts_the_hot_ones_get_their_weights(file: WeightFile) -> None:
    wanted, found = Layer(file, None), Layer(file, HOT[60], "drop")
    assert (found.paths.resolver, found.worker, found.store.cold.nbytes) == (None, None, 0)
    for rows in (2, 33):
        x, (ids, weights) = inputs(rows)
        hot = torch.isin(ids, torch.tensor(HOT[60], device="cuda"))
        kept = weights * hot
        kept *= weights.sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1e-9)
        others = torch.where(hot, ids, -1)
        torch.testing.assert_close(found.run(x, (ids, weights)), wanted.run(x, (others, kept)))


def test_an_exchange_is_seen_by_both_sides(file: WeightFile) -> None:
    wanted, found = Layer(file, None), Layer(file, HOT[30])
    exchange(found.store, 2, 1)
    for rows in (2, 33):
        x, picks = inputs(rows)
        assert apart(found.run(x, picks), wanted.run(x, picks), x) < 0.01
    assert found.worker is not None
    found.worker.check()
    found.worker.close()


def test_unpinned_experts_without_cpu_kernels_are_refused(file: WeightFile) -> None:
    with pytest.raises(DeviceError, match="only the CPU could compute them, and its C\\+\\+"):
        Layer(file, HOT[30], pin=False, speeds={"cpu": 0.0})


def prompt(*rows: int, draws: Sequence[bool]) -> Batch:
    """A step of several sequences with so many rows each, some of which draw a token."""
    firsts = [sum(rows[:index]) for index in range(len(rows))]
    spans = tuple(
        Span(first, count, 0, torch.arange(1)) for first, count in zip(firsts, rows, strict=True)
    )
    total = torch.arange(sum(rows))
    outputs = [x.first_row + x.rows - 1 for x, drawn in zip(spans, draws, strict=True) if drawn]
    return Batch(total, total, total, spans, torch.tensor(outputs, dtype=torch.int64))


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (prompt(40, draws=[True]), [*range(24, 40)]),
        (prompt(5, draws=[True]), [*range(5)]),
        (prompt(40, draws=[False]), []),  # more chunks of the prompt follow
        (prompt(40, 1, 30, draws=[False, True, True]), [40, *range(55, 71)]),
        (prompt(*[9] * 16, draws=[True] * 16), [9 * n + k for n in range(16) for k in (7, 8)]),
        (prompt(*[2] * 33, draws=[True] * 33), []),
    ],
    ids=["long", "short", "unfinished", "mixed", "many", "too many"],
)
def test_the_ends_of_prompts_are_the_last_rows_of_those_that_draw(
    batch: Batch, rows: list[int]
) -> None:
    assert prompt_ends(batch) == rows


def test_slots_are_filled_with_what_the_end_of_a_prompt_picked(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LEAST_TOKENS", 1)
    found, wanted = Layer(file, (1, 2, 4), "gpu", keep_copy=True, policy="lru"), Layer(file, None)
    assert found.cold_experts is not None
    x, picks = inputs(40)
    picks.ids[24:] = torch.tensor([0, 3, 5], dtype=torch.int32).to("cuda")
    model = CacheModel.start("lru", EXPERTS, (1, 2, 4))
    model.resolve(picks.ids[24:].tolist())
    found.cold_experts.begin_prompt(prompt(40, draws=[True]))
    assert torch.equal(found.run(x, picks), wanted.run(x, picks))
    assert sorted(model.slots) == [0, 3, 5]
    assert found.cold_experts.store.current_placement().hot == ((0, 3, 5),)
    for expert in found.store.hot:
        slot, row = found.store.slot_of(expert), found.store.cold_of(expert)
        assert slot is not None
        assert row is not None
        assert torch.equal(slot.cpu(), row.cpu())
    assert not found.cold_experts.store.cache_counts.any()  # a prompt's picks are counted elsewhere
    found.run(*inputs(1))  # a decode step, of any experts
    causes = cache_totals(found.cold_experts.store.cache_counts.cpu(), COUNTERS).causes[0]
    assert causes["prefetched"] > 0
    assert causes["pinned"] == causes["cached"] == 0
    found.cold_experts.store.repair()
    found.store.hold((0, 3, 5))
    found.cold_experts.begin_prompt(prompt(40, draws=[False]))
    picks.ids[:] = torch.tensor([1, 2, 4], dtype=torch.int32).to("cuda")
    assert torch.equal(found.run(x, picks), wanted.run(x, picks))
    assert found.cold_experts.store.current_placement().hot == ((0, 3, 5),)
