"""The table of speeds with cold experts: its rows, its file of results, its verdicts."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.expert_speeds import (
    GROUPS,
    HEADS,
    ROWS,
    Figure,
    Outcome,
    chosen,
    figures_of,
    load_outcomes,
    save_outcomes,
    table,
    verdicts,
)

BY_NAME = {row.name: row for row in ROWS}


def outcome(name: str, by: float = 1.0, hit_rate: float = 0.9) -> Outcome:
    """Return the outcome of a row that is `by` times as fast as it must be, or has 100 tok/s."""
    figures = tuple(
        Figure(name, target.kind, target.number, by * (target.must or 100.0), hit_rate, 3e7)
        for target in BY_NAME[name].targets
    )
    return Outcome(name, "done", 1.0, "", figures)


def lines(*outcomes: Outcome) -> dict[tuple[str, str], dict[str, str]]:
    """Return the cells of the table's lines by run and figure, whose heads are the keys."""
    found = list(verdicts({one.row: one for one in outcomes}))
    cells = [dict(zip(HEADS, line.cells, strict=True)) for line in found]
    return {(one["run"], one["figure"]): one for one in cells}


def test_rows_have_names_of_their_own_and_every_group_has_some() -> None:
    assert len(BY_NAME) == len(ROWS)
    assert {row.group for row in ROWS} == {*GROUPS}
    assert [row.name for row in chosen("batches,card-8")] == [
        *("card-8", "card-12-many", "hot-many", "hot-many-first"),
    ]
    with pytest.raises(SystemExit, match="nothing is not known"):
        chosen("nothing")


def test_outcomes_are_read_again_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    found = {name: outcome(name) for name in ("card-12-many", "few-cold")}
    found["card-8"] = Outcome("card-8", "left out", 0.0, "no time")
    save_outcomes(path, found)
    assert load_outcomes(path) == found


@pytest.mark.parametrize(
    ("by", "hits", "verdict"),
    [(0.99, 0.9, "TOO SLOW"), (1.0, 0.9, "must"), (2.0, 0.9, "aim"), (1.0, 0.8, "TOO FEW HITS")],
)
def test_a_row_is_judged_by_its_speed_and_its_hits(by: float, hits: float, verdict: str) -> None:
    line = lines(outcome("40-first", by, hits))[BY_NAME["40-first"].told, "batch 1"]
    assert line["verdict"] == verdict
    assert line["over the link, a token"] == "30 MB"


def test_auto_is_compared_with_the_better_of_the_fixed_paths() -> None:
    stem = "busy-60%-even-"
    fixed = [outcome(stem + "gpu", 0.5), outcome(stem + "cpu", 1.0)]
    told = BY_NAME[stem + "auto"].told.replace("--cold auto", "auto over the better path")
    for by, verdict in ((0.94, "TOO SLOW"), (0.96, "must"), (1.2, "aim")):
        line = lines(*fixed, outcome(stem + "auto", by))[told, "batch 1"]
        assert (line["tok/s"], line["verdict"]) == (f"{by:.2f}x", verdict)
    assert lines(*fixed)[told, "batch 1"]["tok/s"] == "not run"


def test_the_table_has_a_line_for_each_figure_whatever_has_run() -> None:
    targets = sum(len(row.targets) for row in ROWS)
    ratios = sum(row.name.endswith("-auto") for row in ROWS)
    for known in ({}, {"40-first": outcome("40-first")}):
        assert len(table(known)) == 2 + targets + ratios
    left = lines(replace(outcome("few-cold"), status="left out", figures=()))
    assert left[BY_NAME["few-cold"].told, "prompt of 95"]["tok/s"] == "left out"


def test_figures_are_those_that_a_row_asks_for_beside_those_of_the_peer() -> None:
    use = {"hit_rate": 0.6, "cold_bytes_per_token": {"gpu": 1e6, "stream": 2e6, "cpu": 5e6}}
    report = {
        "decodes": [
            {"batch": 1, "tokens_per_s": 50.0, "experts": use},
            {"batch": 4, "tokens_per_s": 99.0, "experts": use},
        ],
        "prompts": [{"tokens": 95, "tokens_per_s": 700.0, "experts": None}],
        "compare": {
            "figures": [
                {"what": "prompt of 95", "peer_tokens_per_s": 80.0},
                {"what": "decode after 32", "peer_tokens_per_s": 20.0},
            ]
        },
    }
    assert figures_of(BY_NAME["xs2-60"], report) == [
        Figure("xs2-60", "decode", 1, 50.0, 0.6, 3e6, 20.0),
        Figure("xs2-60", "prompt", 95, 700.0, None, None, 80.0),
    ]
