"""The plan as text and as JSON, and the speeds it predicts."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from headroom.errors import FormatError, OptionError
from headroom.machine.calibration import Speeds, load_speeds, save_speeds, with_speeds
from headroom.options import Options
from headroom.plan.plan import Plan, make_plan
from headroom.plan.show.emit import llama_server_command
from headroom.plan.show.report import explain_line, plan_json
from headroom.plan.show.table import compare_table, plan_table, plan_text
from tests.plan.shapes import cpu, gpu, host, laguna, smollm2

LINE_NAMES = {
    "core_weights", "hot_experts", "cold_experts", "embeddings", "head", "kv", "recurrent_state",
    "verify_scratch", "staging", "workspace", "logits", "draft_weights", "draft_kv",
    "feature_ring", "graphs", "runtime", "reserve", "snapshots",
    "expert_staging", "expert_spare",
}  # fmt: skip


def hybrid_plan(gibibytes: float = 12) -> Plan:
    return make_plan([laguna()], [gpu(gibibytes), host(64)], Options())


def test_the_json_has_the_keys_that_scripts_rely_on() -> None:
    report = json.loads(json.dumps(plan_json(hybrid_plan())))
    assert report["version"] == 1
    assert report["fits"] is True
    assert report["settings"]["context"] == 8192
    (device,) = report["devices"]
    assert set(device) == {
        "name", "total_bytes", "lines", "free_bytes", "layers", "hot_experts", "total_experts",
    }  # fmt: skip
    assert device["layers"] == [0, 39]
    assert device["total_bytes"] == device["free_bytes"] + sum(x["bytes"] for x in device["lines"])
    assert {"total_bytes", "lines"} <= set(report["host"])
    assert set(report["predicted"]) == {
        "decode_tokens_per_s", "prefill_tokens_per_s", "bound_by", "estimate",
    }  # fmt: skip
    names = {line["name"] for line in device["lines"] + report["host"]["lines"]}
    assert names <= LINE_NAMES
    assert all(line["why"] for line in device["lines"])


def test_the_json_is_the_plan_field_by_field() -> None:
    plan = make_plan(
        [laguna()], [gpu(9), gpu(7, "cuda:1"), host(64)], Options(kv_type="q8_0", threads=3)
    )
    report, used, found = plan_json(plan), plan.settings, plan.predicted
    assert report["model"] == plan.model
    assert report["settings"] == {
        "context": used.context, "parallel": used.parallel, "chunk": used.chunk,
        "cache_tokens": used.cache_tokens, "page_size": 64, "pages": used.cache_tokens // 64,
        "k_type": "q8_0", "v_type": "q8_0", "dtype": "bf16", "activation": used.handover_type,
        "weights": "packed", "threads": 3, "pin_threads": False,
    }  # fmt: skip
    places = [*zip(report["devices"], plan.devices, strict=True), (report["host"], plan.host)]
    for shown, place in places:
        assert (shown["total_bytes"], shown["free_bytes"]) == (place.total_bytes, place.free_bytes)
        assert shown["lines"] == [
            {"name": line.name, "bytes": line.bytes, "why": line.why} for line in place.lines
        ]
    for shown, device in zip(report["devices"], plan.devices, strict=True):
        assert (shown["name"], shown["layers"]) == (device.name, list(device.layers))
        assert shown["hot_experts"] == sum(device.hot_by_layer)
        assert shown["total_experts"] == device.total_experts
    assert report["precision"] == {
        "activation": plan.precision.type, "reason": plan.precision.reason,
    }  # fmt: skip
    assert report["lossy"] == list(plan.lossy) != []
    assert report["notes"] == list(plan.notes)
    assert report["predicted"] == {
        "decode_tokens_per_s": round(found.decode_tokens_per_s, 2),
        "prefill_tokens_per_s": round(found.prefill_tokens_per_s, 2),
        "bound_by": found.bound_by, "estimate": True,
    }  # fmt: skip


def test_the_text_names_every_line_and_the_verdict() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options(kv_type="q8_0"))
    text = plan_text(plan)
    assert text.startswith("smollm2 fits: context 8192, parallel 4, chunk 512, cache of 32768")
    assert all(f"\n{line.name} " in text for line in plan.devices[0].lines)
    assert "lossy: cached keys are kept in q8_0" in text
    assert "(estimated), bound by memory of cpu" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("options", "shown", "threads"),
    [
        (Options(), "; 4 threads\n", 4),
        (Options(threads=1), "; 1 thread\n", 1),
        (Options(threads=3, pin_threads=True), "; 3 threads, pinned\n", 3),
        (Options(device="rtx3060-12gb", threads=3), "; 3 threads\n", 3),
        (Options(device="rtx3060-12gb"), None, None),
        (Options(ram="24GiB"), None, None),
    ],
)
def test_a_plan_shows_the_threads_of_this_machine_only(
    options: Options, shown: str | None, threads: int | None
) -> None:
    plan = make_plan([smollm2()], [cpu(24)], options)
    text = plan_text(plan)
    assert shown in text if shown else "thread" not in text.partition("\nweights")[2]
    assert plan_json(plan)["settings"]["threads"] == threads


def test_the_memory_map_has_the_same_width_for_every_device() -> None:
    bars = [row for row in plan_text(hybrid_plan()).splitlines() if row.startswith("[")]
    assert [len(bar) for bar in bars] == [62]
    assert "k" in bars[0]


def test_the_table_has_colours_on_a_terminal() -> None:
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=100).print(plan_table(hybrid_plan()))
    assert "\x1b[" in out.getvalue()


def test_decode_speed_is_bandwidth_over_bytes() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options(context=256, parallel=1))
    # 0.7 x 40 GB/s over all unpacked weights and half of the context.
    read = 4 * (30 * 3_540_096 + 49152 * 576) + 128 * 46080
    assert plan.predicted.decode_tokens_per_s == pytest.approx(0.7 * 40e9 / read, rel=1e-3)
    assert plan.predicted.estimate


def test_cold_experts_make_decoding_slower_and_are_named() -> None:
    hybrid, full = hybrid_plan(), hybrid_plan(24)
    assert hybrid.predicted.decode_tokens_per_s < full.predicted.decode_tokens_per_s
    assert hybrid.predicted.bound_by in ("link of cuda:0", "memory of the host")
    assert full.predicted.bound_by == "memory of cuda:0"


def test_measured_speeds_replace_listed_ones_and_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "speeds.json"
    assert load_speeds(path) == {}
    save_speeds(path, {"cpu": Speeds(1e9, 0.0, 1e12, "2026-11-15")})
    devices = with_speeds([cpu(24), gpu(24)], load_speeds(path))
    assert [device.measured for device in devices] == [True, False]
    plan = make_plan([smollm2()], devices[:1], Options(context=256, parallel=1))
    assert not plan.predicted.estimate
    assert plan.predicted.decode_tokens_per_s == pytest.approx(1e9 / 543_959_040, rel=1e-2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("3", "it has no version"),
        ("[]", "it has no version"),
        ('{"version": "1", "devices": {}}', "it has no version"),
        ('{"version": 1}', "it lists no devices"),
        ('{"version": 1, "devices": 3}', "it lists no devices"),
        ('{"version": 1, "devices": {"cpu": 3}}', "cpu has no speeds"),
        ('{"version": 1, "devices": {"cpu": {"speed": 1}}}', "cpu has 'speed', which is not known"),
        (
            '{"version": 1, "devices": {"cpu": {"bandwidth": "1"}}}',
            "bandwidth of cpu is not a number",
        ),
        (
            '{"version": 1, "devices": {"cpu": {"bandwidth": NaN}}}',
            "bandwidth of cpu is nan; it must be positive",
        ),
        (
            '{"version": 1, "devices": {"cpu": {"bandwidth": 1}}}',
            "flops of cpu is 0.0; it must be positive",
        ),
        ('{"version": 1, "devices": {"cpu": {"bandwidth": 1, "flops": 1}}}', "cpu has no date"),
    ],
)
def test_a_broken_calibration_file_is_refused(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    path.write_text(text)
    with pytest.raises(FormatError) as refused:
        load_speeds(path)
    assert str(refused.value) == (
        f"{path} is not a calibration file: {told}. Delete it and run headroom calibrate."
    )


def test_a_line_can_be_explained() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options())
    assert explain_line(plan, "logits") == (
        "logits on cpu: 786432 bytes (768.0 KiB), 4 rows x 49152, f32"
    )
    with pytest.raises(OptionError, match=r"The plan has no line 'kvs'\. It has core_weights, "):
        explain_line(plan, "kvs")


def test_plans_stand_side_by_side() -> None:
    out = io.StringIO()
    plans = {"12 GiB": hybrid_plan(12), "24 GiB": hybrid_plan(24)}
    Console(file=out, width=80).print(compare_table(plans))
    rows = {row[:17].strip(): row[17:].split() for row in out.getvalue().splitlines()}
    assert rows["context"] == ["8192", "8192"]
    assert rows["cold_experts"][-1] == "-"
    assert rows["hot experts"][-3:] == ["9984", "of", "9984"]
    assert rows["fits"] == ["yes", "yes"]


def test_a_long_name_of_a_plan_is_folded_and_stays_whole() -> None:
    name = "0123456789" * 6
    out = io.StringIO()
    Console(file=out, width=40).print(compare_table({name: hybrid_plan(12)}))
    head = out.getvalue().partition("context")[0]
    assert "".join(head.split()) == name


def test_the_nearest_llama_server_command_keeps_the_settings() -> None:
    command = llama_server_command(hybrid_plan(), Path("laguna.gguf"))
    assert command.startswith(
        "llama-server -m laguna.gguf -c 8192 -np 1 -b 1024 -ub 1024 -ctk bf16 -ctv bf16 -t 7 "
        "-ngl 41"
    )
    assert command.endswith("--n-cpu-moe 20")
    two = make_plan([laguna()], [gpu(9), gpu(7, "cuda:1"), host(64)], Options(split="25,15"))
    command = llama_server_command(two, Path("laguna.gguf"))
    assert " -ngl 41 -ts 25,15 --n-cpu-moe " in command
    beside = make_plan([smollm2()], [gpu(4), cpu(16)], Options(split="20,10"))
    assert llama_server_command(beside, Path("s.gguf")).endswith(" -ngl 20")
    on_cpu = make_plan([smollm2()], [cpu(24)], Options())
    assert llama_server_command(on_cpu, Path("a b.gguf")) == (
        "llama-server -m 'a b.gguf' -c 32768 -np 4 -b 512 -ub 512 -ctk f32 -ctv f32 -t 4 -ngl 0"
    )
