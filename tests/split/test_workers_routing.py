"""Worker processes count the picks of routers as one process does, also over a restart."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.engine.request import SamplingParams
from headroom.errors import DeviceError
from headroom.llm import LLM
from headroom.split.wire import Message
from headroom.split.worker_experts import WorkerExperts
from headroom.split.worker_messages import WorkerLostError
from tests.families.oracles import PROMPT, variant
from tests.split.test_workers import pids

SETTINGS: dict[str, Any] = {
    "context": 128,
    "parallel": 2,
    "chunk": 10,
    "dtype": "f32",
    "kv_type": "f32",
    "threads": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return variant("qwen35moe").save_gguf(tmp_path_factory.mktemp("routing") / "m.gguf")


def saved(path: Path, statistics: Path, lose: Callable[[LLM], None], **more: Any) -> list[Any]:
    """Answer twice, and return the counts that are saved then."""
    with LLM(str(path), **SETTINGS, routing_stats=str(statistics), **more) as llm:
        llm.generate([PROMPT], GREEDY)
        views = llm.engine.view_experts()
        assert views is not None
        seen = views.result(timeout=60)
        lose(llm)
        llm.generate([PROMPT[5:]], GREEDY)
        views = llm.engine.view_experts()
        assert views is not None
        later = views.result(timeout=60)
    picks = [[sum(layer.picks) for layer in view.layers] for view in (seen, later)]
    return [picks, json.loads(statistics.read_text())["counts"]]


def test_picks_are_counted_and_saved_as_in_one_process_even_if_a_worker_is_lost(
    path: Path, tmp_path: Path
) -> None:
    def lose(llm: LLM) -> None:
        if llm.engine._pipeline.restarter is not None:
            os.kill(pids(llm)[1], signal.SIGKILL)
            while not llm.engine.trouble:  # the answer's own events would tell of the loss
                os.sched_yield()

    one = saved(path, tmp_path / "one.json", lose)
    two = saved(path, tmp_path / "two.json", lose, workers="2")
    assert two == one
    assert all(sum(row) > 0 for row in one[1] if row)


class PlayedWorkers:
    """Workers that were started a number of times, and count."""

    def __init__(self) -> None:
        self.starts, self.count, self.lost = 1, 2, False
        self.found = [torch.zeros(2, 1, 2, dtype=torch.int64)] * 2

    def ask_all(self, header: dict[str, Any]) -> list[Message]:
        if self.lost:
            raise WorkerLostError("gone")
        return [Message(header | {"cold": None}, [counts]) for counts in self.found]


def test_counts_of_a_start_are_added_to_those_of_earlier_ones() -> None:
    workers: Any = PlayedWorkers()
    routing = WorkerExperts(workers, 1, 2)
    workers.found = [torch.tensor([[[3, 1]], [[2, 0]]]), torch.tensor([[[0, 5]], [[0, 4]]])]
    assert [x.tolist() for x in routing.counts_with_decode()] == [[[3, 6]], [[2, 4]]]
    workers.lost = True
    assert routing.counts().tolist() == [[3, 6]]
    workers.lost, workers.starts = False, 2
    workers.found = [torch.tensor([[[1, 0]], [[1, 0]]])]
    assert [x.tolist() for x in routing.counts_with_decode()] == [[[4, 6]], [[3, 4]]]
    assert routing.counts().tolist() == [[4, 6]]


def test_other_errors_than_a_loss_are_not_hidden() -> None:
    workers: Any = PlayedWorkers()
    routing = WorkerExperts(workers, 1, 2)

    def fail(header: dict[str, Any]) -> list[Message]:
        raise DeviceError("broken")

    workers.ask_all = fail
    with pytest.raises(DeviceError, match="broken"):
        routing.counts()
