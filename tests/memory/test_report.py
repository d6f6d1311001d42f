"""The plan as text and as JSON, and the speeds it predicts."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from headroom.errors import FormatError
from headroom.memory.calibration import Speeds, load_speeds, save_speeds, with_speeds
from headroom.memory.plan import Plan, make_plan
from headroom.memory.report import plan_json, plan_table, plan_text
from headroom.options import Options
from tests.memory.shapes import cpu, gpu, host, laguna, smollm2

LINE_NAMES = {
    "core_weights", "hot_experts", "cold_experts", "embeddings", "head", "kv", "recurrent_state",
    "verify_scratch", "staging", "workspace", "logits", "draft_weights", "draft_kv",
    "feature_ring", "graphs", "runtime", "reserve", "snapshots",
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


def test_the_text_names_every_line_and_the_verdict() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options(kv_type="q8_0"))
    text = plan_text(plan)
    assert text.startswith("smollm2 fits: context 8192, parallel 4, chunk 512, cache of 32768")
    assert all(f"\n{line.name} " in text for line in plan.devices[0].lines)
    assert "lossy: cached keys are kept in q8_0" in text
    assert "(estimated), bound by memory of cpu" in text
    assert "\x1b" not in text


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


def test_a_broken_calibration_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    path.write_text('{"devices": {"cpu": {"speed": 1}}}')
    with pytest.raises(FormatError, match="is not a calibration file"):
        load_speeds(path)
