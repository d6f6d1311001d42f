"""Compares engines on a GPU with engines on the CPU: the same tokens in float32, and bf16 at work.

python -m tests.gpu.check_engine [FAMILY ...]
"""

import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from headroom.answers import AnswerReader, Completion
from headroom.bench.schema import TYPICAL, endless_list
from headroom.engine.request import SamplingParams, TokenEvent
from headroom.llm import LLM
from headroom.text.conversation import OutputFormat
from tests.gpu.running import synth

SETTINGS = {"context": 1536, "parallel": 8, "chunk": 256}
LONG = {"max_tokens": 24, "ignore_eos": True}
CASES = {
    "greedy": SamplingParams(temperature=0, **LONG),
    "plain": SamplingParams(seed=1, **LONG),
    "hot": SamplingParams(seed=2, temperature=1.6, **LONG),
    "filters": SamplingParams(seed=3, temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, **LONG),
    "top-p": SamplingParams(seed=4, top_p=0.95, **LONG),
    "penalties": SamplingParams(
        seed=5, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, **LONG
    ),
    "greedy penalties": SamplingParams(
        temperature=0, repetition_penalty=1.5, penalty_window=16, **LONG
    ),
    "penalties over all": SamplingParams(seed=6, presence_penalty=0.6, penalty_window=0, **LONG),
    "bias": SamplingParams(seed=7, logit_bias={5: 3.0, 6: -100.0, 7: 2.5}, **LONG),
}
BRIEF = {label: CASES[label] for label in ("greedy", "plain")}
# By the length of a prompt: what is drawn after it. How tokens are drawn is no matter of families.
PROMPTS = {"short": (5, BRIEF), "few": (24, BRIEF), "chunks": (700, BRIEF)}
FIRST_PROMPTS = PROMPTS | {
    "few": (24, CASES),
    "past the tables": (1020, {"penalties over all": CASES["penalties over all"]}),
}
FAMILIES = {
    "llama": ("llama", "--quant", "Q8_0", "--layers", "2"),
    "qwen3": ("qwen3", "--quant", "Q4_K_M", "--layers", "2"),
    "qwen3moe": ("qwen3moe", "--quant", "Q4_K_M", "--layers", "3"),
    "laguna": ("laguna", "--quant", "Q8_0", "--layers", "5"),
    "qwen35": ("qwen35", "--quant", "Q4_K_M", "--layers", "4"),
    "gemma4": ("gemma4", "--quant", "Q8_0", "--layers", "6"),
}

# Formats of answers that run together; None: free. One for each way of drawing, in turn.
LIMITED: dict[str, Sequence[OutputFormat | None]] = {
    "schema": (endless_list(TYPICAL),),
    "regex or free": (
        OutputFormat(kind="regex", value="([a-m]{1,3}, ){40}"),
        None,
        OutputFormat(kind="json_object"),
    ),
}

Answer = tuple[list[int | None], str]  # tokens and text


def check(name: str, work: Callable[[], str]) -> None:
    """Run a case and print its verdict; `work` returns what is wrong, "" if nothing is."""
    started = time.perf_counter()
    try:
        wrong = work()
    except Exception:
        wrong = traceback.format_exc(limit=8)
    verdict = f"FAIL {name}: {wrong}" if wrong else f"PASS {name}"
    print(f"{verdict} ({time.perf_counter() - started:.1f} s)", flush=True)


def prompt(length: int, vocab: int) -> list[int]:
    """Token ids that do not repeat soon."""
    return [(7 + 13 * number) % min(vocab, 240) for number in range(length)]


def answer(llm: LLM, tokens: list[int], params: SamplingParams) -> Completion:
    """One answer."""
    return llm.generate([tokens], params)[0]


def together(llm: LLM, tokens: list[int], cases: Mapping[str, SamplingParams]) -> dict[str, Answer]:
    """Answers to one prompt by several ways of drawing, worked on together."""
    begun = {label: llm.stream(tokens, params) for label, params in cases.items()}
    done = {label: list(pieces) for label, pieces in begun.items()}
    return {
        label: ([piece.token for piece in pieces], "".join(piece.text for piece in pieces))
        for label, pieces in done.items()
    }


def differences(first: Answer, second: Answer) -> str:
    """Say where two answers part."""
    if first == second:
        return ""
    pairs = list(zip(first[0], second[0], strict=False))
    at = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return f"they part at token {at} of {len(first[0])} and {len(second[0])}"


def compare_f32(name: str, path: Path) -> None:
    """Compare tokens and text of the GPU with those of the CPU's plain kernels, in float32."""
    plain = {**SETTINGS, "dtype": "f32", "kv_type": "f32"}
    prompts = FIRST_PROMPTS if name == next(iter(FAMILIES)) else PROMPTS
    with (
        LLM(str(path), device="cpu", kernels="reference", **plain) as cpu,
        LLM(str(path), device="cuda:0", **plain) as gpu,
    ):
        for label, (length, cases) in prompts.items():
            tokens = prompt(length, cpu.vocab_size)
            wanted, found = (together(llm, tokens, cases) for llm in (cpu, gpu))
            for case in cases:
                check(
                    f"{name} f32 {label} {case}",
                    lambda case=case, a=wanted, b=found: differences(a[case], b[case]),  # type: ignore[misc]
                )
        check(f"{name} f32 logprobs", lambda: compare_logprobs(cpu, gpu))
        tokens = prompt(20, cpu.vocab_size)
        for label, formats in LIMITED.items():
            wanted, found = (limited(llm, tokens, CASES, formats) for llm in (cpu, gpu))
            for case in CASES:
                check(
                    f"{name} f32 {label} {case}",
                    lambda case=case, a=wanted, b=found: differences(a[case], b[case]),  # type: ignore[misc]
                )


def limited(
    llm: LLM,
    tokens: list[int],
    cases: Mapping[str, SamplingParams],
    formats: Sequence[OutputFormat | None],
) -> dict[str, Answer]:
    """Answers to one prompt by several ways of drawing, worked on together, under formats."""
    begun = {}
    for place, (label, params) in enumerate(cases.items()):
        wanted = formats[place % len(formats)]
        state = None if wanted is None else llm.grammars.compile([wanted]).begin()
        request = llm.request(tokens, params, state)
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        llm.engine.submit(request, events.put)
        begun[label] = (AnswerReader(request, llm.tokenizer, llm.engine), events)
    done = {}
    for label, (reader, events) in begun.items():
        deltas = [reader.read(events.get(timeout=120))]
        while deltas[-1].finish_reason is None:
            deltas.append(reader.read(events.get(timeout=120)))
        assert deltas[-1].finish_reason != "error", deltas[-1].error
        text = "".join(delta.text for delta in deltas)
        done[label] = ([delta.token for delta in deltas], text)
    return done


def compare_logprobs(cpu: LLM, gpu: LLM) -> str:
    """Logprobs agree to 1e-3."""
    params = SamplingParams(temperature=0, logprobs=3, **LONG)
    found = [answer(llm, prompt(12, cpu.vocab_size), params).logprobs for llm in (cpu, gpu)]
    apart = max(abs(a.logprob - b.logprob) for a, b in zip(*found, strict=True))
    return "" if apart < 1e-3 else f"logprobs are {apart:.1e} apart"


def work_bf16(name: str, path: Path) -> None:
    """The captured engine: batches, cancelling, prompts in chunks, the device's own sampler."""
    with LLM(str(path), device="cuda:0", **SETTINGS) as llm:
        check(f"{name} bf16 batch", lambda: batch_equals_alone(llm))
        check(f"{name} bf16 host sampler", lambda: device_equals_host(llm))
        for label, formats in LIMITED.items():
            check(
                f"{name} bf16 host sampler, {label}",
                lambda formats=formats: device_equals_host(llm, formats),  # type: ignore[misc]
            )
        check(f"{name} bf16 cancel", lambda: cancels(llm))
        check(f"{name} bf16 long prompt", lambda: long_prompt(llm))
        check(f"{name} bf16 memory", lambda: memory_is_planned(llm))


def batch_equals_alone(llm: LLM) -> str:
    """Eight requests at once are answered; how many are the same as alone is printed.

    In bf16 they need not be: prompts that share a step may go through other kernels.
    """
    prompts = [prompt(40 + number, llm.vocab_size) for number in range(8)]
    params = SamplingParams(temperature=0, **LONG)
    alone = [answer(llm, tokens, params).token_ids for tokens in prompts]
    at_once = [done.token_ids for done in llm.generate(prompts, params)]
    equal = sum(a == b for a, b in zip(alone, at_once, strict=True))
    print(f"  {equal} of 8 answers are the same alone and together")
    short = [len(tokens) for tokens in at_once if len(tokens) != LONG["max_tokens"]]
    return f"answers of {short} tokens" if short else ""


def device_equals_host(llm: LLM, formats: Sequence[OutputFormat | None] = (None,)) -> str:
    """The host draws the same tokens from the same logits, one answer at a time."""
    stage, tokens = llm.engine._pipeline._stages[0], prompt(20, llm.vocab_size)
    step = stage.step

    def all_answers() -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        for place, (label, params) in enumerate(CASES.items()):
            found |= limited(llm, tokens, {label: params}, [formats[place % len(formats)]])
        return found

    drawn = all_answers()
    stage.step = lambda batch, draws=(): step(batch)  # type: ignore[method-assign,assignment]
    try:
        host = all_answers()
    finally:
        stage.step = step  # type: ignore[method-assign]
    wrong = [label for label in CASES if drawn[label] != host[label]]
    return f"other tokens for {', '.join(wrong)}" if wrong else ""


def cancels(llm: LLM) -> str:
    """A cancelled answer ends and gives its pages back, and others go on."""
    stream = llm.stream(prompt(9, llm.vocab_size), SamplingParams(ignore_eos=True))
    other = llm.stream(prompt(8, llm.vocab_size), SamplingParams(seed=1, **LONG))
    next(stream)
    stream.close()
    count = len(list(other))
    answer(llm, prompt(5, llm.vocab_size), SamplingParams(max_tokens=1))
    held = llm.engine.stats().cache_pages_used
    return (
        ""
        if count == LONG["max_tokens"] and held == 0
        else f"{count} tokens, {held} pages still held"
    )


def long_prompt(llm: LLM) -> str:
    """A prompt of several chunks while other requests decode."""
    running = [llm.stream(prompt(9 + n, llm.vocab_size), SamplingParams(**LONG)) for n in range(3)]
    done = answer(llm, prompt(1300, llm.vocab_size), SamplingParams(temperature=0, **LONG))
    counts = [len(list(stream)) for stream in running]
    length = LONG["max_tokens"]
    right = counts == [length] * 3 and len(done.token_ids) == length
    return "" if right else f"{counts} and {len(done.token_ids)} tokens"


def memory_is_planned(llm: LLM) -> str:
    """Held memory is told; how it compares with the plan is printed."""
    found = llm.engine.stats().memory
    peak = torch.cuda.max_memory_allocated()
    gpus = [memory for memory in found if memory.device == "cuda:0"]
    for memory in gpus:
        print(f"  held {memory.used_bytes:,}, planned {memory.planned_bytes:,}, peak {peak:,}")
    return "" if len(gpus) == 1 and gpus[0].used_bytes > 0 else str(found)


def main(folder: Path, names: Sequence[str]) -> None:
    """All families in float32, then those with fused layers in bf16."""
    for name in names or FAMILIES:
        family, *more = FAMILIES[name]
        path = synth(family, folder / f"{name}.gguf", *more)
        for part in (compare_f32, work_bf16):
            try:
                part(name, path)
            except Exception:
                print(f"FAIL {name} {part.__name__}")
                traceback.print_exc(limit=8)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made), sys.argv[1:])
