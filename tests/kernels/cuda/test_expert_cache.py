"""The kernel that manages the slots of a layer, against the model of a cache in plain Python."""

import pytest
import torch

from headroom.experts.cache import POLICIES, RULES, CacheModel, Policy
from headroom.kernels.cuda import expert_cache
from headroom.kernels.cuda.expert_cache import (
    COUNTERS,
    FILLED_AHEAD,
    MOST_FILLS,
    STATE_WORDS,
    STEP_FILLED,
    CpuRequest,
    LayerTable,
    ShadowTables,
)
from headroom.kernels.cuda.expert_rules import STEP_MOST
from headroom.kernels.cuda.handover import COUNTS, WORDS
from headroom.kernels.cuda.route import RouterLogits
from headroom.kernels.ops import Picks, RouterRule
from tests.gpu import check_expert_cache
from tests.gpu.cache_layers import HIDDEN, layer_of, random_ids
from tests.stand_in.cuda_on_cpu import COMPILER, compile_on_cpu
from tests.stand_in.kernels import use_kernels

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launchers run their kernels here."""
    torch.manual_seed(0)
    use_kernels(monkeypatch, compile_on_cpu)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_steps_resolve_as_the_model_of_a_cache_says(policy: Policy, rows: int) -> None:
    experts, used = 40, 4
    link = None if rows == 1 else [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6]
    layer = layer_of(policy, experts, [3, 8, *range(20, 33)], [8, 30], link)
    words, table = layer.filling.words, layer.table
    for step in range(60):
        if step == 50:  # steps never overflow: all numbers are halved
            assert table.state is not None
            last = table.state[STATE_WORDS : STATE_WORDS + experts]
            last += STEP_MOST - 1 - int(table.state[1])
            table.state[1] = STEP_MOST - 1
        ids = random_ids(rows, experts, used)
        ahead = step % 4 == 1  # as at the end of a prompt
        origin = FILLED_AHEAD if ahead else STEP_FILLED
        found = layer.resolve(ids, link is not None, origin)
        said = layer.model.resolve(ids.tolist(), link, "ahead" if ahead else "step")
        assert table.seen is not None
        assert table.seen[: ids.numel()].tolist() == ids.flatten().tolist()
        for_cpu = torch.tensor(said.left_to_cpu, dtype=torch.int32)
        assert torch.equal(found.ids, ids.masked_fill(torch.isin(ids, for_cpu), -1))
        count = int(words[0])
        listed = list(zip(words[4:].tolist(), words[4 + MOST_FILLS :].tolist(), strict=False))
        assert listed[:count] == [(fill.expert, fill.slot) for fill in said.filled]
        of_pick = words[4 + 3 * MOST_FILLS :][: ids.numel()].view(ids.shape)
        number = {fill.expert: n for n, fill in enumerate(said.filled, 1)}
        assert of_pick.tolist() == [[number.get(e, 0) for e in row] for row in ids.tolist()]
        expert_cache.fill(layer.filling)
        slots = {expert: slot + 1 for slot, expert in enumerate(layer.model.slots)}
        assert table.place.tolist() == [slots.get(expert, 0) for expert in range(experts)]
        assert layer.filling.slots[:, -1].tolist() == layer.model.slots
        assert layer.experts_at() == list(range(experts))
        if link is not None and said.left_to_cpu:
            asked = layer.box.words[WORDS["IDS"] :][: ids.numel()].view(ids.shape)
            assert torch.equal(asked, ids.masked_fill(~torch.isin(ids, for_cpu), -1))
    counts = layer.model.counts
    assert 0 < counts.pinned_hits <= counts.hits
    assert (counts.prefetched_hits > 0) == (policy != "static")
    assert table.counts.tolist() == [getattr(counts, name) for name in COUNTERS]
    if link is not None:
        assert int(layer.box.counts[0, COUNTS.index("gpu_picks")]) == counts.linked


def test_a_static_layer_needs_no_state_and_leaves_experts_where_they_are() -> None:
    made = layer_of("static", 10, [2, 5, 7], [], [0, 0, 1, 1, 2])
    table = LayerTable(made.table.place, made.table.addresses, made.table.counts, made.table.link)
    before = made.table.addresses.clone()
    for _ in range(20):
        ids = random_ids(2, 10, 3)
        picks = Picks(ids.clone(), torch.rand(ids.shape))
        request = CpuRequest(torch.randn(2, HIDDEN), made.box, 0)
        found = expert_cache.resolve(picks, table, RULES, request)
        said = made.model.resolve(ids.tolist(), [0, 0, 1, 1, 2])
        for_cpu = torch.tensor(said.left_to_cpu, dtype=torch.int32)
        assert torch.equal(found.ids, ids.masked_fill(torch.isin(ids, for_cpu), -1))
    assert torch.equal(made.table.addresses, before)
    assert made.table.place.tolist() == [0, 0, 1, 0, 0, 2, 0, 3, 0, 0]
    assert table.counts.tolist() == [getattr(made.model.counts, name) for name in COUNTERS]


def test_logits_are_resolved_as_the_picks_that_a_router_takes_from_them() -> None:
    experts, used, rows = 40, 4, 3
    made = [layer_of("lru", experts, list(range(20)), [], None) for _ in range(2)]
    rule = RouterRule(used=used, scores="softmax", normalise=True, scale=1.5, softcap=0.0)
    counts = [torch.zeros(experts, dtype=torch.int64) for _ in range(2)]
    for _ in range(10):
        values = torch.randn(rows, experts + 1)
        sequence = torch.tensor([0, -1, 1], dtype=torch.int32)
        logits = [RouterLogits(values, rule, None, count, sequence) for count in counts]
        fused = expert_cache.resolve(logits[0], made[0].table, RULES, None)
        apart = expert_cache.resolve(logits[1].top_k(), made[1].table, RULES, None)
        assert torch.equal(fused.ids, apart.ids)
        assert torch.equal(fused.weights, apart.weights)
        for one in made:
            expert_cache.fill(one.filling)
        assert torch.equal(made[0].table.place, made[1].table.place)
    assert torch.equal(*counts)
    assert torch.equal(made[0].table.counts, made[1].table.counts)


def test_shadows_count_what_each_policy_would_do() -> None:
    experts, used, rows, slots = 40, 4, 2, [16, 0]
    start = [[*range(count)] for count in slots]
    words = expert_cache.state_words(experts)
    tables = ShadowTables(
        seen=torch.empty(2, 1024, dtype=torch.int32),
        shape=torch.tensor([[experts, count, used] for count in slots], dtype=torch.int32),
        places=torch.zeros(2, len(POLICIES), experts, dtype=torch.int32),
        states=torch.zeros(2, len(POLICIES), words, dtype=torch.int32),
        counts=torch.zeros(2, len(POLICIES), len(COUNTERS), dtype=torch.int64),
    )
    for number in range(len(POLICIES)):
        state = expert_cache.new_state(experts, number)
        tables.states[0, number, : len(state)] = state
        tables.places[0, number, start[0]] = torch.arange(1, slots[0] + 1).int()
    models = [CacheModel.start(policy, experts, start[0]) for policy in POLICIES]
    for _ in range(40):
        ids = random_ids(rows, experts, used)
        tables.seen[:, : ids.numel()] = ids.flatten()
        expert_cache.shadow(tables, rows, RULES)
        for model in models:
            model.resolve(ids.tolist())
    for number, model in enumerate(models):
        said = [getattr(model.counts, name) for name in COUNTERS]
        assert tables.counts[0, number].tolist() == said
    assert not tables.counts[1].any()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_hundred_thousand_rounds_lose_no_expert(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All policies together: after each round table, slots and bytes are those of the model."""
    monkeypatch.setattr(check_expert_cache, "DEVICE", "cpu")
    for seed in range(250):
        assert check_expert_cache.check_rounds(policy, (1, 1, 2, 5, 8)[seed % 5], 100, seed), seed
