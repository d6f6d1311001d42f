"""Between steps: when experts change places, when statistics are saved, what is told."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from headroom.errors import CapacityError
from headroom.experts.exchange import ExchangePolicy
from headroom.experts.placement import LayerExperts, load_placement
from headroom.experts.stats import RoutingHistory, RoutingStats, StatsFile, StatsModel, load_history
from headroom.experts.store import ExpertStore
from headroom.experts.telemetry import ColdMeter, DecodeCounts
from headroom.options import SWAP_WINDOW, Options
from headroom.plan.cost_model import ColdSpeeds
from headroom.split.expert_records import ExpertRecords
from headroom.split.pipeline import Pipeline
from headroom.split.stage import CpuStage
from headroom.split.upkeep import ExpertUpkeep, open_upkeep
from headroom.split.upkeep_rules import UpkeepRules, upkeep_rules
from tests.experts.stores import NotedExchanges, blob_layout, small_store
from tests.stand_in.gpu import StandInGpu, stand_in_gpu
from tests.stand_in.streams import Queues

LAYERS = (LayerExperts(0, 0), LayerExperts(4, 10), LayerExperts(4, 10))
USED = (0, 2, 2)
POLICY = ExchangePolicy(min_gain=2.0, false_chance=1, per_layer=1)


class StatisticsStage(CpuStage):
    """A stage of which only the statistics are there."""

    has_head = True

    def __init__(self, routing: RoutingStats | None, device: str = "cpu") -> None:
        self.device, self._routing = device, routing
        self.kept: ExpertStore | None = None

    @property
    def store(self) -> ExpertStore | None:
        return self.kept

    @property
    def routing(self) -> RoutingStats | None:
        return self._routing


class Case:
    """An upkeep, and hands to change what it looks at."""

    def __init__(
        self,
        path: Path | None,
        experts: NotedExchanges | None,
        rules: UpkeepRules,
        device: str = "cpu",
        copies_run: bool = True,
    ) -> None:
        self.routing = RoutingStats(3, 4, "cpu")
        self.experts = experts
        self.stage = stage = StatisticsStage(self.routing, device)
        # What cold experts have cost since the start; steps that warm up are in.
        self.costs = DecodeCounts(cpu_bytes=0, gpu_bytes=1000, hot_s=0.5, cold_s=0.25, wait_s=0.0)
        meter = None if experts is None else ColdMeter(lambda: self.costs)
        self.pipeline = Pipeline([stage], 10, experts=experts, meter=meter)
        # Whether all copies run between two steps; if not, a part of one does.
        self._copies_run = copies_run
        file = StatsFile(path, RoutingHistory.empty(LAYERS, 0.0))
        self.records = ExpertRecords(StatsModel(Path("m"), "abc", LAYERS, USED), file, rules)
        self.upkeep = ExpertUpkeep(self.pipeline, self.records)

    def choose(self, layer: int, expert: int, times: int) -> None:
        self.routing.of_layer(layer).decode[expert] += times

    def look_after(self, tokens: int, *, resting: bool) -> bool:
        """Do what the engine does between steps; return whether it had to wait for steps."""
        self.upkeep.go_on(resting)
        due = self.upkeep.due(tokens, resting)
        if due:
            self.upkeep.run(tokens, resting)
        if self.experts is not None:
            self._copy_on()
        return due

    def _copy_on(self) -> None:
        queues = Queues.current()
        if self._copies_run:
            queues.finish()
        for stream in queues.streams:
            stream.advance()

    def rest(self, tokens: int) -> None:
        """As an engine without requests, until there is nothing to do."""
        while self.look_after(tokens, resting=True):
            pass


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGpu]:
    """A GPU whose copies run when somebody waits for them, and between steps."""
    with stand_in_gpu(monkeypatch) as made:
        made.queues.stepped = True
        yield made


def cold_half(gpu: StandInGpu, *, same_bits: bool = False) -> NotedExchanges:
    """Return exchanges of a dense layer and two layers whose experts are half cold."""
    layout = blob_layout(4, (4, 4, 2))
    store = small_store(
        [None, layout, layout], [(), (0, 1), (0, 1)], "cuda:0", pin=True, cold="gpu"
    )
    gpu.queues.finish()
    gpu.queues.asked = 0
    gpu.kept.append(store)
    return NotedExchanges(store, LAYERS, same_bits=same_bits)


def test_a_model_without_experts_needs_no_upkeep() -> None:
    case = Case(None, None, UpkeepRules())
    assert open_upkeep(case.pipeline, case.records) is not None
    dense = Pipeline([StatisticsStage(None)], 10)
    assert open_upkeep(dense, case.records) is None


def test_between_requests_the_more_chosen_experts_become_hot(gpu: StandInGpu) -> None:
    case = Case(None, cold_half(gpu), UpkeepRules(policy=POLICY))
    case.choose(1, 3, 9)
    case.choose(1, 2, 5)
    case.choose(2, 0, 9)
    assert case.upkeep.due(7, resting=True)
    assert case.upkeep.idle_s(7) == 0.0
    case.rest(7)  # a round that found something is followed by another
    assert case.experts is not None
    assert case.experts.exchanged == [(1, 3, 1), (1, 2, 0)]
    assert not case.upkeep.due(7, resting=True)
    assert case.upkeep.idle_s(7) is None
    assert case.upkeep.due(8, resting=True)  # new tokens, new choices


def test_an_exchange_that_takes_longer_than_it_saves_is_not_made(gpu: StandInGpu) -> None:
    speeds = ColdSpeeds(gpu=1e12, link=1e10, cpu=1e10, handover_s=0.0, copy=1e10)
    for copy, made in ((1e10, 1), (1.0, 0)):
        case = Case(None, cold_half(gpu), UpkeepRules(policy=POLICY))
        assert case.experts is not None
        case.experts.speeds = replace(speeds, copy=copy)
        case.choose(1, 3, 9)
        case.rest(7)
        assert len(case.experts.exchanged) == made


@pytest.mark.parametrize("skewed", [False, True])
def test_sixteen_conversations_copy_experts_only_if_some_are_really_chosen_more_often(
    gpu: StandInGpu, skewed: bool
) -> None:
    draw, weights = Random(3), (1, 1, 3, 3) if skewed else (1, 1, 1, 1)
    case = Case(None, cold_half(gpu), upkeep_rules(Options()))
    assert case.experts is not None
    for turn in range(1, 41):  # after every 32 tokens of each conversation the engine rests
        for layer in (1, 2):
            for expert in draw.choices(range(4), weights, k=16 * 32 * USED[layer]):
                case.choose(layer, expert, 1)
        case.rest(turn * 16 * 32)
    assert (gpu.queues.asked > 0) == skewed
    wanted = [(1, 2, 0), (1, 2, 1), (1, 3, 0), (1, 3, 1)]
    assert all(one in wanted for one in case.experts.exchanged if one[0] == 1)
    assert len(case.experts.exchanged) == (4 if skewed else 0)


def test_a_running_request_sees_no_exchange_where_bits_would_change(
    gpu: StandInGpu,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        case = Case(None, cold_half(gpu), UpkeepRules(swap_every=4, policy=POLICY))
    assert "exchanges wait for the ends of requests" in caplog.text
    case.choose(1, 3, 9)
    assert not case.upkeep.due(400, resting=False)
    assert case.upkeep.due(400, resting=True)


@pytest.mark.parametrize(("limit", "told"), [(29, True), (30, False), (None, False)])
def test_a_limit_below_one_exchange_is_reported(
    gpu: StandInGpu, limit: int | None, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    policy = replace(POLICY, most_bytes=limit)
    case = Case(None, cold_half(gpu), UpkeepRules(policy=policy))
    line = "exchanges: none in 2 of 2 layers, where one copies 30 B and --swap-bytes is 29 B"
    assert (line in caplog.text) == told
    case.choose(1, 3, 9)
    case.rest(7)
    assert case.experts is not None
    assert bool(case.experts.exchanged) != told
    caplog.clear()
    Case(None, cold_half(gpu), UpkeepRules(swap_every=None, policy=policy))
    assert caplog.text == ""


def test_if_hot_and_cold_bits_are_equal_exchanges_come_every_so_many_tokens(
    gpu: StandInGpu,
) -> None:
    experts = cold_half(gpu, same_bits=True)
    case = Case(None, experts, UpkeepRules(swap_every=4, policy=POLICY))
    case.choose(1, 3, 9)
    assert not case.look_after(3, resting=False)
    assert case.look_after(4, resting=False)  # begins
    assert case.look_after(5, resting=False)  # turns
    assert not case.look_after(6, resting=False)  # ends
    assert experts.exchanged == [(1, 3, 1)]
    assert case.look_after(8, resting=False)


def test_while_requests_run_nothing_waits_for_copies(gpu: StandInGpu) -> None:
    experts = cold_half(gpu, same_bits=True)
    case = Case(None, experts, UpkeepRules(swap_every=4, policy=POLICY), copies_run=False)
    case.choose(1, 3, 9)
    case.choose(2, 3, 8)
    waited = [case.look_after(tokens, resting=False) for tokens in range(4, 24)]
    assert experts.exchanged == [(1, 3, 1), (2, 3, 1)]
    assert experts.waits == 0
    # Steps are waited for only to plan a round, and when two experts change sides.
    assert [n for n, steps in enumerate(waited) if steps] == [0, 4, 14, 19]
    assert case.upkeep.read().exchanges == 2


def test_a_request_that_comes_waits_for_one_exchange_and_none_turns_before_its_end(
    gpu: StandInGpu,
    caplog: pytest.LogCaptureFixture,
) -> None:
    experts = cold_half(gpu)
    case = Case(None, experts, UpkeepRules(policy=POLICY), copies_run=False)
    for layer in (1, 2):
        case.choose(layer, 3, 9)
    case.look_after(7, resting=True)
    assert experts.placement().hot == ((), (0, 3), (0, 1))
    assert experts.exchanged == []
    with caplog.at_level(logging.INFO):
        waited = [case.look_after(tokens, resting=False) for tokens in range(8, 14)]
    assert waited == [False] * 6
    assert experts.exchanged == [(1, 3, 1)]  # what had turned came to its end
    assert "exchanges: 1 experts became hot, 30 B copied" in caplog.text
    assert len(experts.begun) == 1
    case.rest(14)
    assert experts.exchanged == [(1, 3, 1), (2, 3, 1)]


def test_exchanges_within_requests_give_way_where_a_request_would_see_them(gpu: StandInGpu) -> None:
    experts = cold_half(gpu, same_bits=True)
    case = Case(None, experts, UpkeepRules(swap_every=4, policy=POLICY))
    case.choose(1, 3, 9)
    case.look_after(4, resting=False)
    experts.same_bits = False
    assert not case.look_after(5, resting=False)
    assert experts.begun == [(1, 3, 1)]
    assert experts.placement().hot == ((), (0, 1), (0, 1))
    case.rest(6)
    assert experts.exchanged == [(1, 3, 1)]


def test_the_share_of_the_cpu_is_kept_between_all_steps_and_stops_none(gpu: StandInGpu) -> None:
    followed: list[int] = []
    case = Case(None, cold_half(gpu), UpkeepRules(swap_every=None))
    keeper = SimpleNamespace(follow=lambda: followed.append(1))
    case.pipeline.keepers = (keeper,)
    case.upkeep = ExpertUpkeep(case.pipeline, case.records)
    for tokens, resting in ((1, False), (2, False), (3, True)):
        assert not case.look_after(tokens, resting=resting)
    assert len(followed) == 3


def test_choices_are_hits_by_what_was_hot_when_they_were_made(gpu: StandInGpu) -> None:
    experts = cold_half(gpu, same_bits=True)
    case = Case(None, experts, UpkeepRules(swap_every=4, policy=POLICY))
    case.choose(1, 3, 9)
    case.look_after(4, resting=False)
    case.choose(1, 3, 5)  # its copies are under way
    case.look_after(5, resting=False)
    case.choose(1, 3, 2)  # it has turned
    case.choose(1, 1, 1)
    assert case.upkeep.read().hits == (0, 2, 0)
    assert case.upkeep.read().cold_picks == 9 + 5 + 1


def test_an_engine_that_ends_waits_for_copies_and_counts_their_exchange(gpu: StandInGpu) -> None:
    experts = cold_half(gpu)
    case = Case(None, experts, UpkeepRules(policy=POLICY), copies_run=False)
    case.choose(1, 3, 9)
    case.look_after(5, resting=True)
    assert case.upkeep.read().exchanges == 0
    case.upkeep.close()
    assert experts.exchanged == [(1, 3, 1)]
    assert case.upkeep.read().exchanges == 1


def test_zero_tokens_means_only_between_requests_and_off_means_never(gpu: StandInGpu) -> None:
    between = Case(None, cold_half(gpu, same_bits=True), UpkeepRules(swap_every=0))
    assert not between.upkeep.due(10**6, resting=False)
    never = Case(None, cold_half(gpu, same_bits=True), UpkeepRules(swap_every=None))
    assert not never.upkeep.due(10**6, resting=True)


def test_a_failing_exchange_is_reported_and_is_the_last(
    gpu: StandInGpu, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(None, cold_half(gpu), UpkeepRules(policy=replace(POLICY, per_layer=2)))
    gpu.queues.failed_at = 7  # the first copy of the second exchange
    case.choose(1, 3, 9)
    case.choose(2, 3, 8)
    case.rest(5)
    assert "exchanges: one failed and there are no more" in caplog.text
    assert case.experts is not None
    assert case.experts.placement().hot == ((), (0, 3), (0, 1))
    assert not case.upkeep.due(99, resting=True)
    assert case.upkeep.read().exchanges == 1


def test_choices_after_a_failure_are_hits_by_where_it_left_experts(gpu: StandInGpu) -> None:
    case = Case(None, cold_half(gpu), UpkeepRules(policy=POLICY))
    gpu.queues.refused_at = 4  # after two copies and a table: experts have changed sides
    case.choose(1, 3, 9)
    case.rest(5)
    case.choose(1, 3, 2)
    assert case.upkeep.read().hits == (0, 2, 0)
    assert case.upkeep.read().exchanges == 0


def test_new_choices_matter_after_a_long_history(gpu: StandInGpu) -> None:
    experts = cold_half(gpu)
    case = Case(None, experts, UpkeepRules(policy=POLICY))
    old = RoutingHistory(((), (1e9, 1e9, 0.0, 0.0), (0.0,) * 4), 0.0)
    records = replace(case.records, file=StatsFile(None, old))
    case.upkeep = ExpertUpkeep(case.pipeline, records)
    case.choose(1, 3, 60_000)
    case.rest(30_000)
    assert experts.exchanged == [(1, 3, 1)]


def test_new_choices_matter_after_a_long_run(gpu: StandInGpu) -> None:
    experts = cold_half(gpu)
    case = Case(None, experts, UpkeepRules(policy=POLICY))
    case.choose(1, 0, 60_000)
    case.choose(1, 1, 60_000)
    case.rest(60_000)
    assert experts.exchanged == []
    case.choose(1, 3, 20_000)
    case.rest(70_000)
    assert experts.exchanged == [(1, 3, 1)]


def test_statistics_are_saved_after_a_while_and_in_the_end(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    patient = Case(path, None, UpkeepRules())
    patient.choose(1, 2, 5)
    assert not patient.upkeep.due(5, resting=False)
    wait = patient.upkeep.idle_s(5)
    assert wait is not None
    assert 0 < wait <= 600
    patient.upkeep.close()
    assert load_history(path, "abc", LAYERS).counts[1] == (0.0, 0.0, 5.0, 0.0)
    hasty = Case(path, None, UpkeepRules(save_every_s=0.0))
    hasty.choose(1, 2, 7)
    assert hasty.upkeep.due(5, resting=False)
    hasty.upkeep.run(5, resting=False)
    assert load_history(path, "abc", LAYERS).counts[1] == (0.0, 0.0, 7.0, 0.0)
    assert not hasty.upkeep.due(5, resting=False)
    assert hasty.upkeep.idle_s(5) is None


def test_the_placement_is_saved_in_the_end_where_asked_for(gpu: StandInGpu, tmp_path: Path) -> None:
    path = tmp_path / "placed.json"
    case = Case(None, cold_half(gpu), UpkeepRules(policy=POLICY, placement_path=path))
    case.choose(1, 3, 9)
    case.rest(5)
    case.upkeep.close()
    assert load_placement(path, "abc", LAYERS).hot == ((), (0, 3), (0, 1))


def test_where_all_are_hot_it_is_reported_at_once_that_no_placement_will_be_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "placed.json"
    case = Case(None, None, UpkeepRules(placement_path=path), device="cuda:0")
    assert caplog.record_tuples == [
        (
            "headroom.split.upkeep",
            logging.WARNING,
            f"experts: all are hot, so that no placement will be saved to {path}; on a GPU, try "
            "a smaller --expert-budget or --device-memory",
        )
    ]
    case.upkeep.close()
    assert not path.exists()
    caplog.clear()
    Case(None, None, UpkeepRules())
    assert caplog.text == ""


def test_a_placement_that_cannot_be_saved_is_reported(
    gpu: StandInGpu, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    rules = UpkeepRules(placement_path=tmp_path / "file" / "placed.json")
    case = Case(None, cold_half(gpu), rules)
    for end in (case.upkeep.close, case.upkeep.close_after_error):
        caplog.clear()
        end()
        assert "experts: not saved" in caplog.text


def test_a_request_is_told_of_its_own_time_where_experts_are_cold(gpu: StandInGpu) -> None:
    case = Case(None, cold_half(gpu), UpkeepRules())
    case.choose(1, 3, 9)
    began = case.upkeep.begin_request()
    case.choose(1, 0, 3)
    case.choose(1, 2, 1)
    told = case.upkeep.end_request(began)
    assert told is not None
    assert (told["hit_rate"], told["cold_picks"]) == (0.75, 1)
    assert case.upkeep.latest is not None
    assert case.upkeep.latest.cold_picks == 10


def test_totals_leave_out_what_was_read_before_the_first_request(gpu: StandInGpu) -> None:
    case = Case(None, cold_half(gpu), UpkeepRules())
    assert case.upkeep.latest is not None
    assert (case.upkeep.latest.cold_bytes["gpu"], case.upkeep.latest.seconds["hot"]) == (0, 0.0)
    case.costs = replace(case.costs, gpu_bytes=2000)
    assert case.upkeep.read().cold_bytes["gpu"] == 1000


def test_where_all_are_hot_requests_are_told_nothing_and_a_gpu_is_not_asked(
    gpu: StandInGpu,
) -> None:
    case = Case(None, None, UpkeepRules())
    case.choose(1, 3, 9)
    assert case.upkeep.end_request(case.upkeep.begin_request()) is None
    assert case.upkeep.latest is not None
    assert case.upkeep.latest.hit_rate == 1.0
    on_gpu = Case(None, None, UpkeepRules(), device="cuda:0")
    assert on_gpu.upkeep.end_request(None) is None
    assert on_gpu.upkeep.latest is None


@pytest.mark.parametrize(("every", "told"), [(0, 1), (None, 0)])
def test_experts_that_are_held_nowhere_never_move_and_are_missed_all_the_same(
    every: int | None, told: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "placed.json"
    case = Case(None, None, UpkeepRules(swap_every=every, placement_path=path), device="cuda:0")
    layouts = [None, blob_layout(4), blob_layout(4)]
    case.stage.kept = small_store(layouts, [(), (0, 1), (0, 1)], cold="drop")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        case.upkeep = ExpertUpkeep(case.pipeline, case.records)
    assert caplog.messages == [
        "exchanges: none, since cold experts are left out and held nowhere; with --keep-host-copy "
        "they are held, and may become hot"
    ] * told  # fmt: skip
    began = case.upkeep.begin_request()
    case.choose(1, 3, 9)
    case.choose(1, 0, 3)
    assert not case.upkeep.due(10**6, resting=True)
    assert case.upkeep.tells_requests
    ended = case.upkeep.end_request(began)
    assert ended is not None
    assert (ended["hit_rate"], ended["cold_picks"]) == (0.25, 9)
    case.upkeep.close()
    assert load_placement(path, "abc", LAYERS).hot == ((), (0, 1), (0, 1))


def test_a_view_shows_picks_and_places_between_two_steps(gpu: StandInGpu) -> None:
    case = Case(None, cold_half(gpu), UpkeepRules(policy=POLICY))
    case.choose(1, 3, 9)
    case.choose(2, 0, 2)
    first, second = case.upkeep.ask_view(), case.upkeep.ask_view()
    assert first is second  # who asks before it is taken shares it
    assert case.upkeep.due(0, resting=False)
    assert case.upkeep.idle_s(0) == 0.0
    case.look_after(0, resting=False)
    view = first.result(timeout=0)
    assert [layer.picks for layer in view.layers] == [(), (0, 0, 0, 9), (2, 0, 0, 0)]
    assert [layer.hot for layer in view.layers] == [(), *[(True, True, False, False)] * 2]
    assert [layer.used for layer in view.layers] == list(USED)
    assert (view.telemetry.hits, view.telemetry.picks) == ((0, 0, 2), (0, 9, 2))
    assert not case.upkeep.due(0, resting=False)
    case.rest(7)  # expert 3 of layer 1 becomes hot
    moved = case.upkeep.ask_view()
    case.look_after(7, resting=True)
    assert moved.result(timeout=0).layers[1].hot[3]


def test_a_view_that_was_never_taken_is_refused_at_the_end() -> None:
    for end in ("close", "close_after_error"):
        case = Case(None, None, UpkeepRules())
        asked = case.upkeep.ask_view()
        getattr(case.upkeep, end)()
        with pytest.raises(CapacityError, match="shutting down"):
            asked.result(timeout=0)


def test_a_conversation_that_comes_back_has_its_experts_hot_before_its_first_step(
    gpu: StandInGpu,
) -> None:
    case = Case(None, cold_half(gpu), UpkeepRules(policy=POLICY))
    assert case.experts is not None
    before = case.upkeep.picks
    assert before is not None
    case.choose(1, 2, 40)  # the conversation's
    case.choose(2, 3, 30)
    case.rest(10)
    kept = case.upkeep.picks_since(before, None)
    assert [case.experts.placement().hot[layer][1] for layer in (1, 2)] == [2, 3]
    case.choose(1, 0, 300)  # those of others push them out
    case.choose(1, 1, 300)
    case.choose(2, 0, 300)
    case.choose(2, 1, 300)
    case.rest(20)
    assert case.experts.placement().hot == ((), (0, 1), (0, 1))
    gpu.queues.finish()
    case.upkeep.prepare(kept)
    assert [set(hot) for hot in case.experts.placement().hot[1:]] == [{0, 2}, {0, 3}] or [
        set(hot) for hot in case.experts.placement().hot[1:]
    ] == [{1, 2}, {1, 3}]
    case.rest(20)  # nothing was chosen since


def test_picks_of_a_conversation_add_up_over_its_turns_and_fade(gpu: StandInGpu) -> None:
    case = Case(None, cold_half(gpu), UpkeepRules(policy=POLICY))
    before = case.upkeep.picks
    assert before is not None
    case.choose(1, 2, 6)
    case.upkeep.read()
    first = case.upkeep.picks_since(before, None)
    assert first.tolist() == [[0] * 4, [0, 0, 6, 0], [0] * 4]
    before = case.upkeep.picks
    assert before is not None
    case.choose(1, 3, 2)
    case.upkeep.read()
    assert case.upkeep.picks_since(before, first)[1].tolist() == [0, 0, 6, 2]
    case.choose(1, 0, 10 * SWAP_WINDOW)
    case.upkeep.read()
    found = case.upkeep.picks_since(before, first)[1]
    assert float(found.sum()) == pytest.approx(SWAP_WINDOW * USED[1])


def test_without_exchanges_no_picks_are_kept(gpu: StandInGpu) -> None:
    case = Case(None, cold_half(gpu), UpkeepRules(swap_every=None))
    assert case.upkeep.picks is None
    case.upkeep.prepare(torch.ones(3, 4))
    assert case.experts is not None
    assert not case.experts.begun
