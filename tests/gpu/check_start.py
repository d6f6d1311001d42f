"""Times a start on a GPU, part by part: host memory, loading, compiling, capturing.

    python -m tests.gpu.check_start --folder FOLDER [--only host,35b,27b] [--profile] [--seconds N]

Models have their true size and weights of zeros (tests/hollow.py), and lie in the page cache. Every
start is a process of its own: the first one of a model finds no compiled code, the next ones do.
PASS and FAIL hold a start to what it must reach. Nothing else may use the GPU.

"host" times what pinned host memory is made of, in several ways: pages that the system gives (one
thread or many), and the driver's registration of them; and reads what of the card it takes.
"""

import argparse
import cProfile
import io
import logging
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headroom.kernels.cuda.driver import lock_pages, unlock_pages
from headroom.kernels.native.memory import large_pages, touch_pages
from headroom.layers import host_memory, upload
from headroom.split import build, gpu_stage, launch
from headroom.units import GIB, MIB
from tests.gpu.running import MODELS, open_pipeline
from tests.gpu.usage import Usage, free_by_torch
from tests.hollow import fill_page_cache, write_hollow

CAPTURE_MUST_S = {"first": 12.0, "later": 6.0}  # 6 and 3 are aimed at
LOAD_MUST = 8e9  # bytes per second, of a file with cold experts; all-hot ones reach 10 to 13
HOST_SIZES = (1, 2, 4, 8, 12)  # GiB of mapped host memory
WAYS_BYTES, WAYS_PARTS = 4 * GIB, 16


@dataclass(frozen=True, slots=True)
class Start:
    """A start of a model that is measured."""

    model: str
    name: str
    code: str  # "first": no code is kept; "later": it is
    settings: tuple[tuple[str, object], ...] = ()

    @property
    def cold(self) -> bool:
        """Whether some experts are cold."""
        return bool(self.settings)


STARTS = (
    Start("35b", "35b", "first"),
    Start("35b", "35b again", "later"),
    Start("35b", "35b, card of 12 GiB", "first", (("device_memory", "12GiB"),)),
    Start("35b", "35b, card of 12 GiB again", "later", (("device_memory", "12GiB"),)),
    Start("35b", "35b, card of 8 GiB", "later", (("device_memory", "8GiB"),)),
    Start("35b", "35b, no hot expert", "later", (("expert_budget", "0%"),)),
    Start("27b", "27b", "first"),
    Start("27b", "27b again", "later"),
)


class Clock:
    """Adds up the seconds of functions by name; those within others count in both."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def watch(self, owner: Any, name: str, label: str) -> None:
        """Replace a function by one that is timed."""
        run = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            with self.of(label):
                return run(*args, **named)

        setattr(owner, name, timed)

    @contextmanager
    def of(self, label: str) -> Iterator[None]:
        """Add the seconds of a block."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[label] += time.perf_counter() - began
            self.calls[label] += 1

    def show(self) -> None:
        """Print all parts, the longest first."""
        for label, seconds in sorted(self.seconds.items(), key=lambda one: -one[1]):
            print(f"  {label:32} {seconds:7.3f} s in {self.calls[label]} calls")


def watch_loading(clock: Clock) -> None:
    """Time the parts of a load, as the thread that loads sees them."""
    clock.watch(host_memory, "large_pages", "host memory: map")
    clock.watch(host_memory, "touch_pages", "host memory: touch pages")
    clock.watch(host_memory, "lock_pages", "host memory: register")
    clock.watch(build, "open_store", "experts: open the store")
    clock.watch(upload.Upload, "_send", "upload: pieces, waits and copies")
    clock.watch(upload.Upload, "_copy_oldest", "upload: wait for reads, then copy")
    clock.watch(upload.HostTiles, "copy_piece", "upload: pack for the host, copy back")
    clock.watch(upload, "pack_at", "upload: launch packing to addresses")
    clock.watch(upload.Upload, "wait", "upload: wait for the end")
    clock.watch(launch, "load_model", "load_model")
    clock.watch(gpu_stage.GpuStage, "_rehearse", "capture: rehearse")
    clock.watch(gpu_stage, "compile_ahead", "capture: compile and load kernels")
    clock.watch(gpu_stage.GpuStage, "_capture", "capture: steps of a kind")
    clock.watch(gpu_stage.GpuStage, "_run_padding", "capture: steps that are only run")
    clock.watch(gpu_stage.GpuStage, "_warm_up", "capture: long steps")
    clock.watch(torch.cuda.graph, "__enter__", "capture: torch begins a graph")
    clock.watch(torch.cuda.graph, "__exit__", "capture: torch ends a graph")


def measure_start(start: Start, path: Path, profile: bool) -> bool:
    """Load and capture a model in this process; print the parts, and hold it to its limits."""
    logging.basicConfig(level=logging.INFO, format="  %(message)s", stream=sys.stdout)
    usage, clock = Usage(), Clock()
    began = time.perf_counter()
    torch.zeros(1, device="cuda")
    print(f"  CUDA's start: {time.perf_counter() - began:.2f} s")
    watch_loading(clock)
    if profile:
        profiled(launch, "_load", "load")
        profiled(launch, "_capture", "capture")
    began = time.perf_counter()
    pipeline, plan = open_pipeline(path, device="cuda:0", **dict(start.settings))
    whole = time.perf_counter() - began
    clock.show()
    times, device = pipeline.load_times, plan.devices[0]
    everything = sum(line.bytes for line in device.lines if line.name != "reserve")
    taken, total = usage.taken(), times.weights_bytes
    print(
        f"  whole {whole:.2f} s; weights {total / 1e9:.2f} GB in {times.weights_s:.2f} s; "
        f"capture {times.capture_s:.2f} s; {taken / MIB:.0f} of {everything / MIB:.0f} MiB taken"
    )
    must = CAPTURE_MUST_S[start.code]
    good = verdict(
        f"{start.name}: {start.code} capture {times.capture_s:.1f} s of {must:.0f}",
        times.capture_s <= must,
    )
    if start.cold:
        speed = times.bytes_per_s
        good &= verdict(f"{start.name}: load {speed / 1e9:.1f} GB/s of 8", speed >= LOAD_MUST)
    pipeline.close()
    return good


def profiled(owner: Any, name: str, what: str) -> None:
    """Print where a function takes its time, by Python's profiler, which slows it a little."""
    run = getattr(owner, name)

    def watched(*args: Any, **named: Any) -> Any:
        profiler = cProfile.Profile()
        found = profiler.runcall(run, *args, **named)
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(22)
        kept = [line for line in text.getvalue().splitlines() if line.strip()]
        print(f"  PROFILE of {what}\n" + "\n".join(f"    {line}" for line in kept[3:]))
        return found

    setattr(owner, name, watched)


def verdict(what: str, good: bool) -> bool:
    print(f"{'PASS' if good else 'FAIL'} {what}", flush=True)
    return good


def measure_host() -> None:
    """Time the parts of pinned host memory, and read what the card holds for it."""
    torch.zeros(1, device="cuda")
    for name, give in (
        ("untouched", lambda memory: None),
        ("touched by one thread", lambda memory: memory.numpy()[::4096].fill(0)),
        ("touched by all threads", touch_pages),
    ):
        for parts, threads in ((1, 1), (WAYS_PARTS, 1), (WAYS_PARTS, 8)):
            time_ways(name, give, parts, threads)
    before_all = free_by_torch()
    for size in HOST_SIZES:
        memory = large_pages(size * GIB)
        touch_pages(memory)
        before, began = free_by_torch(), time.perf_counter()
        refused = lock_pages(memory.data_ptr(), len(memory), 0)
        seconds, held = time.perf_counter() - began, before - free_by_torch()
        if refused:
            print(f"HOST {size} GiB: refused: {refused}", flush=True)
            continue
        torch.zeros(1, device="cuda")
        unlock_pages(memory.data_ptr(), 0)
        left = before - free_by_torch()
        print(
            f"HOST {size} GiB: registered in {seconds:.3f} s; the card holds {held / MIB:.1f} MiB "
            f"({held / size / MIB:.2f} MiB per GiB), {left / MIB:.1f} MiB after it was freed",
            flush=True,
        )
        del memory
    print(f"HOST all: {(before_all - free_by_torch()) / MIB:.1f} MiB stay taken", flush=True)
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    print(f"HOST large pages: {pages.read_text().strip() if pages.exists() else 'unknown'}")


def time_ways(name: str, give: Callable[[torch.Tensor], object], parts: int, threads: int) -> None:
    """Time the pages and the registration of some memory, whole or in parts in threads."""
    began = time.perf_counter()
    memory = large_pages(WAYS_BYTES)
    give(memory)
    given = time.perf_counter()
    size = WAYS_BYTES // parts
    starts = [memory.data_ptr() + size * number for number in range(parts)]
    with ThreadPoolExecutor(threads) as pool:
        refused = [x for x in pool.map(lambda at: lock_pages(at, size, 0), starts) if x]
    registered = time.perf_counter()
    for at in starts:
        unlock_pages(at, 0)
    ended = time.perf_counter()
    gib = WAYS_BYTES / GIB
    print(
        f"HOST {gib:.0f} GiB {name}, {parts} parts, {threads} threads: per GiB "
        f"pages {(given - began) / gib:.3f} s, register {(registered - given) / gib:.3f} s, "
        f"free {(ended - registered) / gib:.3f} s{f', REFUSED {refused[0]}' if refused else ''}",
        flush=True,
    )


def apart(given: argparse.Namespace, number: int, home: str) -> bool:
    """Measure a start in a process of its own; return whether it kept to its limits."""
    command = [sys.executable, "-m", "tests.gpu.check_start", "--folder", str(given.folder)]
    command += ["--start", str(number), *(["--profile"] if given.profile else [])]
    print(f"{STARTS[number].name}: {STARTS[number].code} start", flush=True)
    began = time.perf_counter()
    code = subprocess.run(command, env=os.environ | {"HEADROOM_HOME": home}, check=False).returncode
    print(f"  {time.perf_counter() - began:.1f} s in all", flush=True)
    return code == 0


def main() -> int:
    """Measure host memory, then each start."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", default="host,35b,27b", help="of host, 35b and 27b")
    parser.add_argument("--profile", action="store_true", help="with Python's profiler")
    parser.add_argument("--seconds", type=float, default=600, help="begin nothing after them")
    parser.add_argument("--start", type=int, help="measure this one in this process")
    parser.add_argument("--host", action="store_true", help="measure host memory in this process")
    given = parser.parse_args()
    if given.host:
        measure_host()
        return 0
    began, good, only = time.perf_counter(), [], given.only.split(",")
    with tempfile.TemporaryDirectory() as made:
        given.folder = given.folder or Path(made)
        given.folder.mkdir(parents=True, exist_ok=True)
        if given.start is not None:
            start = STARTS[given.start]
            path = write_hollow(*MODELS[start.model], given.folder / f"{start.model}-hollow.gguf")
            return 0 if measure_start(start, path, given.profile) else 1
        if "host" in only:
            subprocess.run([sys.executable, "-m", "tests.gpu.check_start", "--host"], check=False)
        homes: dict[str, str] = {}
        for number, start in enumerate(STARTS):
            if start.model not in only:
                continue
            if time.perf_counter() - began > given.seconds:
                print(f"LEFT OUT {start.name}")
                continue
            path = write_hollow(*MODELS[start.model], given.folder / f"{start.model}-hollow.gguf")
            if start.model not in homes:
                read = time.perf_counter()
                size = fill_page_cache(path)
                print(
                    f"{path.name}: {size / 1e9:.2f} GB read in {time.perf_counter() - read:.1f} s"
                )
            if start.code == "first":
                homes[start.model] = str(Path(made) / f"home-{number}")
            good.append(apart(given, number, homes[start.model]))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
