"""`headroom calibrate`: measure this machine once, so that plans need not estimate."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from headroom.cli.progress import step_bar
from headroom.cli.settings import with_settings
from headroom.machine.calibration import Speeds, save_speeds, speeds_path
from headroom.options import Options


@with_settings("program", log_level="warning")
def calibrate(
    options: Options,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Measure this machine's memory, links and arithmetic; plans then use what was found."""
    with step_bar("starting") as show:
        from headroom.machine.measure import measure_machine  # torch: --help must not wait for it

        speeds = measure_machine(show)
    path = speeds_path(options.home_path)
    save_speeds(path, speeds)
    if as_json:
        print(json.dumps({"path": str(path), "devices": {x: asdict(speeds[x]) for x in speeds}}))
        return
    for name, row in speeds.items():
        print(f"{name}: {described(row)}")
    print(f"kept in {path}")


def described(speeds: Speeds) -> str:
    """Return measured speeds as people read them."""
    parts = [f"memory {speeds.bandwidth / 1e9:.1f} GB/s"]
    if speeds.link:
        parts.append(f"link {speeds.link / 1e9:.1f} GB/s")
    if speeds.link_read:
        parts.append(f"link read by kernels {speeds.link_read / 1e9:.1f} GB/s")
    if speeds.handover_s:
        parts.append(f"hand-over {speeds.handover_s * 1e6:.1f} us")
    if speeds.experts:
        parts.append(f"experts {speeds.experts / 1e9:.1f} GB/s")
    if speeds.expert_flops:
        parts.append(f"of 8 rows each {speeds.expert_flops / 1e9:.0f} GFLOP/s")
    return ", ".join([*parts, f"arithmetic {speeds.flops / 1e12:.2f} TFLOP/s"])
