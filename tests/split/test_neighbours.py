"""Rows go from one worker to the next, in every hand-over type, with and without inputs beside."""

import socket
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from headroom.families.files import open_checkpoint
from headroom.kernels.weight import plain_type
from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import Plan, make_plan
from headroom.split.model import HandedRows
from headroom.split.neighbours import NeighbourLostError, Neighbours, torch_dist
from headroom.split.worker_messages import LoadOrder
from headroom.units import GIB
from tests.families.oracles import variant

OPTIONS = Options(context=64, parallel=2, chunk=6)


def cpus(count: int) -> tuple[DeviceSpec, ...]:
    cpu = DeviceSpec(
        name="cpu", kind="cpu", total_bytes=8 * GIB, available_bytes=8 * GIB, cores=1, worker=True
    )
    return tuple(replace(cpu, name=f"cpu#{number + 1}") for number in range(count))


def meet(path: Path, options: Options, count: int) -> tuple[Plan, list[Neighbours]]:
    """Let so many workers, all in this process, find each other."""
    model = describe(open_checkpoint(path))
    devices = cpus(count)
    plan = make_plan([model.shape], devices, options)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    timeout = timedelta(seconds=30)
    store = torch_dist.TCPStore(
        "127.0.0.1", port, None, True, timeout, False, master_listen_fd=listener.detach()
    )
    order = LoadOrder(
        worker=0, model="", identity="", options=options, devices=devices, plan_digest="",
        placement=None, meeting=("127.0.0.1", port), group="g", features=None,
    )  # fmt: skip
    met: dict[int, Neighbours] = {}

    def join(number: int) -> None:
        met[number] = Neighbours.meet(order, "127.0.0.1", plan, model.config, number)

    threads = [threading.Thread(target=join, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    del store
    return plan, [met[number] for number in range(count)]


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_rows_arrive_in_order_while_the_next_ones_are_computed(tmp_path: Path, kind: str) -> None:
    path = variant("gemma4-e4b").save_gguf(tmp_path / "m.gguf")
    plan, (first, middle, last) = meet(path, replace(OPTIONS, activation_dtype=kind), 3)
    hidden = open_checkpoint(path).metadata.get_int("embedding_length")
    layers = [device.layers for device in plan.devices]
    width = describe(open_checkpoint(path)).config.layers[0].per_layer_width
    total = layers[-1].last + 1

    def rows(number: int, stage: int) -> HandedRows:
        count = 1 + number % 6
        stream = torch.full((count, hidden), float(number), dtype=plain_type(kind))
        inputs = torch.full((count, total - layers[stage + 1].first, width), number + 0.5)
        return HandedRows(stream, inputs)

    def send() -> None:
        for number in range(20):
            first.send(rows(number, 0))

    def forward() -> None:
        for number in range(20):
            got = middle.receive(1 + number % 6)
            assert got is not None
            middle.send(HandedRows(got.stream, rows(number, 1).inputs))

    threads = [threading.Thread(target=call) for call in (send, forward)]
    for thread in threads:
        thread.start()
    for number in range(20):
        got = last.receive(1 + number % 6)
        wanted = rows(number, 1)
        assert got is not None
        assert got.stream.dtype == plain_type(kind)
        assert torch.equal(got.stream, wanted.stream)
        assert got.inputs is not None
        assert wanted.inputs is not None
        assert torch.equal(got.inputs, wanted.inputs)
    for thread in threads:
        thread.join(20)
    assert first.receive(3) is None  # it looks tokens up
    assert [x.is_last for x in (first, middle, last)] == [False, False, True]


def test_the_buffers_have_the_bytes_that_are_planned(tmp_path: Path) -> None:
    path = variant("gemma4-e4b").save_gguf(tmp_path / "m.gguf")
    options = replace(OPTIONS, split="2,2,8")  # workers that are free to choose cut elsewhere
    plan, met = meet(path, options, 3)
    model = describe(open_checkpoint(path))
    alone = [replace(device, worker=False) for device in cpus(3)]
    without = make_plan([model.shape], alone, replace(options, threads=1))
    for device, plain, neighbours in zip(plan.devices, without.devices, met, strict=True):
        assert device.layers == plain.layers
        grown = device.allocated["staging"] - plain.allocated["staging"]
        assert grown == neighbours.nbytes > 0


def test_a_neighbour_that_is_gone_is_named(tmp_path: Path) -> None:
    path = variant("llama").save_gguf(tmp_path / "m.gguf")
    _, met = meet(path, OPTIONS, 2)
    del met[0]
    with pytest.raises(NeighbourLostError, match="Receiving rows from worker 1 failed"):
        met[0].receive(2)


def test_a_single_worker_needs_no_others(tmp_path: Path) -> None:
    path = variant("llama").save_gguf(tmp_path / "m.gguf")
    _, (alone,) = meet(path, OPTIONS, 1)
    assert alone.is_last
    assert alone.receive(1) is None
    assert alone.nbytes == 0
