"""Peer: another program's benchmark on the same file, for comparison."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headroom.bench.figures import BenchSettings, Figures
from headroom.errors import HeadroomError, OptionError
from headroom.memory.plan import Plan

PEERS = ("llama-bench",)
TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class PeerRun:
    """What one run of llama-bench said, in tokens per second."""

    prompts: Mapping[int, float]  # by tokens
    decodes: Mapping[int, float]  # by the context before, one sequence
    build: str


@dataclass(frozen=True, slots=True)
class LlamaBench:
    """A llama-bench binary that was found."""

    program: Path

    def run(self, model: Path, plan: Plan, settings: BenchSettings) -> PeerRun:
        """Measure prompts and decoding once, with our cache types and threads."""
        chunk = str(max(plan.settings.chunk, *settings.prompts))
        common = ["-m", str(model), "-o", "json", "-r", str(settings.rounds), *plan_flags(plan)]
        common += ["-b", chunk, "-ub", chunk]
        prompts = self._rows(
            [*common, "-p", _joined(settings.prompts), "-n", "0"], "n_prompt", settings.prompts
        )
        contexts = [one for one in settings.contexts if one < plan.settings.context]
        decodes: dict[int, dict[str, Any]] = {}
        if contexts:
            count = str(settings.tokens)
            decodes = self._rows(
                [*common, "-p", "0", "-n", count, "-d", _joined(contexts)], "n_depth", contexts
            )
        first = next(iter([*prompts.values(), *decodes.values()]))
        return PeerRun(
            {tokens: float(row["avg_ts"]) for tokens, row in prompts.items()},
            {context: float(row["avg_ts"]) for context, row in decodes.items()},
            f"llama.cpp {first.get('build_commit', '?')} ({first.get('build_number', '?')})",
        )

    def _rows(
        self, arguments: Sequence[str], key: str, wanted: Sequence[int]
    ) -> dict[int, dict[str, Any]]:
        """Run it once; return the rows of its answer by one of their numbers."""
        try:
            done = subprocess.run(
                [str(self.program), *arguments],
                capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
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
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["it said nothing"]
            raise HeadroomError(
                f"{self.program} ended with {done.returncode}: {lines[-1]}.",
                hint=f"Try it alone: {' '.join([str(self.program), *arguments])}",
            )
        return self._read(done.stdout, key, wanted)

    def _read(self, text: str, key: str, wanted: Sequence[int]) -> dict[int, dict[str, Any]]:
        try:
            rows = {int(row[key]): row for row in json.loads(text)}
            missing = [number for number in wanted if float(rows[number]["avg_ts"]) <= 0]
        except (ValueError, KeyError, TypeError) as error:
            raise HeadroomError(
                f"{self.program} does not answer as llama-bench does: {error!r}.",
                hint="Builds since the middle of 2025 have -d, and avg_ts in their JSON.",
            ) from error
        if missing:
            raise HeadroomError(f"{self.program} measured no speed for {_joined(missing)} tokens.")
        return rows


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


def plan_flags(plan: Plan) -> list[str]:
    """Return the flags that make llama-bench run as the plan does."""
    settings = plan.settings
    layers = "0" if plan.devices[0].kind == "cpu" else "99"
    # As wide as our bf16, and what llama.cpp is fastest with.
    keys, values = (
        "f16" if name == "bf16" else name for name in (settings.k_type, settings.v_type)
    )
    flags = ["-ngl", layers, "-t", str(settings.threads), "-fa", "1"]
    return [*flags, "-ctk", keys, "-ctv", values]


def check_comparable(model: Path) -> None:
    """Refuse a model that the peer cannot read."""
    if model.suffix != ".gguf" or not os.access(model, os.R_OK):
        raise OptionError(f"llama-bench reads .gguf files, and {model} is none.", param="compare")


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


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
