"""Output rows: every chunking of a prompt gives each row once, and rows are read in order."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headroom.engine.outputs import LaunchedStep, Output, list_draws, list_outputs, read_outputs
from headroom.engine.request import GenerationRequest, Pooling, SamplingParams
from headroom.engine.scheduler import Turn
from headroom.engine.sequence import Sequence as Running
from headroom.kernels.cuda.sizes import DECODE_ROWS
from headroom.layers.draws import TokenMask
from headroom.split.stage import CpuResult

PROMPT = (3, 1, 4, 1, 5, 9, 2)
VOCABULARY = 12
GREEDY = SamplingParams(temperature=0)


class LimitsLater:
    """A constraint that limits no token before the one after `free` more tokens."""

    def __init__(self, free: int) -> None:
        self.free = free

    def may_limit(self, unread: int) -> bool:
        return unread >= self.free

    def mask(self) -> TokenMask | None:
        return None

    def advance(self, token: int) -> None:
        pass


def running(
    params: SamplingParams = GREEDY,
    *,
    pooling: Pooling | None = None,
    constraint: LimitsLater | None = None,
) -> Running:
    request = GenerationRequest(
        id="",
        prompt=PROMPT,
        params=params,
        stop_ids=frozenset(),
        pooling=pooling,
        constraint=constraint,
    )
    return Running(request, lambda event: None, limit=100)


class DrawnResult(CpuResult):
    """The rows of a step, of which the device drew some; it counts the logits of each call."""

    names_tokens = True

    def __init__(self, logits: torch.Tensor, drawn: Mapping[int, int]) -> None:
        super().__init__(logits, lambda rows: rows, lambda rows: rows)
        self.token_rows = {row: at for at, row in enumerate(drawn)}
        self._drawn = drawn
        self.asked: list[list[int]] = []

    def tokens(self) -> list[int | None]:
        return [self._drawn.get(row) for row in range(len(self.hidden))]

    def logits(self, rows: Sequence[int]) -> torch.Tensor:
        self.asked.append(list(rows))
        return super().logits(rows)


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))


def launch(outputs: list[Output], drawn: Mapping[int, int]) -> tuple[LaunchedStep, DrawnResult]:
    result = DrawnResult(random_logits(len(outputs)), drawn)
    return LaunchedStep([], outputs, result), result


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=7),
    st.sampled_from([None, "last", "mean"]),
    st.booleans(),
)
def test_every_chunking_of_a_prompt_gives_the_same_output_rows(
    chunks: list[int], pooling: Pooling | None, scores: bool
) -> None:
    sequence = running(SamplingParams(prompt_logprobs=scores), pooling=pooling)
    found: list[Output] = []
    for chunk in chunks:
        rows = min(chunk, sequence.pending)
        found += list_outputs([Turn(sequence, rows)]) if rows else []
        sequence.cached += rows
    whole = sequence.cached == len(PROMPT)
    every = scores or pooling == "mean"
    wanted = list(range(sequence.cached)) if every else [len(PROMPT) - 1] * whole
    assert [output.position for output in found] == wanted
    drawing = [output.position for output in found if output.draws]
    assert drawing == ([len(PROMPT) - 1] if whole and pooling is None else [])
    predicts = len(PROMPT) - 1  # rows that predict a token of the prompt
    assert all(output.scores_prompt == (scores and output.position < predicts) for output in found)
    assert all(output.pools == (pooling is not None) for output in found)
    assert [output.token_index for output in found] == [place + 1 for place in wanted]


def test_the_output_rows_of_a_step_come_turn_by_turn() -> None:
    first, second = running(), running(SamplingParams(prompt_logprobs=True))
    first.cached, second.cached = len(PROMPT) - 1, 2
    outputs = list_outputs([Turn(first, 1), Turn(second, 3)])
    assert [(x.sequence is first, x.position) for x in outputs] == [
        (True, 6), (False, 2), (False, 3), (False, 4)
    ]  # fmt: skip
    draws = list_draws(outputs)
    assert [draw is not None for draw in draws] == [True, False, False, False]
    assert draws[0] is not None
    assert draws[0].settings is first.request.params
    assert draws[0].history is first.tokens


@pytest.mark.parametrize(("unread", "limited"), [(0, False), (1, True), (2, True)])
def test_a_draw_is_limited_if_its_constraint_may_limit_it_after_unread_tokens(
    unread: int, limited: bool
) -> None:
    sequence = running(constraint=LimitsLater(free=1))
    sequence.tokens += [-1] * unread
    sequence.unread = unread
    outputs = list_outputs([Turn(sequence, len(sequence.tokens))])
    (draw,) = list_draws(outputs)
    assert draw is not None
    assert draw.limited == limited == (outputs[0].constraint is not None)


def test_rows_that_draw_nothing_are_not_limited() -> None:
    sequence = running(SamplingParams(prompt_logprobs=True), constraint=LimitsLater(free=0))
    outputs = list_outputs([Turn(sequence, 4)])
    assert [output.constraint for output in outputs] == [None] * 4


@given(st.sets(st.integers(0, 8)), st.sets(st.integers(0, 8)), st.integers(1, 4))
def test_rows_are_read_in_order_with_logits_only_where_they_are_needed(
    drawn: set[int], with_logprobs: set[int], most: int
) -> None:
    outputs = [
        Output(
            running(SamplingParams(logprobs=2) if row in with_logprobs else GREEDY),
            position=6,
            scores_prompt=False,
            draws=True,
        )
        for row in range(9)
    ]
    step, result = launch(outputs, {row: row % VOCABULARY for row in sorted(drawn)})
    found = list(read_outputs(step, most))
    assert [read.output for read in found] == outputs
    for row, read in enumerate(found):
        assert read.token == (row if row in drawn else None)
        needed = row not in drawn or row in with_logprobs
        assert (read.logits is not None) == needed
        if read.logits is not None:
            np.testing.assert_array_equal(read.logits, result.hidden[row].numpy())
    assert all(len(rows) <= most for rows in result.asked)
    asked = [row for rows in result.asked for row in rows]
    assert asked == [row for row, read in enumerate(found) if read.logits is not None]


def test_masks_come_with_the_rows_that_they_limit() -> None:
    outputs = [Output(running(), 6, scores_prompt=False, draws=True) for _ in range(3)]
    step, _ = launch(outputs, {})
    mask = np.array([0b10], dtype=np.uint32)
    step.masks[1] = mask
    step.masks[2] = None
    assert [read.mask is mask for read in read_outputs(step, 4)] == [False, True, False]


@pytest.mark.parametrize("top", [None, 0, 3])
def test_the_host_draws_what_no_device_drew_and_gives_logprobs_as_asked(top: int | None) -> None:
    output = Output(
        running(SamplingParams(temperature=0, logprobs=top)), 6, scores_prompt=False, draws=True
    )
    logits = random_logits(1)[0]
    normal = torch.log_softmax(logits.double(), 0)
    for given_token, wanted in ((None, int(logits.argmax())), (5, 5)):
        token, logprobs = output.choose(given_token, logits.numpy(), None)
        assert token == wanted
        assert (logprobs is None) == (top is None)
        if logprobs is not None and top is not None:
            assert logprobs.logprob == pytest.approx(float(normal[token]), rel=1e-12)
            best = normal.sort(descending=True)
            assert [rival for rival, _ in logprobs.top] == best.indices[:top].tolist()


def test_a_mask_keeps_the_host_from_drawing_other_tokens() -> None:
    output = Output(running(), 6, scores_prompt=False, draws=True)
    logits = np.arange(VOCABULARY, dtype=np.float32)
    allowed = np.array([1 << 2 | 1 << 7], dtype=np.uint32)
    assert output.choose(None, logits, allowed) == (7, None)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=9))
def test_prompt_logprobs_are_recorded_once_however_often_a_prompt_is_computed(
    ends: list[int],
) -> None:
    """A preempted prompt is computed again from its start, up to another row each time."""
    sequence = running(SamplingParams(prompt_logprobs=True, logprobs=1))
    logits = random_logits(len(PROMPT))
    for end in ends:
        for position in range(end):
            Output(sequence, position, scores_prompt=True, draws=False).score_prompt(
                logits[position].numpy()
            )
    normal = torch.log_softmax(logits.double(), 1)
    known = sequence.prompt_logprobs
    assert len(known) == min(max(ends) + 1, len(PROMPT))
    assert known[0] is None
    for place, found in enumerate(known[1:], start=1):
        assert found is not None
        assert found.logprob == pytest.approx(float(normal[place - 1, PROMPT[place]]), rel=1e-12)
        assert [token for token, _ in found.top] == [int(normal[place - 1].argmax())]


PLAIN = Output(running(), 6, scores_prompt=False, draws=True)


@pytest.mark.parametrize(
    ("output", "unread"),
    [
        (PLAIN, True),
        (Output(running(SamplingParams(logprobs=0)), 6, scores_prompt=False, draws=True), False),
        (Output(running(SamplingParams(presence_penalty=1)), 6, False, True), False),
        (Output(running(pooling="mean"), 3, False, False, pools=True), False),
        (Output(running(), 3, scores_prompt=True, draws=False), False),
    ],
)
def test_a_step_stays_unread_only_if_the_device_has_all_that_the_next_one_needs(
    output: Output, unread: bool
) -> None:
    step, _ = launch([PLAIN, output], {0: 4, 1: 5})
    assert step.may_stay_unread == unread
    assert not launch([PLAIN, output], {0: 4})[0].may_stay_unread  # the host draws a token


@pytest.mark.parametrize(("rows", "unread"), [(DECODE_ROWS, True), (DECODE_ROWS + 1, False)])
def test_no_more_tokens_stay_unread_than_a_decode_step_has_rows(rows: int, unread: bool) -> None:
    step, _ = launch([PLAIN] * rows, dict.fromkeys(range(rows), 4))
    assert step.may_stay_unread == unread


def test_placeholders_name_the_devices_rows_until_the_tokens_are_learned() -> None:
    sequences = [running(), running(), running()]
    outputs = [Output(one, 6, scores_prompt=False, draws=True) for one in sequences]
    step, _ = launch(outputs, {0: 8, 2: 9})
    step.add_placeholders()
    assert [one.tokens[len(PROMPT) :] for one in sequences] == [[-1], [], [-2]]
    assert [one.unread for one in sequences] == [1, 0, 1]
    assert [one.generated for one in sequences] == [0, 0, 0]
    for read, output in zip(read_outputs(step, 4), outputs, strict=True):
        token, _ = output.choose(read.token, read.logits, read.mask)
        output.sequence.learn(output.token_index, token)
    assert [one.tokens[-1] for one in sequences][::2] == [8, 9]
    assert [one.unread for one in sequences] == [0, 0, 0]
    assert [one.generated for one in sequences] == [1, 1, 1]
