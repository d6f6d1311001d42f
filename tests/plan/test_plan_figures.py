"""Whole plans, figure by figure: each line's bytes, and the numbers that it gives as its reason.

A change of these figures is a change of plans: check the new ones by hand, and say why they differ.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.plan.known import known_shape
from headroom.plan.plan import Plan, make_plan
from tests.plan.shapes import cpu, gpu, host

MEASURED_GPU = replace(gpu(12), link=5e10, link_read=4e10, handover_s=1e-5, measured=True)
MEASURED_CPU = replace(host(64), native=True, experts=6e10, expert_flops=7e11, measured=True)
DRAFTED = ("qwen3.6-27b:q4_k_m", "qwen3.6-27b-dflash")


def figures(plan: Plan) -> list[str]:
    """Return a row for each line: its name, its bytes and all numbers of its reason.

    The reasons of measured amounts say when they were measured; these numbers are left out.
    """
    places = [(device.name, device.lines) for device in plan.devices]
    places.append(("host", plan.host.lines))
    rows = []
    for place, lines in places:
        for line in lines:
            why = "" if line.name in ("graphs", "runtime") else line.why
            numbers = re.findall(r"\d[\d.]*\d|\d", why)
            rows.append(" ".join([place, line.name, str(line.bytes), *numbers]))
    return rows


@pytest.mark.parametrize(
    ("models", "devices", "options", "chosen", "speeds", "rows"),
    [
        (
            ["smollm2-135m:q4_k_m"],
            [cpu(24, taken=1)],
            {"kv_type": "q8_0"},
            (8192, 4, 512, 32768),
            (47.6034, 659.116, "memory of cpu", True),
            [
                "cpu core_weights 424813824 0 29",
                "cpu embeddings 113246208 49152 576",
                "cpu kv 401080320 30 512 64 8 0 8 0",
                "cpu staging 2377728 2 516 576 32",
                "cpu workspace 21000192 516 20.0 12.1 6.0",
                "cpu logits 786432 4 49152 32",
                "cpu runtime 268435456",
                "cpu reserve 1610612736 512.0 1.00",
            ],
        ),
        (
            ["laguna-xs.2:q4_k_m"],
            [gpu(12), host(64)],
            {},
            (8192, 1, 1024, 8192),
            (51.7752, 1914.8, "link of cuda:0", True),
            [
                "cuda:0 core_weights 1005054976 0 39",
                "cuda:0 hot_experts 9622634496 5062",
                "cuda:0 expert_staging 182919168",
                "cuda:0 kv 532152320 10 128 64 30 25 16 16",
                "cuda:0 staging 16793600 2 1025 2048 32",
                "cuda:0 workspace 172068864 1025 160.4 164.1 162.1 128.0",
                "cuda:0 head 168591360 100352 2048",
                "cuda:0 logits 39430784 32 100352 32 25.4",
                "cuda:0 graphs 137733036",
                "cuda:0 runtime 469762048",
                "cuda:0 reserve 536870912 512.0",
                "host cold_experts 18981322752 4922",
                "host expert_spare 2039808",
                "host snapshots 1138884608 16",
                "host embeddings 115605504 100352 2048",
                "host runtime 268435456",
                "host reserve 536870912 512.0",
            ],
        ),
        (
            ["laguna-xs.2:q4_k_m"],
            [gpu(9), gpu(7, "cuda:1"), host(64)],
            {
                "no_pin": True,
                "keep_host_copy": True,
                "activation_dtype": "bf16",
                "cache_ram": "4GiB",
            },
            (8192, 1, 1024, 8192),
            (71.0208, 2823.25, "link of cuda:1", True),
            [
                "cuda:0 core_weights 490769408 0 18",
                "cuda:0 hot_experts 7463043072 3950",
                "cuda:0 expert_staging 170336256",
                "cuda:0 kv 259522560 5 128 64 14 25 16 16",
                "cuda:0 staging 12595200 1 1025 2048 32 1 16",
                "cuda:0 workspace 172068864 1025 160.4 164.1 138.1 128.0",
                "cuda:0 graphs 137733036",
                "cuda:0 runtime 419430400",
                "cuda:0 reserve 536870912 512.0",
                "cuda:1 core_weights 514285568 19 39",
                "cuda:1 hot_experts 5170987008 2706",
                "cuda:1 expert_staging 166141952",
                "cuda:1 kv 272629760 5 128 64 16 25 16 16",
                "cuda:1 staging 20992000 2 1025 2048 32 1 16",
                "cuda:1 workspace 168165632 1025 160.4 130.1 128.0",
                "cuda:1 head 168591360 100352 2048",
                "cuda:1 logits 39430784 32 100352 32 25.4",
                "cuda:1 graphs 137733036",
                "cuda:1 runtime 385875968",
                "cuda:1 reserve 469762048 448.0",
                "host cold_experts 18981322752 3328",
                "host expert_spare 265175040",
                "host snapshots 2135408640 30",
                "host host_pages 2157445120 823 64",
                "host embeddings 115605504 100352 2048",
                "host runtime 268435456",
                "host reserve 536870912 512.0",
            ],
        ),
        (
            ["qwen3.6-35b-a3b:q4_k_m"],
            [MEASURED_GPU, MEASURED_CPU],
            {"expert_budget": "30%", "parallel": 2},
            (8192, 2, 2048, 16384),
            (153.44, 7499.89, "link of cuda:0 and memory of the host", False),
            [
                "cuda:0 core_weights 949012992 0 39",
                "cuda:0 hot_experts 5849972736 3072",
                "cuda:0 expert_staging 182919168",
                "cuda:0 kv 335544320 10 256 64 16 16",
                "cuda:0 recurrent_state 131727360 2 30 32",
                "cuda:0 staging 33587200 2 2050 2048 32",
                "cuda:0 workspace 300377088 2050 286.5 228.3 184.2 128.0",
                "cuda:0 head 417177600 248320 2048",
                "cuda:0 logits 96842368 32 248320 32 62.0",
                "cuda:0 graphs 195498456",
                "cuda:0 runtime 469762048",
                "cuda:0 reserve 536870912 512.0",
                "host cold_experts 19503513600 7168",
                "host expert_spare 2039808",
                "host snapshots 1069711360 16",
                "host embeddings 286064640 248320 2048",
                "host runtime 268435456",
                "host reserve 536870912 512.0",
            ],
        ),
        (
            ["gemma-4-e4b:q4_k_m"],
            [gpu(8, sm=75), host(32)],
            {"parallel": 1},
            (8192, 1, 512, 8192),
            (213.3, 6209.1, "memory of cuda:0", True),
            [
                "cuda:0 core_weights 2422147240 0 41",
                "cuda:0 embeddings 550502400 262144 2560",
                "cuda:0 kv 178782208 4 128 64 20 17 16 16",
                "cuda:0 staging 37822464 3 513 2560 32 10752 32",
                "cuda:0 workspace 134217728 513 66.6 112.6 14.5 128.0",
                "cuda:0 logits 102206080 32 262144 32 65.5",
                "cuda:0 graphs 170225612",
                "cuda:0 runtime 402653184",
                "cuda:0 reserve 536870912 512.0",
                "host snapshots 394264576 16",
                "host embeddings 2312110080",
                "host runtime 268435456",
                "host reserve 536870912 512.0",
            ],
        ),
        (
            ["gemma-4-26b-a4b:q4_k_m"],
            [cpu(40)],
            {"context": 4096},
            (4096, 4, 512, 16384),
            (1.25785, 22.6954, "memory of cpu", True),
            [
                "cpu core_weights 1044473976 0 29",
                "cpu hot_experts 15130165248 3840",
                "cpu embeddings 605552640 262144 2816",
                "cpu kv 3292528640 5 256 64 25 100 32 32",
                "cpu staging 17436672 3 516 2816 32",
                "cpu workspace 185929728 516 134.0 177.3 104.0",
                "cpu snapshots 2680160256 6",
                "cpu logits 4194304 4 262144 32",
                "cpu runtime 268435456",
                "cpu reserve 536870912 512.0",
            ],
        ),
        (
            ["gemma-4-26b-a4b:q4_k_m"],
            [replace(cpu(40), native=True)],
            {"context": 4096},
            (4096, 4, 512, 16384),
            (9.03358, 22.6954, "memory of cpu", True),
            [
                "cpu core_weights 1044527224 0 29",
                "cpu hot_experts 15130165248 3840",
                "cpu embeddings 606076928 262144 2816",
                "cpu kv 3292528640 5 256 64 25 100 32 32",
                "cpu staging 17436672 3 516 2816 32",
                "cpu workspace 116278336 516 79.4 110.9",
                "cpu snapshots 2680160256 6",
                "cpu logits 4194304 4 262144 32",
                "cpu runtime 268435456",
                "cpu reserve 536870912 512.0",
            ],
        ),
        (
            DRAFTED,
            [gpu(16), gpu(16, "cuda:1"), host(64)],
            {"context": 32768, "split": "40,24"},
            (32768, 4, 512, 131072),
            (38.0736, 1006.03, "memory of cuda:0", True),
            [
                "cuda:0 core_weights 9175599360 0 39",
                "cuda:0 embeddings 715161600 248320 5120",
                "cuda:0 kv 5368709120 10 2048 64 16 16",
                "cuda:0 recurrent_state 392232960 4 30 32",
                "cuda:0 staging 15851520 1 516 5120 32 1 16",
                "cuda:0 workspace 209883136 516 147.6 200.2 191.5 128.0",
                "cuda:0 features 31703040 3 516 5120 32",
                "cuda:0 verify_scratch 39690240 32 310080 32",
                "cuda:0 graphs 92745648",
                "cuda:0 runtime 536870912",
                "cuda:0 reserve 536870912 512.0",
                "cuda:1 core_weights 5602701056 40 63",
                "cuda:1 kv 3221225472 6 2048 64 16 16",
                "cuda:1 recurrent_state 235339776 4 18 32",
                "cuda:1 staging 26419200 2 516 5120 32 1 16",
                "cuda:1 workspace 209883136 516 147.6 200.2 191.5 128.0",
                "cuda:1 features 21135360 2 516 5120 32",
                "cuda:1 verify_scratch 23814144 32 186048 32",
                "cuda:1 draft_weights 3460551680 5 3.6 27 16",
                "cuda:1 draft_kv 709885952 131072 16 16",
                "cuda:1 draft_state 10567680 516 5120 32",
                "cuda:1 head 1042944000 248320 5120",
                "cuda:1 logits 96842368 32 248320 32 62.0",
                "cuda:1 graphs 92745648",
                "cuda:1 runtime 536870912",
                "cuda:1 reserve 536870912 512.0",
                "host snapshots 3079831552 16",
                "host runtime 268435456",
                "host reserve 536870912 512.0",
            ],
        ),
    ],
)
def test_every_line_of_a_plan_has_its_bytes_and_the_numbers_that_they_come_from(
    models: Sequence[str],
    devices: Sequence[DeviceSpec],
    options: dict[str, object],
    chosen: tuple[int, ...],
    speeds: tuple[float, float, str, bool],
    rows: list[str],
) -> None:
    shapes = [known_shape(name) for name in models]
    plan = make_plan(shapes, devices, Options(**options))  # type: ignore[arg-type]
    used = plan.settings
    assert (used.context, used.parallel, used.chunk, used.cache_tokens) == chosen
    assert figures(plan) == rows
    found = plan.predicted
    decode, prefill, bound_by, estimate = speeds
    assert found.decode_tokens_per_s == pytest.approx(decode, rel=1e-5)
    assert found.prefill_tokens_per_s == pytest.approx(prefill, rel=1e-5)
    assert (found.bound_by, found.estimate) == (bound_by, estimate)
