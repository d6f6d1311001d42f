"""Comparison with llama-bench: it is found, measures the same things, and its output is checked."""

import json
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headroom.bench.figures import QUICK, DecodeFigure, Figures, PromptFigure
from headroom.bench.peer import (
    LlamaBench,
    PeerRun,
    PeerSetup,
    check_comparable,
    cold_layers,
    find_peer,
    ratios,
    setup_peer,
    unlike_note,
    visible_gpu,
)
from headroom.bench.traffic import Traffic
from headroom.errors import HeadroomError, OptionError
from headroom.families.synth.recipe import find_recipe
from headroom.formats.mixes import find_mix
from headroom.machine.targets import parse_device, plan_devices
from headroom.options import Options
from headroom.plan.plan import Plan, make_plan
from headroom.plan.shape import ModelShape
from headroom.plan.shaping import shape_of

FAKE = """#!{python}
import json, os, sys
given = sys.argv[1:]
seen = os.environ.get("CUDA_VISIBLE_DEVICES")
value = lambda flag: given[given.index(flag) + 1]
with open({log!r}, "a") as log:
    log.write(json.dumps([*given, f"seen={{seen}}"]) + "\\n")
if len(open({log!r}).readlines()) > {fails_after}:
    sys.exit(print("no memory", file=sys.stderr) or 9)
rows = []
if value("-n") == "0":
    rows = [{{"n_prompt": int(n), "n_depth": 0, "avg_ts": 100.0}} for n in value("-p").split(",")]
else:
    rows = [{{"n_prompt": 0, "n_depth": int(n), "avg_ts": 10.0}} for n in value("-d").split(",")]
facts = {{"build_commit": "abc", "build_number": 7, "backends": "CUDA", "cpu_info": "Fast CPU"}}
facts["gpu_info"] = {gpu!r} or ("H200" if seen else "")
print(json.dumps([row | facts for row in rows]))
"""


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def fake_bench(folder: Path, fails_after: int = 99, gpu: str = "") -> Path:
    """Write a llama-bench that answers at once; `gpu` is one that it sees whatever is hidden."""
    facts = {"python": sys.executable, "log": str(folder / "calls")}
    text = FAKE.format(**facts, fails_after=fails_after, gpu=gpu)
    return program(folder / "llama-bench", text)


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


SETUP = PeerSetup(("-ngl", "0", "-t", "3"), "", context=1024, chunk=256)
MODEL = Path("m.gguf")


def found_bench(folder: Path) -> LlamaBench:
    return find_peer("llama-bench", str(fake_bench(folder)))


def test_llama_bench_is_asked_for_the_same_prompts_and_contexts(tmp_path: Path) -> None:
    found = found_bench(tmp_path).run(MODEL, SETUP, QUICK)
    assert found == PeerRun(
        {128: 100.0, 512: 100.0}, {32: 10.0, 512: 10.0}, "llama.cpp abc (7)", "CUDA", "", "Fast CPU"
    )
    common = "-m m.gguf -o json -r 1 -ngl 0 -t 3 -b 512 -ub 512"
    assert [" ".join(call) for call in calls(tmp_path)] == [
        f"{common} -p 128,512 -n 0 seen=",
        f"{common} -p 0 -n 16 -d 32,512 seen=",
    ]


def test_llama_bench_sees_the_chosen_gpu_alone(tmp_path: Path) -> None:
    found = found_bench(tmp_path).run(MODEL, replace(SETUP, visible="2"), QUICK)
    assert [call[-1] for call in calls(tmp_path)] == ["seen=2"] * 2
    assert (found.gpu, found.where) == ("H200", "CUDA on H200")


@pytest.mark.parametrize(
    ("changed", "asked"),
    [
        ({"only": ("prompts", "parts")}, ["-p 128,512 -n 0"]),
        ({"only": ("decode",)}, ["-p 0 -n 16 -d 32,512"]),
        ({"prompts": (128, 1024)}, ["-p 128 -n 0", "-p 0 -n 16 -d 32,512"]),
        ({"prompts": (4096,), "contexts": (1024,)}, []),  # our context holds neither
    ],
)
def test_llama_bench_is_asked_only_for_what_we_measure(
    tmp_path: Path, changed: dict[str, Any], asked: list[str]
) -> None:
    found = found_bench(tmp_path).run(MODEL, SETUP, replace(QUICK, **changed))
    seen = calls(tmp_path) if asked else []
    assert ["-p" + " ".join(call).split(" -p")[1].removesuffix(" seen=") for call in seen] == asked
    assert found.left_out == ()
    assert asked or not (found.prompts or found.decodes)


def test_contexts_that_would_take_llama_bench_too_long_are_left_out(tmp_path: Path) -> None:
    found = found_bench(tmp_path).run(MODEL, SETUP, replace(QUICK, patience_s=5.0))
    assert list(found.decodes) == [32]
    assert found.left_out == (
        "llama-bench, decode after 512: its prompt would take 5 s and may take 5 s (--patience)",
    )


def test_llama_bench_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fake_bench(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_peer("llama-bench", "llama-bench").program == fake


def test_a_path_that_is_no_program_is_refused(tmp_path: Path) -> None:
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


def test_a_file_that_the_system_cannot_run_is_refused(tmp_path: Path) -> None:
    peer = find_peer("llama-bench", str(program(tmp_path / "bad", "\x7fnot a program")))
    with pytest.raises(OptionError, match="bad does not start: Exec format error"):
        peer.run(MODEL, SETUP, QUICK)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo no such flag >&2; exit 3", "ended with 3: no such flag. Try it alone: "),
        ("kill -ILL $$", "was ended by SIGILL: it said nothing"),
        ("exit 1", "ended with 1: it said nothing"),
        (
            "printf '\\377\\n' >&2; exit 1",
            "ended with 1: \ufffd. Try it alone: CUDA_VISIBLE_DEVICES= ",
        ),
        ("printf '\\377'", "does not answer as llama-bench does: JSONDecodeError"),
        ("echo '[{\"n_prompt\": Infinity}]'", "does not answer as llama-bench does: OverflowError"),
        ("echo hello", "does not answer as llama-bench does: JSONDecodeError"),
        ("echo '[]'", "does not answer as llama-bench does: KeyError.*middle of 2025"),
        ("echo '[{\"n_prompt\": 128}]'", "does not answer as llama-bench does: KeyError"),
        ("echo '3'", "does not answer as llama-bench does: TypeError"),
        (
            'echo \'[{"n_prompt": 128, "avg_ts": 0}, {"n_prompt": 512, "avg_ts": 1}]\'',
            "measured no speed for 128 tokens",
        ),
        (
            'echo \'[{"n_prompt": 128, "avg_ts": NaN}, {"n_prompt": 512, "avg_ts": 1e999}]\'',
            "measured no speed for 128,512 tokens",
        ),
    ],
)
def test_failures_and_strange_output_of_llama_bench_are_errors(
    tmp_path: Path, body: str, words: str
) -> None:
    peer = find_peer("llama-bench", str(program(tmp_path / "odd", f"#!/bin/sh\n{body}\n")))
    with pytest.raises(HeadroomError, match=words):
        peer.run(MODEL, SETUP, QUICK)


def test_a_file_whose_name_is_not_utf_8_has_its_figures(tmp_path: Path) -> None:
    rows = ", ".join(
        f'{{"n_prompt": {n}, "avg_ts": 5, "model_filename": "\\377"}}' for n in QUICK.prompts
    )
    peer = find_peer("llama-bench", str(program(tmp_path / "x", f"#!/bin/sh\nprintf '[{rows}]'")))
    found = peer.run(MODEL, SETUP, replace(QUICK, only=("prompts",)))
    assert found.prompts == {128: 5.0, 512: 5.0}


@pytest.mark.parametrize(
    ("gpu", "device", "words"),
    [
        ("", "cuda:0", "llama-bench ran CPU on Fast CPU and headroom on cuda:0"),
        ("H200", "cpu", "llama-bench ran CPU on H200 and headroom on cpu"),
        ("H200", "cuda:1", ""),
        ("", "cpu", ""),
    ],
)
def test_a_ratio_between_a_gpu_and_a_cpu_gets_a_note(gpu: str, device: str, words: str) -> None:
    run = PeerRun({512: 1.0}, {}, "x", "CPU", gpu, "Fast CPU")
    told = words and f"{words}: the ratios compare a GPU with a CPU, not two programs"
    assert unlike_note(run, device) == told
    assert unlike_note(replace(run, prompts={}), device) == ""  # there is no ratio


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


GPU = {"device": "cuda:0", "ram": "8GiB"}
CPU = {"device": "cpu", "ram": "8GiB", "kv_type": "bf16"}


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has two GPUs of 24 GiB, as far as plans know."""
    spec = parse_device("24GiB")
    local = "headroom.machine.targets.find_gpu"
    monkeypatch.setattr(local, lambda name, found: replace(spec, name=name))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def shape_and_plan(family: str = "llama", **settings: object) -> tuple[ModelShape, Plan, Options]:
    shape = shape_of("tiny", find_recipe(family, "tiny").dims, find_mix("q8_0"))
    options = Options(context=1024, parallel=1, chunk=256, **settings)  # type: ignore[arg-type]
    return shape, make_plan([shape], plan_devices(options), options), options


def setup_of(family: str = "llama", **settings: object) -> PeerSetup:
    shape, plan, options = shape_and_plan(family, **settings)
    return setup_peer(plan, shape, options)


def test_for_a_plan_on_the_cpu_llama_bench_sees_no_gpu() -> None:
    found = setup_of(device="cpu", ram="8GiB", kv_type="bf16", threads=3)
    flags = ("-ngl", "0", "-t", "3", "-fa", "1", "-ctk", "f16", "-ctv", "f16")
    assert found == PeerSetup(flags, "", context=1024, chunk=256)
    assert found.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "PATH" in found.environment


def test_a_cache_in_f32_is_one_in_f16_for_llama_bench() -> None:
    found = setup_of(device="cpu", ram="8GiB", k_type="f32", v_type="q8_0")
    assert found.flags[-4:] == ("-ctk", "f16", "-ctv", "q8_0")
    assert found.notes == (
        "llama-bench has its cache in f16, where ours is f32, which it does not take",
    )


def test_for_a_plan_on_a_gpu_llama_bench_has_all_layers_on_it_and_sees_no_other() -> None:
    found = setup_of(**GPU | {"device": "cuda:1"}, k_type="q8_0", v_type="q4_0", threads=2)
    flags = ("-ngl", "99", "-t", "2", "-fa", "1", "-ctk", "q8_0", "-ctv", "q4_0")
    assert (found.flags, found.visible, found.notes) == (flags, "1", ())


def test_gpus_are_counted_among_those_that_we_see() -> None:
    assert visible_gpu("cuda:1", {"CUDA_VISIBLE_DEVICES": "3, GPU-5f"}) == "GPU-5f"
    assert visible_gpu("cuda:2", {"CUDA_VISIBLE_DEVICES": ""}) == "2"
    assert visible_gpu("cuda:2", {}) == "2"


@pytest.mark.parametrize(("budget", "layers"), [("100%", 0), ("50%", 2), ("0%", 4)])
def test_as_many_experts_are_on_the_cpu_as_are_cold(budget: str, layers: int) -> None:
    shape, plan, options = shape_and_plan("qwen3moe", **GPU, expert_budget=budget, threads=1)
    assert len(shape.layers) == 4
    assert cold_layers(plan, shape) == layers
    found = setup_peer(plan, shape, options)
    assert found.flags[2:4] == (("-ncmoe", str(layers)) if layers else ("-t", "1"))
    device = plan.devices[0]
    cold = round(100 * (1 - device.hot_experts / device.total_experts))
    told = (
        f"llama-bench has all experts of its first {layers} layers on the CPU (-ncmoe {layers}), "
        f"{25 * layers} % of them; of ours {cold} % are cold, some of every layer"
    )
    assert found.notes == ((told,) if layers else ())


def test_experts_that_only_headroom_leaves_out_get_a_note() -> None:
    (note,) = setup_of("qwen3moe", **GPU, expert_budget="50%", cold="drop").notes
    assert note.endswith("of ours 50 % are left out and not computed, some of every layer")


def test_dense_layers_before_the_experts_count_too() -> None:
    shape, plan, _ = shape_and_plan("laguna", **GPU, expert_budget="90%")
    assert [bool(layer.experts) for layer in shape.layers[:2]] == [False, True]
    assert cold_layers(plan, shape) == 2  # one dense, and the nearest to a tenth of the others


def test_a_limit_of_memory_is_refused_where_it_cannot_be_compared() -> None:
    with pytest.raises(OptionError) as refused:
        setup_of(**GPU, device_memory="12GiB")
    assert str(refused.value) == (
        "llama-bench takes no --device-memory, and a dense model has no experts to leave in host "
        "memory. Leave out --device-memory, or --compare."
    )
    assert setup_of(**CPU, device_memory="12GiB").notes == ()
    assert setup_of("qwen3moe", **GPU, device_memory="12GiB").notes == (
        "--device-memory limits headroom alone; llama-bench has the whole GPU",
    )


def test_what_llama_bench_does_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"llama-bench reads \.gguf files, and .* is none"):
        check_comparable(tmp_path)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"")
    check_comparable(path)
