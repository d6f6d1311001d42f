"""Models of every family with experts on a GPU, some of them cold: what must hold, case by case.

Every case returns what is wrong, "" if nothing is.
"""

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from unittest.mock import patch

import torch

from headroom.engine.request import SamplingParams
from headroom.experts import cache
from headroom.experts import store as stores
from headroom.families.files import open_checkpoint
from headroom.kernels.cuda import experts_scratch
from headroom.llm import LLM
from headroom.plan import cost_model
from headroom.plan import plan as plans
from headroom.plan.cost_model import DecodeChoice
from tests.running import run_steps
from tests.synth_models import write_model

GPU = "cuda:0"
# By model: how far logits in bf16 may be from all-hot ones where a CPU computes cold experts, or
# where short prompts unpack cold experts and not hot ones, relative. Random weights of Gemma make
# much of what is rounded.
LIMITS: Mapping[str, float] = MappingProxyType(
    {
        "qwen3moe": 0.03,
        "qwen35moe-wide": 0.03,
        "laguna": 0.03,
        "gemma4-moe": 0.1,
        "qwen3moe-bf16": 0.03,
        "gemma4-moe-f16": 0.1,
    }
)
PLAIN = ("bf16", "f16")  # what a name may end with; the matrices of others are packed
SHARES = ("0%", "30%", "60%")
PATHS = ("auto", "cpu", "gpu")
EXCHANGES = {"swap_min_gain": 0.5, "swap_false_chance": 1.0, "swap_per_layer": 4}  # soon, and many
EXCHANGE_S = 5.0  # that the first exchange is waited for
# In several chunks and in one, longer than the windows.
PROMPTS = [
    torch.randint(300, 1000, (rows,), generator=torch.Generator().manual_seed(rows)).tolist()
    for rows in (60, 7)
]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SETTINGS = {
    "context": 256, "parallel": 3, "chunk": 40, "routing_stats": "off", "expert_policy": "static",
}  # fmt: skip
EXACT = {"dtype": "f32", "kv_type": "f32"}
SHORT = {"dtype": "bf16", "kv_type": "bf16"}
# Whole, in chunks, in few rows at a time, and token by token, all together.
PIECES = [[90], [40, 3, 47], [20, 12, 30, 1, 7, 20], [60] + [1] * 30]
TEXT = torch.randint(300, 1000, (90,), generator=torch.Generator().manual_seed(90)).tolist()
HEAD_ROWS = 4  # at once: as many as requests may run
LONG = 1500  # tokens of an answer

Tokens = list[tuple[int, ...]]


def model_file(name: str, folder: Path) -> Path:
    """Write a model with few layers, unless it is there."""
    family, _, mix = name.rpartition("-")
    if mix not in PLAIN:
        family, mix = name, "q4_k_m"
    path = folder / f"{family}-{mix}.gguf"
    return path if path.exists() else write_model(family, mix, folder, few_layers=True)


@contextlib.contextmanager
def opened(path: Path, **settings: object) -> Iterator[LLM]:
    """An engine, whose memory is given back in the end."""
    llm = LLM(str(path), **(SETTINGS | settings))
    try:
        yield llm
    finally:
        llm.close()
        del llm
        free_memory()


def free_memory() -> None:
    """Give back what cycles of objects hold."""
    gc.collect()
    torch.cuda.empty_cache()


def ask(llm: LLM) -> Tokens:
    """What a model says to the prompts, worked on together."""
    return [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]


def ask_one_by_one(llm: LLM) -> Tokens:
    """Ask one prompt after another: in 16 bits, results may depend on other prompts in a step."""
    return [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


def exact_answers(path: Path) -> Tokens:
    """What the plain kernels of the CPU say in f32."""
    with opened(path, device="cpu", kernels="reference", **EXACT) as llm:
        return ask(llm)


def unpacked_answers(path: Path) -> Tokens:
    """What a GPU says in bf16 where all experts are hot, and unpacked as cold ones are."""
    with unpacked(), opened(path, device=GPU, **SHORT) as llm:
        return ask_one_by_one(llm)


def same_tokens(
    path: Path, wanted: Tokens, asked: Callable[[LLM], Tokens] = ask, **settings: object
) -> str:
    """In f32 the same tokens whatever is hot, before and after experts changed places."""
    moved, moves = 0, settings["expert_budget"] not in ("0%", "100%")
    with opened(path, device=GPU, **(EXACT | EXCHANGES | settings)) as llm:
        for turn in range(1 + moves):
            if turn:
                moved = exchanges_after_pause(llm)
            if (found := asked(llm)) != wanted:
                return f"other tokens after {moved} exchanges: {found} instead of {wanted}"
    print(f"  {moved} experts changed places", flush=True)
    return "no experts changed places between requests" if moves and not moved else ""


def same_tokens_of_gpu(path: Path, wanted: Tokens, **settings: object) -> str:
    """Compare tokens in bf16, in captured steps, where the GPU reads cold experts by itself."""
    given = {"expert_budget": "30%", "cold": "gpu", **SHORT, **settings}
    return same_tokens(path, wanted, ask_one_by_one, **given)


def same_tokens_when_shared(path: Path, wanted: Tokens, share: str) -> str:
    """Compare tokens where CPU and GPU both compute a layer's cold experts."""
    with shared_layers():
        return same_tokens(path, wanted, expert_budget=share, cold="auto")


def exchanges_after_pause(llm: LLM) -> int:
    """Wait until no more experts change places; return how many have so far."""
    upkeep = llm.engine.upkeep
    assert upkeep is not None
    until, found = time.monotonic() + EXCHANGE_S, 0
    while time.monotonic() < until:
        before, found = found, upkeep._exchanged
        if found and found == before:
            break
        time.sleep(0.1)
    return found


def logits(path: Path, **settings: object) -> list[torch.Tensor]:
    """Logits of all rows in bf16."""
    given = {"device": GPU, "chunk": 256, "expert_policy": "static"} | SHORT | settings
    found = run_steps(open_checkpoint(path), [TEXT] * len(PIECES), PIECES, HEAD_ROWS, **given)
    free_memory()
    return found


@contextlib.contextmanager
def unpacked() -> Iterator[None]:
    """Let short prompts unpack hot experts, as they do cold ones."""
    with patch.object(experts_scratch, "SORTED_PICKS", 0):
        yield


def unpacked_logits(path: Path) -> list[torch.Tensor]:
    """Return the logits of all rows in bf16, from hot experts that are unpacked."""
    with unpacked():
        return logits(path)


def apart(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """How far the worst of some logits are from others, relative."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def same_bits(path: Path, wanted: list[torch.Tensor], share: str) -> str:
    """A GPU that reads cold experts in place and streams them says the same to the bit."""
    found = logits(path, expert_budget=share, cold="gpu")
    equal = all(torch.equal(*both) for both in zip(found, wanted, strict=True))
    return "" if equal else f"{apart(found, wanted):.1e} apart"


@contextlib.contextmanager
def tight_caches() -> Iterator[None]:
    """Let slots change hands where they hold the experts of one token only, so that they thrash."""
    with patch.object(cache, "LEAST_TOKENS", 1), patch.object(plans, "LEAST_TOKENS", 1):
        yield


def same_bits_of_caches(path: Path, wanted: list[torch.Tensor], share: str, policy: str) -> str:
    """Slots that change hands within steps change no bit."""
    with tight_caches():
        found = logits(path, expert_budget=share, cold="gpu", expert_policy=policy)
    equal = all(torch.equal(*both) for both in zip(found, wanted, strict=True))
    return "" if equal else f"{apart(found, wanted):.1e} apart"


def near_with_caches(path: Path, wanted: list[torch.Tensor], limit: float, share: str) -> str:
    """Check `near` with slots that change hands, in layers that ask the CPU, too."""
    with tight_caches():
        return near(path, wanted, limit, expert_budget=share, cold="auto", expert_policy="auto")


@contextlib.contextmanager
def shared_layers() -> Iterator[None]:
    """Let CPU and GPU share the cold picks of a row, and a CPU take few rows of prompts."""

    def half(
        speeds: object, size: int, used: int, hits: float, cold: str, even_rate: float = 0.0
    ) -> DecodeChoice:
        return DecodeChoice("cpu", tuple(cold // 2 for cold in range(used + 1)))

    with (
        patch.object(stores, "choose_decode", half),
        patch.object(cost_model, "PREFILL_HANDOVER_S", 0.0),
    ):
        yield


def near(path: Path, wanted: list[torch.Tensor], limit: float, **settings: object) -> str:
    """Check that logits are within the tolerance of all-hot ones; print their distance."""
    found = logits(path, **settings)
    worst = apart(found, wanted)
    print(f"  {worst:.1e} from all-hot", flush=True)
    return "" if worst < limit else f"{worst:.1e} apart, and {limit} is allowed"


def near_when_shared(path: Path, wanted: list[torch.Tensor], limit: float, share: str) -> str:
    """Check `near` with layers whose cold experts both GPU and CPU compute."""
    with shared_layers():
        return near(path, wanted, limit, expert_budget=share, cold="auto")


def drops(path: Path, wanted: list[torch.Tensor], limit: float, **settings: object) -> str:
    """Without cold experts logits are numbers farther from all-hot ones than any rounding.

    Answers come, and the plan tells that they are lossy.
    """
    given = {"expert_budget": "30%", "cold": "drop", **settings}
    found = logits(path, **given)
    far = apart(found, wanted)
    print(f"  {far:.1e} from all-hot", flush=True)
    if not all(part.isfinite().all() for part in found) or far <= limit:
        return f"{far:.1e} from all-hot, and rounding alone may be {limit}"
    with opened(path, device=GPU, **given) as llm:
        counts, lossy = [len(tokens) for tokens in ask(llm)], llm.plan.lossy
    if counts != [GREEDY.max_tokens] * len(PROMPTS):
        return f"answers of {counts} tokens"
    return "" if any("left out" in what for what in lossy) else f"lossy: {lossy}"


def told_experts(llm: LLM) -> str:
    """A request's timings say what its cold experts cost."""
    done = llm.generate([PROMPTS[0]], GREEDY)[0].timings.experts
    print(f"  {done}", flush=True)
    if done is None:
        return "no figures"
    hits, sizes, times = done["hit_rate"], done["cold_bytes_per_token"], done["ms"]
    assert isinstance(hits, float)
    assert isinstance(sizes, dict)
    assert isinstance(times, dict)
    right = 0.05 < hits < 0.95 and sizes.get("cpu", 0) > 0 and sizes.get("stream", 0) > 0
    right = right and all(0 < times.get(word, 0) < 20_000 for word in ("hot", "cold", "wait"))
    right = right and 0 <= times.get("copies", -1) < 20_000
    return "" if right and done["cold_picks"] else f"{done}"


def long_answers(llm: LLM) -> str:
    """Some thousand steps that ask the CPU, alone and with two requests at once."""
    params = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
    for prompts in ([PROMPTS[1]], PROMPTS):
        started = time.perf_counter()
        counts = [len(done.token_ids) for done in llm.generate(prompts, params)]
        seconds = time.perf_counter() - started
        print(f"  {sum(counts)} tokens in {seconds:.1f} s", flush=True)
        if counts != [LONG] * len(prompts):
            return f"{counts} tokens"
    return ""


def with_pauses(llm: LLM) -> str:
    """Requests that come when the CPU's threads are about to sleep, or asleep."""
    draw, params = random.Random(0), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for _ in range(300):
        time.sleep(draw.uniform(0.0, 0.004))
        if len(llm.generate([PROMPTS[1]], params)[0].token_ids) != 2:
            return "an answer is missing"
    return ""


def cancels(llm: LLM) -> str:
    """A cancelled answer ends and gives its pages back, and others go on."""
    stream = llm.stream(PROMPTS[0], SamplingParams(ignore_eos=True))
    other = llm.stream(PROMPTS[1], GREEDY)
    next(stream)
    stream.close()
    count = len(list(other))
    ask(llm)
    held = llm.engine.stats().cache_pages_used
    return "" if count == GREEDY.max_tokens and not held else f"{count} tokens, {held} pages held"


def closes(path: Path, *, busy: bool) -> str:
    """An engine ends soon, idle or in the middle of a step, and its CPU thread with it."""
    llm = LLM(str(path), **(SETTINGS | {"device": GPU, "expert_budget": "30%", "cold": "cpu"}))
    stream = llm.stream(PROMPTS[0], SamplingParams(ignore_eos=True))
    next(stream)
    if not busy:
        stream.close()
        time.sleep(0.2)
    started = time.perf_counter()
    llm.close()
    seconds = time.perf_counter() - started
    cold = llm.engine._pipeline._stages[0]._model.decode_worker
    assert cold is not None
    assert cold._worker is not None
    ended = cold._worker._worker is None
    del llm, stream, cold
    free_memory()
    return "" if ended and seconds < 5 else f"{seconds:.1f} s, thread ended: {ended}"


def keeps_to_plan(path: Path, **settings: object) -> str:
    """Check that an engine on a GPU of limited size holds no more than planned."""
    free_memory()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    try:
        with opened(path, device=GPU, device_memory="2GiB", **settings) as llm:
            ask(llm)
            peak = torch.cuda.max_memory_reserved() - before
            lines = {line.name: line.bytes for line in llm.plan.devices[0].lines}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    most = sum(size for name, size in lines.items() if name not in ("runtime", "reserve"))
    print(f"  {peak / 2**20:.1f} MiB held of {most / 2**20:.1f} planned", flush=True)
    return "" if peak <= most else f"{peak} bytes held, planned {most}"
