"""`headroom plan`: tables, JSON, and what happens when it does not fit."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from headroom.cli.main import run_command
from headroom.machine.catalogue import CATALOGUE
from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.units import MIB
from tests.plan.show.test_report import LINE_NAMES


def small_machine(options: Options) -> list[DeviceSpec]:
    size = 64 * MIB
    return [DeviceSpec(name="cpu", kind="cpu", total_bytes=size, available_bytes=size, cores=2)]


def test_people_see_every_line_of_the_plan(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", str(smollm2_path), "--context", "2048", "--parallel", "2"]) == 0
    shown = capsys.readouterr().out
    assert "context 2048, parallel 2" in shown
    assert [
        word for word in ("core_weights", "embeddings", "kv", "free") if word not in shown
    ] == []


def test_json_is_one_object_that_adds_up(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", str(smollm2_path), "--kv-type", "q8_0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["version"], report["fits"]) == (1, True)
    assert report["settings"]["k_type"] == report["settings"]["v_type"] == "q8_0"
    for device in report["devices"]:
        taken = sum(line["bytes"] for line in device["lines"])
        assert taken + device["free_bytes"] == device["total_bytes"]


def test_a_model_that_does_not_fit_gives_the_table_the_reason_and_3(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headroom.cli.plan.plan_devices", small_machine)
    assert run_command(["plan", str(smollm2_path), "--json"]) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["fits"] is False
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) == 1


def test_a_terminal_gets_colours_and_a_pipe_does_not(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR")
    assert run_command(["plan", str(smollm2_path)]) == 0
    assert "\x1b[" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run_command(["plan", str(smollm2_path)]) == 0
    assert "\x1b[" in capsys.readouterr().out


def test_a_plan_may_be_for_a_machine_that_is_not_at_hand(
    smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", str(smollm2_path), "--device", "24GiB", "--ram", "64GiB", "--json"]
    assert run_command(line) == 0
    report = json.loads(capsys.readouterr().out)
    assert [device["total_bytes"] for device in report["devices"]] == [24 * 1024 * MIB]
    assert report["host"]["total_bytes"] == 64 * 1024 * MIB


LARGE = ["plan", "qwen3.6-35b-a3b:q4_k_m", "--device", "12GiB", "--ram", "64GiB"]


def planned(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    """Return the JSON of a plan that fits."""
    assert run_command(["plan", *line, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


def test_the_json_has_exactly_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, *LARGE[1:], "--threads", "2", "--draft", "qwen3.6-35b-a3b-dflash:q8_0")
    text = Path(__file__).parents[2].joinpath("docs", "plan.md").read_text()
    schema = json.loads(text.split("```json\n")[1].split("```")[0])

    def compare(found: Any, documented: Any, where: str) -> None:
        if isinstance(documented, dict):
            assert set(found) == set(documented), where
            for key, value in documented.items():
                compare(found[key], value, f"{where}.{key}")
        elif isinstance(documented, list) and documented and isinstance(documented[0], dict):
            assert found, where
            for row in found:
                compare(row, documented[0], f"{where}[]")
        else:
            kinds = (int, float) if isinstance(documented, float) else type(documented)
            assert isinstance(found, kinds), where

    compare(report, schema, "plan")
    assert report["version"] == schema["version"] == 1
    names = {line["name"] for line in (*report["devices"][0]["lines"], *report["host"]["lines"])}
    assert names <= set(LINE_NAMES)
    assert {"hot_experts", "cold_experts", "draft_weights", "features"} <= names
    assert all(f"| `{name}` |" in text for name in LINE_NAMES)


def test_every_flag_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(
        capsys, "qwen3.6-27b:q4_k_m", "--device", "16GiB", "--device", "rtx2080ti-22gb,rtx3090",
        "--ram", "64GiB", "--context", "4096", "--parallel", "2", "--k-type", "q5_1",
        "--v-type", "q4_0", "--chunk", "256", "--split", "1,1,2", "--activation-dtype", "f32",
        "--activation-model", "published", "--draft", "qwen3.6-27b-dflash",
        "--feature-dtype", "q8_0", "--cache-ram", "4GiB",
    )  # fmt: skip
    settings = report["settings"]
    assert [settings[key] for key in ("context", "parallel", "chunk", "k_type", "v_type")] == [
        4096, 2, 256, "q5_1", "q4_0",
    ]  # fmt: skip
    assert [device["layers"] for device in report["devices"]] == [[0, 15], [16, 31], [32, 63]]
    assert settings["activation"] == "f32"
    assert [device["dtype"] for device in report["devices"]] == ["bf16", "f16", "bf16"]
    assert report["precision"]["activation"] == "f16"  # of an sm75
    lines = {line["name"]: line for line in report["devices"][2]["lines"]}
    assert "published formula" in lines["workspace"]["why"]
    assert lines["features"]["bytes"] == 2 * 258 * 5120 * 34 // 32  # of the layers 46 and 61
    host = {line["name"]: line["bytes"] for line in report["host"]["lines"]}
    each = 150_994_944 + 48 * 3 * 10240 * 4 + 248320 * 4
    each += 4 * 33 * 64 * 8 * (4 * 24 + 4 * 18)  # the draft's windows, keys q5_1 and values q4_0
    assert host["snapshots"] == (2 << 30) // each * each  # half of --cache-ram; pages have the rest
    assert "cached keys are kept in q5_1" in report["lossy"]
    assert "cached values are kept in q4_0" in report["lossy"]


def test_an_expert_budget_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(capsys, *LARGE[1:], "--expert-budget", "20%", "--expert-policy", "static")
    hot = {line["name"]: line["bytes"] for line in report["devices"][0]["lines"]}["hot_experts"]
    cold = {line["name"]: line["bytes"] for line in report["host"]["lines"]}["cold_experts"]
    assert hot == pytest.approx(0.2 * (hot + cold), rel=0.01)


def test_a_picture_is_drawn_beside_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*LARGE, "--svg", str(tmp_path / "plan.svg")]) == 0
    assert ET.parse(tmp_path / "plan.svg").getroot().tag.endswith("svg")
    assert "qwen3.6-35b-a3b:q4_k_m fits" in capsys.readouterr().out
    assert run_command([*LARGE, "--svg", str(tmp_path / "no" / "plan.svg")]) == 2
    assert "is in a folder that does not exist" in capsys.readouterr().err


def test_a_picture_takes_no_models_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF and all the rest")
    assert run_command([*LARGE, "--svg", str(model)]) == 2
    assert capsys.readouterr().err == (
        f"error: {model} is there and is not a picture file; it is not written over. "
        "Name another file with --svg.\n"
    )
    assert model.read_bytes() == b"GGUF and all the rest"


def test_one_line_is_explained_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*LARGE, "--context", "4096", "--explain", "kv"]) == 0
    assert capsys.readouterr().out == (
        "kv on 12.00GiB: 83,886,080 bytes (80.0 MiB), 10 layers x 64 pages of 64 tokens, "
        "keys bf16, values bf16\n"
        "    10 full-attention layers x 64 pages x 64 tokens x 2 KV heads x 1,024 bytes = "
        "83,886,080 bytes (512 of a key of 256 values in bf16 and 512 of a value of 256 in bf16)\n"
    )


def test_contexts_and_devices_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "laguna-xs.2", "--ram", "64GiB"]
    assert run_command([*line, "--compare", "4096,32768", "--compare", "8GiB,12GiB+12GiB"]) == 0
    shown = capsys.readouterr().out
    assert shown.split("\n")[0].split("  ")[-1].strip() == "12GiB+12GiB 32768"
    rows = {row[:16].strip(): row[16:].split() for row in shown.splitlines()}
    assert rows["context"] == ["4096", "32768"] * 2
    assert rows["fits"] == ["yes"] * 4
    assert run_command([*line, "--device", "24GiB", "--compare", "4096,8192", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [plan["label"] for plan in report["plans"]] == ["4096", "8192"]
    assert [plan["settings"]["context"] for plan in report["plans"]] == [4096, 8192]


def test_a_comparison_is_drawn_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "compared.svg"
    line = ["plan", "laguna-xs.2", "--ram", "64GiB", "--compare", "1GiB,12GiB", "--svg"]
    assert run_command([*line, str(picture)]) == 0
    assert "hot experts" in capsys.readouterr().out
    texts = [x.text for x in ET.parse(picture).getroot().iter() if x.tag.endswith("text")]
    assert {"1 of 2 fit", "1GiB", "12GiB", "does not fit"} <= set(texts)
    assert run_command([*line, str(tmp_path / "no" / "c.svg")]) == 2
    assert "is in a folder that does not exist" in capsys.readouterr().err


def test_the_catalogue_is_listed_with_names_that_a_plan_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command(["plan", "--devices", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["devices"]
    assert [row["name"] for row in listed] == [entry.name for entry in CATALOGUE]
    first = next(row for row in listed if row["name"] == "rtx3060-12gb")
    assert first["memory_bytes"] == 12 << 30 > first["available_bytes"]
    assert (first["bandwidth_bytes_per_s"], first["link_bytes_per_s"]) == (360e9, 32e9)
    assert next(x for x in listed if x["name"] == "m4max-128gb")["link_bytes_per_s"] is None
    assert run_command(["plan", "--devices"]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["name", "memory"]
    assert [row.split()[0] for row in rows] == [row["name"] for row in listed]
    assert f"{len(listed)} devices" in last
    shown = next(row for row in rows if row.startswith("rtx3060-12gb"))
    assert shown.split()[1:7] == ["12.00", "GiB", "360", "GB/s", "32", "GB/s"]
    assert max(map(len, rows)) <= 80


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--explain", "kv", "--json"], "--explain prints one thing alone: --json would"),
        (["--emit", "llama.cpp", "--compare", "8GiB"], "--emit prints one thing alone: --compare"),
        (["--explain", "kv", "--emit", "llama.cpp"], "--explain prints one thing alone: --emit"),
        (["--explain", "kv", "--svg", "x.svg"], "--explain prints one thing alone: --svg would"),
    ],
)
def test_a_flag_that_another_one_would_silence_is_refused(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*LARGE, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err


def test_a_comparison_in_which_nothing_fits_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "qwen3.6-27b:bf16", "--ram", "64GiB", "--compare"]
    assert run_command([*line, "8GiB,12GiB"]) == 3
    assert "no" in capsys.readouterr().out
    assert run_command([*line, "12GiB,80GiB"]) == 0
    assert run_command([*line, "12GiB,,"]) == 2


def test_another_programs_command_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*LARGE, "--emit", "llama.cpp"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("llama-server -m qwen3.6-35b-a3b-q4_k_m.gguf -c 8192 -np 1")
    assert "--n-cpu-moe" in shown


def test_three_ways_out_are_named_and_each_of_them_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["plan", "qwen3-30b-a3b:q8_0", "--ram", "16GiB", "--device", "8GiB"]
    assert run_command(line) == 3
    captured = capsys.readouterr()
    assert "missing" in captured.out
    assert len(captured.err.splitlines()) == 1
    assert "the biggest line is cold_experts" in captured.err
    ways = captured.err.split("Try ")[1].strip().rstrip(".").split(" or ")
    assert len(ways) == 3
    for way in ways:
        words = way.split()
        changed = line[:1] + words + line[2:] if len(words) == 1 else [*line, *words]
        if words[0] in line:
            changed = [*line]
            changed[line.index(words[0]) + 1] = words[1]
        assert run_command(changed) == 0, way


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--kv-type", "q3"], "--kv-type is 'q3'. Choose from f32, f16, bf16, q8_0, q5_1,"),
        (["--context", "0"], "--context is 0; it must be at least 16."),
        (["--context", "-5"], "--context is -5; it must be at least 16."),
        (["--parallel", "0"], "--parallel is 0; it must be at least 1."),
        (["--chunk", "0"], "--chunk is 0; it must be at least 1."),
        (["--context", "999999999"], "is more than the 262144 tokens"),
        (["--device", "rtx9999"], "--device rtx9999 is unknown. Choose"),
        (["--device", "12 parsecs"], "is not a size. Write a number and a unit"),
        (["--device", "0GiB"], "has no memory"),
        (["--ram", "0GiB"], "--ram is '0GiB'"),
        (["--ram", "-1GiB"], "is not a size"),
        (["--expert-budget", "101%"], "--expert-budget is '101%'. Write 0% to 100%"),
        (["--cache-ram", "many"], "is not a size"),
        (["--split", "1,2"], "--split has 2 shares for 1 devices"),
        (["--split", "0"], "--split is '0'. Write positive numbers"),
        (["--draft", "qwen3-0.6b"], "is not a draft"),
        (["--draft", "nothing"], "no file, folder or known model 'nothing'"),
        (["--feature-dtype", "q4_0"], "Choose from f32, f16, bf16, q8_0."),
        (["--activation-dtype", "q4_0"], "Choose from f32, bf16, f16."),
        (["--activation-model", "guess"], "Choose from own, published."),
        (["--explain", "kvs"], "The plan has no line 'kvs'. It has core_weights"),
        (["--context", "4096", "--cache-tokens", "64"], "cannot hold one conversation"),
    ],
)
def test_bad_input_is_one_line_with_the_right_values(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--device", "24GiB"] if "--device" not in flags else []
    missing = flags == ["--draft", "nothing"]  # a wrong file is an error, a wrong value a usage
    assert run_command(["plan", "qwen3.6-27b", *given, *flags]) == (1 if missing else 2)
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("name", ["missing.gguf", "./missing", "no-such-model"])
def test_a_missing_model_has_the_same_exit_code_in_every_command(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(tmp_path)]
    for line in (["run", name, "hello"], ["plan", name], ["experts", name], ["serve", name]):
        if line[0] == "run" and name == "no-such-model":
            continue  # a word that is no path is the prompt of the default model
        assert run_command([*line, *home]) == 1
        assert f"There is no file, folder or known model '{name}'" in capsys.readouterr().err


@pytest.mark.parametrize(("context", "code"), [(8191, 0), (8192, 0), (8193, 2)])
def test_a_context_above_the_models_limit_is_a_wrong_option_and_not_a_model_that_does_not_fit(
    context: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["plan", "smollm2-135m", "--device", "24GiB", "--context", str(context)]
    assert run_command(line) == code
    assert ("is more than the 8192 tokens" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize(
    ("flags", "threads"),
    [
        (["--device", "cpu"], True),
        (["--device", "rtx3060-12gb"], False),
        (["--device", "12GiB"], False),
        (["--device", "12GiB,cpu"], False),
        (["--device", "cpu", "--ram", "64GiB"], False),
        (["--device", "rtx3060-12gb", "--threads", "7"], True),
    ],
)
def test_a_command_for_another_machine_has_its_threads_or_none(
    flags: list[str], threads: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", "smollm2-135m", *flags, "--emit", "llama.cpp"]) == 0
    words = capsys.readouterr().out.split()
    assert ("-t" in words) == threads
    if "--threads" in flags:
        assert words[words.index("-t") + 1] == "7"


def test_a_built_in_model_is_planned_without_the_packages_that_take_long_to_import() -> None:
    program = (
        "import sys\n"
        "from headroom.cli.main import run_command\n"
        f"assert run_command({[*LARGE, '--json']!r}) == 0\n"
        "print(*{'torch', 'numpy', 'rich', 'jinja2'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "\n"
    assert json.loads(done.stdout)["fits"]


def test_the_command_of_llama_cpp_names_the_file_or_what_it_would_be_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "in" / "model.gguf", tmp_path / "folder"
    path.parent.mkdir()
    assert run_command(["synth", "llama", str(path)]) == 0
    line = ["synth", "llama", str(folder), "--format", "safetensors", "--quant", "F32"]
    assert run_command(line) == 0
    (tensors,) = folder.glob("*.safetensors")
    for model, shown in (
        (str(path), str(path)),
        (str(path.parent), str(path)),
        (str(folder), "folder.gguf"),
        (str(tensors), "folder.gguf"),
        ("qwen3-0.6b:q4_k_m", "qwen3-0.6b-q4_k_m.gguf"),
    ):
        capsys.readouterr()
        assert run_command(["plan", model, "--device", "24GiB", "--emit", "llama.cpp"]) == 0
        assert capsys.readouterr().out.startswith(f"llama-server -m {shown} -c ")
