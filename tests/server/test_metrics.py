"""/metrics: what is counted, and that clients cannot make the labels grow."""

import httpx
import pytest

from headroom.engine.stats import ExpertTelemetry
from headroom.experts.telemetry import ColdPaces, PolicyState
from tests.server.fakes import TIMINGS, FakeLLM

USER = {"role": "user", "content": "hi"}


def test_engine_and_http_are_counted(client: httpx.Client) -> None:
    client.post("/v1/chat/completions", json={"messages": [USER]})
    client.post("/v1/chat/completions", json={"messages": []})
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    for line in (
        "headroom_requests_running 0.0",
        "headroom_requests_waiting 0.0",
        'headroom_requests_finished_total{reason="stop"} 1.0',
        "headroom_prompt_tokens_total 7.0",
        "headroom_generated_tokens_total 11.0",
        "headroom_steps_total 5.0",
        "headroom_step_seconds_total 0.5",
        "headroom_preemptions_total 0.0",
        "headroom_cache_pages 8.0",
        "headroom_cache_pages_used 1.0",
        'headroom_memory_planned_bytes{device="cuda:0"} 4096.0',
        'headroom_memory_used_bytes{device="cuda:0"} 1024.0',
        'headroom_memory_used_bytes{device="cpu"} 128.0',
        'headroom_memory_process_bytes{device="cuda:0"} 8192.0',
        'headroom_http_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0',
        'headroom_http_requests_total{endpoint="/v1/chat/completions",status="400"} 1.0',
        'headroom_http_request_seconds_count{endpoint="/v1/chat/completions"} 2.0',
        "headroom_time_to_first_token_seconds_count 1.0",
        'headroom_time_to_first_token_seconds_bucket{le="0.005"} 1.0',
        "headroom_time_per_token_seconds_count 1.0",
    ):
        assert line in lines


def test_times_are_those_of_the_whole_answer(client: httpx.Client) -> None:
    client.post("/v1/chat/completions", json={"messages": [USER]})
    numbers = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines())
    first = float(numbers["headroom_time_to_first_token_seconds_sum"])
    assert first == pytest.approx(TIMINGS.queue_s + TIMINGS.prefill_s)
    each = float(numbers["headroom_time_per_token_seconds_sum"])
    assert each == pytest.approx(TIMINGS.decode_s / 13)  # 14 tokens, the first without decoding


def test_unknown_paths_share_one_label(client: httpx.Client) -> None:
    for number in range(5):
        client.get(f"/nowhere/{number}")
    text = client.get("/metrics").text
    assert 'headroom_http_requests_total{endpoint="unknown",status="404"} 5.0' in text
    assert "nowhere" not in text


def test_each_server_has_a_registry_of_its_own(client: httpx.Client, shared: httpx.Client) -> None:
    shared.get("/health")
    assert 'endpoint="/health"' not in client.get("/metrics").text


def test_expert_metrics_are_reported_by_layer_and_path(client: httpx.Client, llm: FakeLLM) -> None:
    assert "expert" not in client.get("/metrics").text
    llm.engine.experts = ExpertTelemetry(
        picks=(0, 8, 4),
        hits=(0, 6, 4),
        tokens=4,
        cold_bytes={"gpu": 2048, "cpu": 100},
        seconds={"hot": 0.5, "cold": 0.25, "wait": 0.125},
        exchanges=3,
        causes={"pinned": 7, "cached": 3, "prefetched": 0},
        misses={"filled": 2, "in_place": 1, "cpu": 5},
        paces=ColdPaces(cpu_share=0.5, cpu=0.25, cpu_prompts=0.75, link=1.0),
        policy=PolicyState("lru", {"static": 0.5, "lru": 0.75}),
    )
    lines = client.get("/metrics").text.splitlines()
    for line in (
        'headroom_expert_hit_rate{layer="1"} 0.75',
        'headroom_expert_hit_rate{layer="2"} 1.0',
        'headroom_expert_picks_total{layer="1"} 8.0',
        "headroom_cold_expert_picks_total 2.0",
        "headroom_expert_swaps_total 3.0",
        'headroom_cold_bytes_total{path="gpu"} 2048.0',
        'headroom_cold_bytes_total{path="cpu"} 100.0',
        'headroom_expert_seconds_total{what="wait"} 0.125',
        'headroom_expert_hits_total{cause="pinned"} 7.0',
        'headroom_expert_hits_total{cause="cached"} 3.0',
        'headroom_expert_misses_total{path="in_place"} 1.0',
        'headroom_expert_misses_total{path="cpu"} 5.0',
        "headroom_cold_cpu_share 0.5",
        'headroom_cold_pace{of="cpu"} 0.25',
        'headroom_cold_pace{of="cpu_prompts"} 0.75',
        'headroom_expert_policy{policy="lru"} 1.0',
        'headroom_expert_policy_hit_rate{policy="static"} 0.5',
        'headroom_expert_policy_hit_rate{policy="lru"} 0.75',
    ):
        assert line in lines
    assert not any(line.startswith('headroom_expert_hit_rate{layer="0"}') for line in lines)
