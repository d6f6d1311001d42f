"""llama-bench beside us: found, asked the same questions, and not believed blindly."""

import json
import stat
import sys
from pathlib import Path

import pytest

from headroom.bench.figures import QUICK, DecodeFigure, Figures, PromptFigure
from headroom.bench.peer import PeerRun, check_comparable, find_peer, plan_flags, ratios
from headroom.bench.traffic import Traffic
from headroom.errors import HeadroomError, OptionError
from headroom.memory.mixes import find_mix
from headroom.memory.plan import Plan, make_plan
from headroom.memory.shaping import shape_of
from headroom.memory.targets import plan_devices
from headroom.models.synth.recipe import find_recipe
from headroom.options import Options

FAKE = """#!{python}
import json, sys
given = sys.argv[1:]
value = lambda flag: given[given.index(flag) + 1]
with open({log!r}, "a") as log:
    log.write(json.dumps(given) + "\\n")
rows = []
if value("-n") == "0":
    rows = [{{"n_prompt": int(n), "n_depth": 0, "avg_ts": 100.0}} for n in value("-p").split(",")]
else:
    rows = [{{"n_prompt": 0, "n_depth": int(n), "avg_ts": 10.0}} for n in value("-d").split(",")]
print(json.dumps([row | {{"build_commit": "abc", "build_number": 7}} for row in rows]))
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def fake_bench(folder: Path) -> Path:
    log = str(folder / "calls")
    return program(folder / "llama-bench", FAKE.format(python=sys.executable, log=log))


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(device="cpu", ram="8GiB", kv_type="bf16", threads=3)


def plan_of(**settings: object) -> Plan:
    dims = find_recipe("llama", "tiny").dims
    shape = shape_of("tiny", dims, find_mix("q8_0"))
    options = Options(context=1024, parallel=1, chunk=256, **settings)  # type: ignore[arg-type]
    return make_plan([shape], plan_devices(options), options)


def test_it_is_asked_for_the_same_prompts_and_contexts(tmp_path: Path, plan: Plan) -> None:
    peer = find_peer("llama-bench", str(fake_bench(tmp_path)))
    found = peer.run(Path("m.gguf"), plan, QUICK)
    assert found == PeerRun({128: 100.0, 512: 100.0}, {32: 10.0, 512: 10.0}, "llama.cpp abc (7)")
    plan_part = "-ngl 0 -t 3 -fa 1 -ctk f16 -ctv f16"
    common = f"-m m.gguf -o json -r 1 {plan_part} -b 512 -ub 512"
    assert [" ".join(call) for call in calls(tmp_path)] == [
        f"{common} -p 128,512 -n 0",
        f"{common} -p 0 -n 16 -d 32,512",
    ]


def test_on_a_gpu_all_layers_are_there() -> None:
    flags = plan_flags(plan_of(device="24GiB"))
    assert flags[:2] == ["-ngl", "99"]


def test_it_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_bench(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_peer("llama-bench", "llama-bench").program == fake


def test_what_is_no_program_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    for kind, path, words in (
        ("vllm", "x", "--compare vllm is not known. Known: llama-bench."),
        ("llama-bench", "/none", "There is no program /none. Write --compare llama-bench PATH."),
        ("llama-bench", str(plain), f"{plain} is not executable. Name the llama-bench binary."),
        ("llama-bench", str(tmp_path), f"{tmp_path} is a folder. Name the llama-bench binary."),
    ):
        with pytest.raises(OptionError) as refused:
            find_peer(kind, path)
        assert str(refused.value) == words


def test_a_file_that_the_system_cannot_run_is_refused(tmp_path: Path, plan: Plan) -> None:
    peer = find_peer("llama-bench", str(program(tmp_path / "bad", "\x7fnot a program")))
    with pytest.raises(OptionError, match="bad does not start: Exec format error"):
        peer.run(Path("m.gguf"), plan, QUICK)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo no such flag >&2; exit 3", "ended with 3: no such flag. Try it alone: "),
        ("exit 1", "ended with 1: it said nothing"),
        ("echo hello", "does not answer as llama-bench does: JSONDecodeError"),
        ("echo '[]'", "does not answer as llama-bench does: KeyError.*middle of 2025"),
        ("echo '[{\"n_prompt\": 128}]'", "does not answer as llama-bench does: KeyError"),
        ("echo '3'", "does not answer as llama-bench does: TypeError"),
        (
            'echo \'[{"n_prompt": 128, "avg_ts": 0}, {"n_prompt": 512, "avg_ts": 1}]\'',
            "measured no speed for 128 tokens",
        ),
    ],
)
def test_failures_and_strange_answers_are_told(
    tmp_path: Path, plan: Plan, body: str, words: str
) -> None:
    peer = find_peer("llama-bench", str(program(tmp_path / "odd", f"#!/bin/sh\n{body}\n")))
    with pytest.raises(HeadroomError, match=words):
        peer.run(Path("m.gguf"), plan, QUICK)


def test_only_gguf_files_can_be_compared(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"llama-bench reads \.gguf files, and .* is none"):
        check_comparable(tmp_path)


def test_ratios_are_to_the_better_run_of_the_peer() -> None:
    figures = Figures(
        prompts=[PromptFigure(tokens=512, seconds=2.0, operations=1.0)],
        decodes=[
            DecodeFigure(
                batch=batch, context=32, mean_context=40.0, step_s=0.5, pipeline_s=0.4,
                traffic=Traffic(1, 0, 0, 0, 0),
            )
            for batch in (1, 4)
        ],
    )  # fmt: skip
    runs = [PeerRun({512: 100.0}, {32: 4.0}, "x"), PeerRun({512: 128.0}, {32: 1.0}, "x")]
    assert [(row["what"], row["ratio"]) for row in ratios(figures, runs)] == [
        ("prompt of 512", 2.0),
        ("decode after 32", 0.5),  # it has no batches
    ]
    assert ratios(figures, [PeerRun({}, {}, "x")]) == []
