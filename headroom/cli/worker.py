"""`headroom worker`: run a part of a model's layers for an engine in another process."""

import contextlib
import logging
import os
import sys
from dataclasses import replace
from typing import Annotated

import typer

from headroom.cli.settings import with_settings
from headroom.errors import FormatError, ModelError, OptionError, PlanError
from headroom.machine.devices import detect_cpu
from headroom.machine.gpus import detect_gpus
from headroom.options import Options
from headroom.units import counted

log = logging.getLogger(__name__)

PORT = 7070  # where a worker looks for the engine if --join does not say it


@with_settings("engine", "workers", "program")
def worker(
    options: Options,
    model: Annotated[
        str | None,
        typer.Argument(help="this machine's copy of the model; default: at the engine's path"),
    ] = None,
    join: Annotated[
        str,
        typer.Option(
            help="where the engine waits for workers (default: torchrun's MASTER_ADDR, port 7070)",
            metavar="HOST:PORT",
        ),
    ] = "",
    wait: Annotated[
        float, typer.Option(help="seconds in which the engine must answer", min=0)
    ] = 600.0,
    slot: Annotated[int | None, typer.Option(hidden=True)] = None,
    cores: Annotated[str, typer.Option(hidden=True)] = "",  # numbers of the only ones to run on
    # What torchrun tells the processes that it starts.
    master: Annotated[str, typer.Option(hidden=True, envvar="MASTER_ADDR")] = "",
    rank: Annotated[int, typer.Option(hidden=True, envvar="LOCAL_RANK", min=0)] = 0,
    ranks: Annotated[int, typer.Option(hidden=True, envvar="LOCAL_WORLD_SIZE", min=0)] = 0,
) -> None:
    """Run a part of a model's layers for `headroom serve --workers`, here or on another machine.

    The worker and the engine need the same HEADROOM_WORKER_TOKEN. When the engine starts its
    workers again, a worker that was started by hand joins again.
    """
    address = engine_address(join, master)
    options = options_of_rank(options, rank, ranks)
    if options.worker_token is None:
        raise OptionError(
            "A worker needs the engine's token.",
            hint="Set HEADROOM_WORKER_TOKEN to the text that the engine has, too.",
            param="worker_token",
        )
    if cores:
        os.sched_setaffinity(0, [int(number) for number in cores.split(",")])
    # Late, because torch takes seconds to import.
    from headroom.split.neighbours import NeighbourLostError
    from headroom.split.wire import RefusedError
    from headroom.split.worker import EngineGoneError, Worker
    from headroom.split.worker_messages import LOST

    # The engine starts a worker with a slot again itself.
    by_hand = slot is None
    process = Worker(
        options, options.worker_token, slot, model, join_again=join_again if by_hand else None
    )
    try:
        process.run(address, wait, options.worker_timeout)
    except NeighbourLostError as error:
        log.error("worker: %s", error)
        if not by_hand:
            raise typer.Exit(LOST) from error
        join_again()
    except (EngineGoneError, RefusedError, FormatError, ModelError, OptionError, PlanError):
        raise  # the same would happen again
    except Exception:
        if not by_hand:
            raise
        log.exception("worker: joining again")
        join_again()


def engine_address(join: str, master: str) -> tuple[str, int]:
    """Return where the engine waits: as `--join` says, or on torchrun's first machine."""
    host, _, port = join.rpartition(":") if join else ("", "", str(PORT))
    host = host or master
    if not host or not port.isdecimal():
        raise OptionError(
            f"--join is {join!r}.", hint="Write --join 10.0.0.5:7070, as the engine says it."
        )
    return host, int(port)


def options_of_rank(options: Options, rank: int, ranks: int) -> Options:
    """Return the options of one of the workers that torchrun starts here; `ranks` 0: one by hand.

    Each takes one device: the first worker the first one, and so on. Without --device these are
    the machine's GPUs, or its CPU.
    """
    devices = (options.device or "cpu").split(",")
    if len(devices) > max(1, ranks):
        raise OptionError(
            f"--device names {len(devices)} devices for {counted(max(1, ranks), 'worker')}.",
            hint="A worker runs on one device: start one for each.",
            param="device",
        )
    if not ranks:
        return options
    if options.device is None:
        devices = [gpu.name for gpu in detect_gpus()] or devices
    threads = options.threads or max(1, detect_cpu().cores // ranks)
    return replace(options, device=devices[rank % len(devices)].strip(), threads=threads)


def join_again() -> None:
    """Replace this process by a new one with the same arguments, which frees all its memory."""
    for number in os.listdir("/dev/fd"):
        if int(number) > 2:
            with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
                os.set_inheritable(int(number), False)
    os.execv(sys.executable, [sys.executable, "-m", "headroom", *sys.argv[1:]])
