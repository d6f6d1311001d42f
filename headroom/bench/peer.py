"""Runs another program's benchmark, llama-bench, on the same file for comparison."""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from headroom.bench.figures import BenchSettings, Figures
from headroom.errors import HeadroomError, OptionError
from headroom.options import Options, child_environment
from headroom.plan.plan import Plan
from headroom.plan.shape import ModelShape

PEERS = ("llama-bench",)
PEER_TIMEOUT_S = 3600.0
Rows = dict[int, dict[str, Any]]  # rows of llama-bench's JSON, by tokens of prompt or context
# llama-bench's cache type for ours, if not equal: f16 is as wide as bf16 and its fastest type; it
# has no f32.
PEER_CACHE_TYPES = {"bf16": "f16", "f32": "f16"}
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """The flags and environment that make llama-bench run as our plan does, and the differences."""

    flags: tuple[str, ...]
    visible: str  # its CUDA_VISIBLE_DEVICES; "": no GPU
    context: int  # tokens that a sequence may hold in our plan
    chunk: int  # prompt tokens in one step of our plan
    notes: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The environment that llama-bench is started in."""
        return child_environment({VISIBLE: self.visible})


def setup_peer(plan: Plan, shape: ModelShape, options: Options) -> PeerSetup:
    """Return how llama-bench runs as a plan does, or refuse a plan that it cannot imitate."""
    device, settings, notes = plan.devices[0], plan.settings, []
    on_gpu = device.kind != "cpu"
    if on_gpu and options.device_memory is not None:
        if not device.total_experts:
            raise OptionError(
                "llama-bench takes no --device-memory, and a dense model has no experts to leave "
                "in host memory.",
                hint="Leave out --device-memory, or --compare.",
                param="compare",
            )
        notes.append("--device-memory limits headroom alone; llama-bench has the whole GPU")
    flags = ["-ngl", "99" if on_gpu else "0"]
    if layers := cold_layers(plan, shape):
        flags += ["-ncmoe", str(layers)]
        theirs = sum(layer.experts for layer in shape.layers[:layers]) / device.total_experts
        ours = 1 - device.hot_experts / device.total_experts
        how = "cold" if settings.cold != "drop" else "left out and not computed"
        notes.append(
            f"llama-bench has all experts of its first {layers} layers on the CPU (-ncmoe "
            f"{layers}), {100 * theirs:.0f} % of them; of ours {100 * ours:.0f} % are {how}, some "
            "of every layer"
        )
    wanted = settings.k_type, settings.v_type
    keys, values = (PEER_CACHE_TYPES.get(name, name) for name in wanted)
    if "f32" in wanted:
        notes.append("llama-bench has its cache in f16, where ours is f32, which it does not take")
    flags += ["-t", str(settings.threads), "-fa", "1", "-ctk", keys, "-ctv", values]
    visible = visible_gpu(device.name, child_environment({})) if on_gpu else ""
    return PeerSetup(tuple(flags), visible, settings.context, settings.chunk, tuple(notes))


def cold_layers(plan: Plan, shape: ModelShape) -> int:
    """Return the number of first layers that together have about as many experts as are cold.

    llama-bench keeps the experts of whole layers on the CPU, starting with the first layer.
    """
    device = plan.devices[0]
    cold = device.total_experts - device.hot_experts
    if device.kind == "cpu" or cold <= 0:
        return 0
    sums = list(accumulate(layer.experts for layer in shape.layers))
    return 1 + min(
        (at for at, layer in enumerate(shape.layers) if layer.experts),
        key=lambda at: abs(sums[at] - cold),
    )


def visible_gpu(name: str, environment: Mapping[str, str]) -> str:
    """Return the CUDA_VISIBLE_DEVICES under which a program sees only the GPU `name`.

    Torch's `cuda:1` is the second entry of this process's own CUDA_VISIBLE_DEVICES.
    """
    index = int(name.rpartition(":")[2])
    listed = [word.strip() for word in environment.get(VISIBLE, "").split(",") if word.strip()]
    return listed[index] if index < len(listed) else str(index)


def check_comparable(model: Path) -> None:
    """Refuse a model that llama-bench cannot read."""
    if model.suffix != ".gguf" or not os.access(model, os.R_OK):
        raise OptionError(f"llama-bench reads .gguf files, and {model} is none.", param="compare")


@dataclass(frozen=True, slots=True)
class PeerRun:
    """The results of one run of llama-bench, in tokens per second."""

    prompts: Mapping[int, float]  # by tokens
    decodes: Mapping[int, float]  # of one sequence, by the tokens of its context
    build: str
    backends: str = ""  # backends that the binary was built with: "CUDA", "CPU"
    gpu: str = ""  # the GPUs that it saw; "" for none
    cpu: str = ""
    left_out: tuple[str, ...] = ()  # what was not measured, and why

    @property
    def where(self) -> str:
        """What llama-bench computed on, in words."""
        return f"{self.backends or 'unknown backend'} on {self.gpu or self.cpu or 'a CPU'}"


@dataclass(frozen=True, slots=True)
class LlamaBench:
    """A llama-bench binary that was found."""

    program: Path

    def run(self, model: Path, setup: PeerSetup, settings: BenchSettings) -> PeerRun:
        """Measure prompts and decoding once, with our cache types and threads."""
        chunk = str(max(setup.chunk, *settings.prompts))
        common = ["-m", str(model), "-o", "json", "-r", str(settings.rounds), *setup.flags]
        common += ["-b", chunk, "-ub", chunk]
        prompts: Rows = {}
        decodes: Rows = {}
        lengths = [one for one in settings.prompts if one < setup.context]
        if "prompts" in settings.only and lengths:
            asked = [*common, "-p", _joined(lengths), "-n", "0"]
            prompts = self._rows(asked, setup, "n_prompt", lengths)
        contexts, left_out = _within_patience(setup, settings, prompts)
        if contexts:
            asked = [*common, "-p", "0", "-n", str(settings.tokens), "-d", _joined(contexts)]
            decodes = self._rows(asked, setup, "n_depth", contexts)
        first = next(iter([*prompts.values(), *decodes.values()]), {})
        return PeerRun(
            {tokens: float(row["avg_ts"]) for tokens, row in prompts.items()},
            {context: float(row["avg_ts"]) for context, row in decodes.items()},
            f"llama.cpp {first.get('build_commit', '?')} ({first.get('build_number', '?')})",
            backends=str(first.get("backends", "")),
            gpu=str(first.get("gpu_info", "")),
            cpu=str(first.get("cpu_info", "")),
            left_out=left_out,
        )

    def _rows(
        self, arguments: Sequence[str], setup: PeerSetup, key: str, wanted: Sequence[int]
    ) -> Rows:
        """Run llama-bench once; return the rows of its JSON for the `wanted` values of `key`."""
        command = [str(self.program), *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, stdin=subprocess.DEVNULL, timeout=PEER_TIMEOUT_S,
                check=False, env=setup.environment,
            )  # fmt: skip
        except OSError as error:
            raise OptionError(
                f"{self.program} does not start: {error.strerror}.",
                hint="Name a llama-bench binary of this machine.",
                param="compare",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise HeadroomError(
                f"{self.program} took more than {PEER_TIMEOUT_S:.0f} s.", hint="Measure less."
            ) from error
        # The output repeats file names, which may hold any bytes; the figures do not need them.
        printed, errors = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
        if done.returncode:
            lines = errors.strip().splitlines() or ["it said nothing"]
            raise HeadroomError(
                f"{self.program} {_end(done.returncode)}: {lines[-1]}.",
                hint=f"Try it alone: {VISIBLE}={setup.visible} {shlex.join(command)}",
            )
        return self._read(printed, key, wanted)

    def _read(self, text: str, key: str, wanted: Sequence[int]) -> Rows:
        try:
            rows = {int(row[key]): row for row in json.loads(text)}
            found = {number: rows[number] for number in wanted}
            missing = [n for n, row in found.items() if not 0 < float(row["avg_ts"]) < math.inf]
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise HeadroomError(
                f"{self.program} does not answer as llama-bench does: {error!r}.",
                hint="Builds since the middle of 2025 have -d, and avg_ts in their JSON.",
            ) from error
        if missing:
            raise HeadroomError(f"{self.program} measured no speed for {_joined(missing)} tokens.")
        return found


def _within_patience(
    setup: PeerSetup, settings: BenchSettings, prompts: Rows
) -> tuple[list[int], tuple[str, ...]]:
    """Return the contexts to measure, and a text for each that would take longer than allowed."""
    if "decode" not in settings.only:
        return [], ()
    speed = float(prompts[max(prompts)]["avg_ts"]) if prompts else math.inf
    contexts, left_out = [], []
    for context in (one for one in settings.contexts if one < setup.context):
        if (seconds := context / speed) > settings.patience_s:
            limit = f"{settings.patience_s:.0f} s (--patience)"
            why = f"its prompt would take {seconds:.0f} s and may take {limit}"
            left_out.append(f"llama-bench, decode after {context}: {why}")
        else:
            contexts.append(context)
    return contexts, tuple(left_out)


def find_peer(kind: str, path: str) -> LlamaBench:
    """Return the program that `--compare KIND PATH` names, or refuse it."""
    if kind not in PEERS:
        raise OptionError(
            f"--compare {kind} is not known.", hint=f"Known: {', '.join(PEERS)}.", param="compare"
        )
    found = shutil.which(path)
    if found is not None:
        return LlamaBench(Path(found).absolute())
    if not Path(path).exists():
        raise OptionError(
            f"There is no program {path}.", hint="Write --compare llama-bench PATH.",
            param="compare",
        )  # fmt: skip
    reason = "is a folder" if Path(path).is_dir() else "is not executable"
    raise OptionError(f"{path} {reason}.", hint="Name the llama-bench binary.", param="compare")


def unlike_note(run: PeerRun, device: str) -> str:
    """Return a note if only one of headroom and llama-bench ran on a GPU; "" otherwise."""
    ours, theirs = device != "cpu", bool(run.gpu)
    if ours == theirs or not (run.prompts or run.decodes):
        return ""
    where = f"llama-bench ran {run.where} and headroom on {device}"
    return f"{where}: the ratios compare a GPU with a CPU, not two programs"


def ratios(figures: Figures, runs: Sequence[PeerRun]) -> list[dict[str, Any]]:
    """Return our figures and the better of the peer's runs, for what both have measured."""
    rows = []
    for prompt in figures.prompts:
        seen = [run.prompts[prompt.tokens] for run in runs if prompt.tokens in run.prompts]
        rows.append((f"prompt of {prompt.tokens}", prompt.tokens_per_s, seen))
    for decode in figures.decodes:
        if decode.batch == 1:
            seen = [run.decodes[decode.context] for run in runs if decode.context in run.decodes]
            rows.append((f"decode after {decode.context}", decode.tokens_per_s, seen))
    return [
        {
            "what": what,
            "tokens_per_s": ours,
            "peer_runs": seen,
            "peer_tokens_per_s": max(seen),
            "ratio": ours / max(seen),
        }
        for what, ours, seen in rows
        if seen
    ]


def _end(code: int) -> str:
    """Return how a program ended: its exit code or its signal (SIGILL if built for another CPU)."""
    if code < 0 and -code in {one.value for one in signal.Signals}:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with {code}"


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
