"""Settings of other programs: the llama-server command that comes nearest to a plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from headroom.options import Options
from headroom.plan.plan import make_plan
from headroom.plan.show.emit import likely_file, llama_server_command
from tests.plan.shapes import cpu, gpu, host, hybrid_plan, laguna, smollm2


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


def test_without_a_file_the_command_names_the_model_as_a_file() -> None:
    plan = replace(hybrid_plan(), model="Qwen3 0.6B (Q4_K_M)")
    assert likely_file(plan) == "Qwen3-0.6B-Q4_K_M.gguf"
    assert llama_server_command(plan, None).startswith("llama-server -m Qwen3-0.6B-Q4_K_M.gguf -c ")


def test_threads_of_another_machine_are_left_out_unless_they_are_given() -> None:
    def threads(**options: Any) -> list[str]:
        plan = make_plan([smollm2()], [cpu(24)], Options(**options))
        words = llama_server_command(plan, None).split()
        return [words[place + 1] for place, word in enumerate(words) if word == "-t"]

    assert threads(device="rtx3060-12gb") == []
    assert threads(device="rtx3060-12gb", threads=3) == ["3"]
    assert threads() == ["4"]


def test_batches_are_at_least_as_large_as_llama_server_takes() -> None:
    plan = make_plan([smollm2()], [cpu(24)], Options(chunk=16))
    assert " -b 32 -ub 32 " in llama_server_command(plan, None)
