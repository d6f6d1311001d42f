"""The matrix of predicted and measured memory: its cases, its file of results, its table."""

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.memory_matrix import (
    MODELS,
    Case,
    Result,
    cases,
    load_results,
    save_results,
    table,
    verdict,
)


def result(case: Case, predicted: int, measured: int) -> Result:
    return Result(case, predicted, 150, measured, 0.5, {"kv": 7}, 90, 0, 1.0, "2026-11-18")


def test_there_are_sixty_cases_and_twelve_of_each_model() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) == 60
    assert Counter(case.model for case in cases()) == dict.fromkeys(MODELS, 12)
    assert {case.card for case in cases()} == {8, 12, 16, 24, 32, 40, 48}


def test_results_are_read_again_as_they_were_written(tmp_path: Path) -> None:
    found = {case.name: result(case, 101, 100) for case in cases()}
    assert load_results(tmp_path / "results.json") == {}
    save_results(tmp_path / "results.json", found)
    assert load_results(tmp_path / "results.json") == found


@pytest.mark.parametrize(
    ("predicted", "good"), [(999, False), (1000, True), (1030, True), (1031, False)]
)
def test_a_prediction_may_be_three_percent_over_and_never_under(predicted: int, good: bool) -> None:
    assert verdict(result(next(cases()), predicted, 1000)) is good


def test_the_table_has_a_row_for_each_result_in_the_order_of_the_cases() -> None:
    found = {case.name: result(case, 1010, 1000) for case in reversed(list(cases()))}
    text = table(found)
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 60
    assert rows[0].startswith("| Qwen3.5-27B | 8k | bf16 | 24 | dense |")
    assert "| +1.00 % |" in rows[0]
    assert "60 cases, 2026-11-18: the prediction is +1.00 to +1.00 %" in text
