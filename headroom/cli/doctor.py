"""`headroom doctor`: shows what this machine has, what headroom can use, and why not the rest."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headroom import __version__
from headroom.cli.abilities import ability_facts, ability_texts
from headroom.cli.doctor_gpus import Section, backend_text, gpu_texts, gpus, unseen
from headroom.cli.settings import with_settings
from headroom.errors import FormatError
from headroom.families.files import find_weights, open_checkpoint
from headroom.formats.hub import find_model
from headroom.machine.calibration import read_speeds, speeds_path
from headroom.machine.cgroups import read_limits
from headroom.machine.devices import DeviceSpec, detect_cpu, usable_cores
from headroom.machine.gpus import detect_gpus
from headroom.machine.precision import device_precision
from headroom.options import Options
from headroom.text.abilities import Abilities
from headroom.units import counted, gib

NEEDED = (
    "torch", "numpy", "tokenizers", "safetensors", "huggingface-hub", "jinja2", "llguidance",
    "typer", "rich", "prompt_toolkit",
)  # fmt: skip
EXTRAS = {
    "server": ("fastapi", "pydantic", "uvicorn", "prometheus-client"),
    "gpu": ("triton",),
}
BACKENDS = ("cuda", "triton", "native", "reference")
# Instruction sets that matter for the speed of matrix products, as Linux names them.
INSTRUCTION_SETS = {
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl",
    "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2",
}  # fmt: skip


@with_settings("model", "program", log_level="warning")
def doctor(
    options: Options,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    all_kernels: Annotated[
        bool, typer.Option("--kernels", help="run kernels of every family on each GPU")
    ] = False,
) -> None:
    """Show what this machine has and what headroom can use; with MODEL, describe the model, too."""
    model = model_section(options) if options.model else None
    with Console(stderr=True).status("GPUs") as shown:  # shown on a terminal only
        found = gpus(try_all=all_kernels, told=shown.update)
    report = {
        "versions": versions(),
        "cpu": cpu(),
        "devices": [device_row(detect_cpu())],
        "gpus": found,
        "no_gpus_because": "" if found else unseen(),
        "calibration": calibration(options.home_path, ["cpu", *(row["name"] for row in found)]),
        "kernels": kernels(options),
        "models": models(options),
    }
    if model is not None:
        report["model"] = model
    if as_json:
        print(json.dumps(report))
        return
    console = Console(highlight=False)
    for title, section in readable(report).items():
        console.print(make_table(title, section))


def versions() -> Section:
    """Return the versions of headroom, Python and the packages; None for a missing package."""
    extras = {name: extra for extra, names in EXTRAS.items() for name in names}
    return {
        "headroom": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: installed(name) for name in (*NEEDED, *extras)},
        "missing_extras": sorted({extras[name] for name in extras if installed(name) is None}),
    }


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Section:
    """Return the processor, its instruction sets, and the limits of this process's cgroups."""
    try:
        rows = (row.partition(":") for row in cpuinfo.read_text().splitlines())
        facts = {key.strip(): value.strip() for key, _, value in rows}
    except OSError:
        facts = {}
    words = set(facts.get("flags", facts.get("Features", "")).split())
    return {
        "model": facts.get("model name", platform.processor() or "unknown"),
        "instruction_sets": sorted(words & INSTRUCTION_SETS),
        "limits": asdict(read_limits()),
    }


def device_row(device: DeviceSpec) -> Section:
    """Return a device's memory, the type that it computes in, and why."""
    precision = device_precision(device)
    return {
        "name": device.name,
        "cores": device.cores,
        "total_bytes": device.total_bytes,
        "available_bytes": device.available_bytes,
        "pinnable_bytes": device.pinnable_bytes,
        "activation_type": precision.type,
        "reason": precision.reason,
    }


def calibration(home: Path, names: Sequence[str]) -> Section:
    """Return when each device was measured; None if it was not, or if it was another GPU."""
    path = speeds_path(home)
    try:
        speeds, problem = read_speeds(path), ""
    except FormatError as error:
        speeds, problem = {}, str(error)
    here = {gpu.name: gpu for gpu in detect_gpus()}
    valid = {name for name in speeds if name not in here or not speeds[name].unlike(here[name])}
    dates = {name: speeds[name].date if name in valid else None for name in names}
    return {"path": str(path), "measured": dates, "problem": problem}


def kernels(options: Options) -> Section:
    """Return the operations of each kernel backend, and facts about the C++ module."""
    from headroom.kernels.native.module import MISSING, POOL  # torch: only this command needs it
    from headroom.kernels.registry import KERNELS

    operations = {
        backend: sorted({kernel.op for kernel in KERNELS if kernel.backend.startswith(backend)})
        for backend in BACKENDS
    }
    native: Section = {"missing": MISSING}
    if not MISSING:
        threads = options.threads or usable_cores(read_limits())
        native = {"isa": POOL.ops.isa, "threads": threads, "pinned": options.pin_threads}
    return {"operations": operations, "native": native, "code": compiled_code(options.home_path)}


def compiled_code(home: Path) -> Section:
    """Return the folder of compiled GPU kernels, and its size in bytes."""
    from headroom.kernels.cuda.code_cache import code_folder, kept_bytes

    return {"folder": str(code_folder(home)), "bytes": kept_bytes(home)}


def models(options: Options) -> Section:
    """Return the folder of models, and the file of the default model; None if it is missing."""
    home = options.home_path
    try:
        default: str | None = str(find_model("", home))
    except FormatError:
        default = None
    return {"home": str(home), "default_model": default}


def model_section(options: Options) -> Section:
    """Return what a model's files say about sampling, chat, thoughts and tool calls."""
    checkpoint = open_checkpoint(find_weights(options.model, options.home_path))
    return {
        "path": str(checkpoint.path),
        "architecture": checkpoint.architecture,
        **ability_facts(checkpoint, Abilities.of(checkpoint)),
    }


def _model_texts(model: Section) -> dict[str, str]:
    return {
        "file": model["path"],
        "architecture": model["architecture"],
        **ability_texts(model),
    }


def readable(report: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the report as titles and rows of text."""
    versions, limits = report["versions"], report["cpu"]["limits"]
    memory, cores = limits["memory_bytes"], limits["cores"]
    return {
        "versions": {
            **{name: versions[name] for name in ("headroom", "python", "system")},
            **{name: value or "not installed" for name, value in versions["packages"].items()},
            **{
                f"extra {extra}": f"incomplete; pip install 'headroom[{extra}]'"
                for extra in versions["missing_extras"]
            },
        },
        "cpu": {
            "model": report["cpu"]["model"],
            "instruction sets": " ".join(report["cpu"]["instruction_sets"]) or "none known",
            "memory limit": "none" if memory is None else gib(memory),
            "core limit": "none" if cores is None else f"{cores:g}",
        },
        "devices": {row["name"]: _device_text(row) for row in report["devices"]},
        "GPUs": gpu_texts(report["gpus"], report.get("no_gpus_because", "")),
        "calibration": _calibration_texts(report["calibration"]),
        "kernels": {
            backend: backend_text(backend, ops, report["gpus"])
            for backend, ops in report["kernels"]["operations"].items()
        }
        | {"C++ module": _native_text(report["kernels"]["native"])}
        | {"compiled code": _code_text(report["kernels"]["code"])},
        "models": {
            "folder": report["models"]["home"],
            "default model": report["models"]["default_model"] or "missing; headroom pull gets it",
        },
        **({"model": _model_texts(report["model"])} if "model" in report else {}),
    }


def make_table(title: str, rows: Mapping[str, str]) -> Table:
    """Return rows of names and texts as a table."""
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(f"  {name}", text.replace("[", r"\["))
    return table


def _calibration_texts(found: Section) -> dict[str, str]:
    if found["problem"]:
        return {"file": found["problem"]}
    return {
        name: "not measured: speeds are estimates; headroom calibrate measures them once"
        if date is None
        else f"measured {date}, kept in {found['path']}"
        for name, date in found["measured"].items()
    }


def _native_text(native: Section) -> str:
    if isa := native.get("isa"):
        pinned = ", each pinned to a core" if native["pinned"] else ""
        return (
            f"built; runs {isa} instructions here on {counted(native['threads'], 'thread')}{pinned}"
        )
    return f"{native['missing']}; products run on the slow reference kernels"


def _code_text(code: Section) -> str:
    return f"{gib(code['bytes'])} of GPU kernels kept in {code['folder']}"


def _device_text(row: Section) -> str:
    limit = row["pinnable_bytes"]
    return (
        f"{counted(row['cores'], 'core')}, "
        f"{gib(row['available_bytes'])} of {gib(row['total_bytes'])} free, "
        f"{'all' if limit is None else gib(limit)} of it may be pinned, "
        f"computes in {row['activation_type']} ({row['reason']})"
    )
