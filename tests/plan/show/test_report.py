"""A plan as JSON: the keys that scripts rely on, field by field."""

import json

import pytest

from headroom.options import Options
from headroom.plan.plan import make_plan
from headroom.plan.show.report import plan_json
from tests.plan.shapes import gpu, host, hybrid_plan, laguna

LINE_NAMES = {
    "core_weights", "hot_experts", "cold_experts", "embeddings", "head", "kv", "recurrent_state",
    "verify_scratch", "staging", "workspace", "logits", "draft_weights", "draft_kv",
    "draft_state", "features", "graphs", "runtime", "reserve", "snapshots", "host_pages",
    "expert_staging", "expert_spare",
}  # fmt: skip


def test_the_json_has_the_keys_that_scripts_rely_on() -> None:
    report = json.loads(json.dumps(plan_json(hybrid_plan())))
    assert report["version"] == 1
    assert report["fits"] is True
    assert report["settings"]["context"] == 8192
    (device,) = report["devices"]
    assert set(device) == {
        "name", "total_bytes", "lines", "free_bytes", "layers", "k_type", "v_type", "dtype",
        "hot_experts", "total_experts",
    }  # fmt: skip
    assert device["layers"] == [0, 39]
    assert device["total_bytes"] == device["free_bytes"] + sum(x["bytes"] for x in device["lines"])
    assert {"total_bytes", "lines"} <= set(report["host"])
    assert set(report["predicted"]) == {
        "decode_tokens_per_s", "prefill_tokens_per_s", "bound_by", "estimate", "stages",
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
        "activation": plan.precision.type, "reason": plan.precision.reason, "planned_only": False,
    }  # fmt: skip
    assert report["lossy"] == list(plan.lossy) != []
    assert report["notes"] == list(plan.notes)
    assert report["predicted"] == {
        "decode_tokens_per_s": round(found.decode_tokens_per_s, 2),
        "prefill_tokens_per_s": round(found.prefill_tokens_per_s, 2),
        "bound_by": found.bound_by, "estimate": True,
        "stages": [
            {
                "device": part.device, "decode_s": round(part.decode_s, 9),
                "prefill_s": round(part.prefill_s, 9),
                "decode_share": round(part.decode_s * found.decode_tokens_per_s, 4),
            }
            for part in found.stages
        ],
    }  # fmt: skip
    shares = [part["decode_share"] for part in report["predicted"]["stages"]]
    assert sum(shares) == pytest.approx(1, abs=1e-3)
