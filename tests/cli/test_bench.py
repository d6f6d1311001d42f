"""`headroom bench`: kernels alone, whole models, and the comparison with a peer."""

import json
from pathlib import Path

import pytest

from headroom.cli.bench import BenchFlags, bench_settings
from headroom.cli.main import run_command
from headroom.kernels.native import measure, module
from tests.bench.test_peer import calls, fake_bench

TINY = [
    "--prompts", "16", "--contexts", "8", "--batch", "1,2", "--tokens", "2", "--rounds", "1",
    "--threads", "1",
]  # fmt: skip
F32_NOTE = "llama-bench has its cache in f16, where ours is f32, which it does not take"
needs_module = pytest.mark.skipif(module.MODULE is None, reason="the C++ module was not built")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings that take a second, not a minute, and a separate home folder."""
    monkeypatch.setattr(measure, "TOUCHED_BYTES", 8 << 20)
    monkeypatch.setattr(measure, "SIZE", 512)
    monkeypatch.setattr(measure, "EXPERTS", 16)
    monkeypatch.setattr(measure, "TIMED_ROUNDS", 1)
    monkeypatch.setenv("HEADROOM_HOME", str(tmp_path / "home"))


@needs_module
def test_every_kernel_has_a_speed_and_a_share(capsys: Captured) -> None:
    assert run_command(["bench", "cpu", "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["threads"] == 1
    assert report["isa"] in module.MODULE.isas()
    names = [row["name"] for row in report["kernels"]]
    assert names[0] == "read"
    assert {"q4_k x int8, one row", "q4_k x f32, one row", "f16 x f32, one row"} <= set(names)
    read = report["kernels"][0]["gb_per_s"]
    for row in report["kernels"]:
        assert row["gb_per_s"] > 0
        assert row["share"] == pytest.approx(row["gb_per_s"] / read)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--quick", "--only", "decode", "--no-parts"], "--only, --quick, --no-parts"),
        (["--compare", "llama-bench", "/none"], "--compare"),
        (["--device", "cuda:0"], "--device"),
        (["--routing-trace", "x"], "--routing-trace"),
        (["--schema", "--schema-file", "x.json"], "--schema, --schema-file"),
    ],
)
def test_kernels_alone_take_no_flags_of_a_model(
    flags: list[str], told: str, capsys: Captured
) -> None:
    assert run_command(["bench", "cpu", *flags]) == 2
    assert capsys.readouterr().err == (
        "error: bench cpu measures the CPU kernels without a model, and takes no "
        f"{told}. It takes --threads, --pin-threads and --json.\n"
    )


@needs_module
def test_the_table_names_the_instruction_set(capsys: Captured) -> None:
    assert run_command(["bench", "cpu", "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    assert "experts q4_k/q6_k" in shown
    assert "of read bandwidth" in shown


def test_without_the_module_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(module, "MODULE", None)
    monkeypatch.setattr(module, "MISSING", "not built; there was no C++ compiler")
    assert run_command(["bench", "cpu"]) == 1
    assert capsys.readouterr().err == (
        "error: There are no C++ kernels to measure. "
        "The module is not built; there was no C++ compiler.\n"
    )


def test_a_synthesised_model_is_written_measured_and_compared(
    tmp_path: Path, capsys: Captured
) -> None:
    peer = str(fake_bench(tmp_path))
    command = ["bench", "synth:qwen3:q8_0", *TINY, "--compare", "llama-bench", peer, "--json"]
    assert run_command(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["file"] == "qwen3-tiny-q8_0.gguf"
    assert (tmp_path / "home" / "synth" / "qwen3-tiny-q8_0.gguf").is_file()
    assert [one["batch"] for one in found["decodes"]] == [1, 2]
    compare = found["compare"]
    assert compare["peer"] == "llama.cpp abc (7)"
    assert [compare[name] for name in ("backends", "gpu", "cpu")] == ["CUDA", "", "Fast CPU"]
    assert (compare["runs"], compare["notes"]) == (2, [F32_NOTE])
    for row, theirs in zip(found["compare"]["figures"], (100, 10), strict=True):
        assert row["peer_runs"] == [theirs, theirs]  # before our model was loaded, and after
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / theirs)
    assert len(calls(tmp_path)) == 4


def test_figures_stay_where_the_peer_fails_after_them(tmp_path: Path, capsys: Captured) -> None:
    peer = fake_bench(tmp_path, fails_after=1)
    flags = ["--json", "--compare", "llama-bench", str(peer), "--patience", "0.01"]
    assert run_command(["bench", "synth:qwen3:q8_0", *TINY, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["peer_runs"] for row in found["compare"]["figures"]] == [[100.0]]
    assert found["compare"]["runs"] == 1
    late, unasked = (text for text in found["left_out"] if text.startswith("llama-bench"))
    assert late.startswith(f"llama-bench, second time: {peer} ended with 9: no memory. Try it")
    assert unasked.startswith("llama-bench, decode after 8: its prompt would take 0 s and may")


def test_a_peer_that_computed_elsewhere_is_flagged(tmp_path: Path, capsys: Captured) -> None:
    peer = str(fake_bench(tmp_path, gpu="Vulkan0"))
    flags = ["--only", "prompts", "--compare", "llama-bench", peer]
    assert run_command(["bench", "synth:qwen3:q8_0", *TINY, *flags]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "llama.cpp abc (7), CUDA on Vulkan0" in shown
    assert (
        "note: llama-bench ran CUDA on Vulkan0 and headroom on cpu: the ratios compare a GPU with "
        "a CPU, not two programs" in shown
    )


def test_the_tables_show_speeds_parts_memory_and_what_is_left_out(
    tmp_path: Path, capsys: Captured
) -> None:
    flags = [*TINY, "--prompts", "16,300", "--context", "128"]
    peer = str(fake_bench(tmp_path))
    assert run_command(["bench", "synth:qwen35", *flags, "--compare", "llama-bench", peer]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "prompt of 16", "batch 2 after 8", "of limit", "Tflop/s", "recurrent", "gaps",
        "a step of 16 rows of one sequence after", "x that of one row",
        "against llama.cpp abc (7), CUDA on Fast CPU", "memory: ", "planned", "note: ",
        "s (planning ", " of weights ", "compiling and capturing 0.0, other ",
        "left out: prompt of 300: the context holds 128",
    ):  # fmt: skip
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["synth:gpt"], "'gpt' is no model to synthesise and run."),
        (["--batch", "1,x"], "--batch is '1,x'. Write whole numbers with commas"),
        (["--only", "verify"], "--only verify has verify without decode, whose steps it looks"),
        (["--only", "parts", "--no-parts"], "--only and --no-parts leave nothing to measure."),
        (["--kernels", "triton", "--device", "cpu"], "Triton's kernels run on GPUs, and no layer"),
        (["--tokens", "0"], "--tokens is 0. Write whole numbers above 0."),
        (["--compare", "llama-bench", "/none"], "There is no program /none."),
        (["--compare", "other", "/none"], "--compare other is not known."),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], words: str, capsys: Captured) -> None:
    given = arguments if arguments[0].startswith("synth") else ["synth:qwen3", *arguments]
    assert run_command(["bench", *given]) == 2
    assert capsys.readouterr().err.startswith(f"error: {words}")


def test_a_model_that_is_not_there_is_refused(capsys: Captured) -> None:
    assert run_command(["bench", "nothing.gguf"]) == 1
    assert "There is no file, folder or known model 'nothing.gguf'" in capsys.readouterr().err


def test_flags_change_what_the_defaults_measure() -> None:
    usual = bench_settings(BenchFlags())
    assert usual.prompts == (512, 2048)
    assert usual.contexts == (32, 16384)
    assert {1, 4, 16} <= set(usual.batches)
    assert usual.tokens == 128
    quick = bench_settings(BenchFlags(quick=True, batch="3", patience=7.0))
    assert quick.batches == (3,)
    assert quick.patience_s == 7.0
    assert max(quick.contexts) < 16384
    assert usual.only == quick.only == ("prompts", "decode", "verify", "parts")
    assert bench_settings(BenchFlags(only="decode, parts")).only == ("decode", "parts")
    assert bench_settings(BenchFlags(parts=False)).only == ("prompts", "decode", "verify")
    more = bench_settings(BenchFlags(prefix=True, agent=True, only="prompts,agent")).only
    assert more == ("prompts", "agent", "prefix")
    assert bench_settings(BenchFlags(agent=True)).only == (*usual.only, "agent")
    assert (usual.agent_turns, usual.agent_tokens) == (12, 12000)
    assert quick.agent_tokens < 2000


def test_a_schema_is_the_typical_one_or_a_file_s(tmp_path: Path) -> None:
    assert bench_settings(BenchFlags()).schema is None
    typical = bench_settings(BenchFlags(schema=True)).schema
    assert typical is not None
    assert typical["type"] == "object"
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    assert bench_settings(BenchFlags(schema_file=file)).schema == {"type": "integer"}


@pytest.mark.parametrize(
    ("text", "told"), [(None, "No such file"), ("{", "not a JSON file"), ("[1]", "no JSON object")]
)
def test_a_schema_file_that_holds_no_schema_is_refused(
    text: str | None, told: str, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "schema.json"
    if text is not None:
        file.write_text(text)
    assert run_command(["bench", "synth:llama", "--schema-file", str(file)]) == 2
    assert told in capsys.readouterr().err


def test_decoding_under_a_schema_has_a_table(capsys: Captured) -> None:
    flags = ["--only", "decode", "--schema"]
    assert run_command(["bench", "synth:llama", *TINY, *flags]) == 0
    printed = capsys.readouterr().out
    assert "decoding under a JSON schema" in printed
    assert "loss" in printed


def test_prefixes_and_an_agent_s_session_have_tables(capsys: Captured) -> None:
    flags = ["--only", "prefix", "--agent", "--quick"]
    assert run_command(["bench", "synth:llama", *TINY, *flags]) == 0
    printed = capsys.readouterr().out
    assert "other from the middle on" in printed
    assert "a session of an agent" in printed
    assert "4 of 4 answers equal" in printed
