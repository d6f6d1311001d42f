"""Peer: another program's benchmark on the same file, for comparison."""

import json
import math
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headroom.bench.figures import BenchSettings, Figures
from headroom.bench.peer_setup import VISIBLE, PeerSetup
from headroom.errors import HeadroomError, OptionError

PEERS = ("llama-bench",)
TIMEOUT_S = 3600.0
Rows = dict[int, dict[str, Any]]  # of an answer, by one of their numbers


@dataclass(frozen=True, slots=True)
class PeerRun:
    """What one run of llama-bench said, in tokens per second."""

    prompts: Mapping[int, float]  # by tokens
    decodes: Mapping[int, float]  # by the context before, one sequence
    build: str
    backends: str = ""  # that it was built with: "CUDA", "CPU"
    gpu: str = ""  # the GPUs that it saw; "" where there was none
    cpu: str = ""
    left_out: tuple[str, ...] = ()  # what it was not asked for, and why

    @property
    def where(self) -> str:
        """What it computed on, in words."""
        return f"{self.backends or 'unknown backend'} on {self.gpu or self.cpu or 'a CPU'}"


@dataclass(frozen=True, slots=True)
class LlamaBench:
    """A llama-bench binary that was found."""

    program: Path

    def run(self, model: Path, setup: PeerSetup, settings: BenchSettings) -> PeerRun:
        """Measure once what is wanted of prompts and decoding, with our cache types and threads."""
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
        """Run it once; return the rows of its answer by one of their numbers."""
        command = [str(self.program), *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S,
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
                f"{self.program} took more than {TIMEOUT_S:.0f} s.", hint="Measure less."
            ) from error
        # It repeats names of files, which may be of any bytes: figures do not depend on them.
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
    """Return the contexts to decode after, and why others would take too long."""
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
    """Return the program that `--compare KIND PATH` names, or say what is wrong with it."""
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
    """Say in words that one of us computed on a GPU and the other did not; "" where both did."""
    ours, theirs = device != "cpu", bool(run.gpu)
    if ours == theirs or not (run.prompts or run.decodes):
        return ""
    where = f"llama-bench ran {run.where} and headroom on {device}"
    return f"{where}: the ratios compare a GPU with a CPU, not two programs"


def ratios(figures: Figures, runs: Sequence[PeerRun]) -> list[dict[str, Any]]:
    """Return our figures beside the better of the peer's runs, where both measured the same."""
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
    """Say how a program ended: one for other CPUs, say, by SIGILL."""
    if code < 0 and -code in {one.value for one in signal.Signals}:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with {code}"


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
