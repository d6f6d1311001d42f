"""An agent's session: prompts that grow, with the prefix cache and without it."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from headroom.bench.agent import LEAST_RESULT, piece_lengths, session_pieces
from headroom.bench.figures import AgentFigure, BenchSettings, FirstToken
from headroom.bench.report import report_json
from headroom.families.files import open_checkpoint
from headroom.kernels.native import measure
from headroom.text.tokenizer import Tokenizer
from tests.bench.test_prefix import measured, shown
from tests.synth_models import write_model

SMALL = BenchSettings(agent_turns=4, agent_tokens=700, agent_answer=6, only=("agent",))


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "TOUCHED_BYTES", 8 << 20)


@pytest.mark.parametrize("family", ["llama", "qwen35"])
def test_a_session_computes_each_token_about_once(tmp_path: Path, family: str) -> None:
    path = write_model(family, "q8_0", tmp_path, few_layers=True)
    report = measured(path, SMALL, chunk=64)
    figure = report.figures.agent
    assert figure is not None
    lengths = piece_lengths(700, 4, 6)
    prompts = [sum(lengths[: turn + 1]) + 6 * turn for turn in range(4)]
    assert prompts[-1] == 700
    assert [turn.prompt for turn in figure.warm] == prompts
    assert [turn.prompt for turn in figure.cold] == prompts
    assert [turn.cached for turn in figure.cold] == [0] * 4
    assert figure.warm[0].cached == 0
    for before, turn in pairwise(figure.warm):
        assert before.prompt - 64 < turn.cached < turn.prompt
    assert figure.equal_answers == 4
    found = json.loads(json.dumps(report_json(report)))["agent"]
    assert (found["turns"], found["answer_tokens"], found["equal_answers"]) == (4, 6, 4)
    assert found["without_cache"]["computed_tokens"] == sum(prompts)
    assert found["with_cache"]["computed_tokens"] < 700 + 3 * 64
    assert found["ratio"] == pytest.approx(figure.cold_s / figure.warm_s)
    assert len(found["with_cache"]["prompts"]) == 4
    assert "4 of 4 answers equal those without the cache" in shown(report)


def test_a_session_ends_where_the_context_does(tmp_path: Path) -> None:
    path = write_model("llama", "q8_0", tmp_path, few_layers=True)
    figure = measured(path, SMALL, context=512).figures.agent
    assert figure is not None
    assert figure.warm[-1].prompt == 512 - 6


def test_what_cannot_be_measured_is_left_out(tmp_path: Path) -> None:
    path = write_model("llama", "q8_0", tmp_path, few_layers=True)
    many = replace(SMALL, agent_turns=30)
    assert measured(path, many, context=256).figures.left_out == [
        "agent: 30 turns do not fit into a context of 256"
    ]
    assert measured(path, SMALL, no_prefix_cache=True).figures.left_out == [
        "agent: --no-prefix-cache turns the cache off"
    ]


def test_lengths_add_up_and_are_uneven() -> None:
    lengths = piece_lengths(12000, 12, 32)
    assert len(lengths) == 12
    assert sum(lengths) + 11 * 32 == 12000
    assert lengths[0] == 4800
    assert max(lengths[1:]) >= 4 * min(lengths[1:]) > LEAST_RESULT
    assert piece_lengths(500, 1, 32) == [500]


def test_texts_are_equal_at_every_call_and_end_as_messages_do(tmp_path: Path) -> None:
    path = write_model("llama", "q8_0", tmp_path, few_layers=True)
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(path))
    lengths = [400, 30, 90, 200]
    pieces = session_pieces(tokenizer, lengths)
    assert pieces == session_pieces(tokenizer, lengths)
    assert [len(piece) for piece in pieces] == lengths
    assert all(piece[-1] in tokenizer.stop_ids for piece in pieces)
    assert not any(set(piece[:-1]) & tokenizer.stop_ids for piece in pieces)
    told = tokenizer.decode(pieces[0])
    assert told.startswith("You are an agent that changes a program.")


def test_a_session_s_times_are_sums_of_its_turns() -> None:
    warm = (FirstToken(10, 0, 0.5), FirstToken(20, 10, 0.25))
    cold = (FirstToken(10, 0, 0.5), FirstToken(20, 0, 1.0))
    figure = AgentFigure(warm=warm, cold=cold, answer_tokens=3, equal_answers=2)
    assert (figure.warm_s, figure.cold_s) == (0.75, 1.5)
