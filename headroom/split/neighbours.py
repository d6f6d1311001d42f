"""Neighbours: hands the rows of a step from one worker to the next, by torch.distributed.

The ports that gloo opens for this check no token.
"""

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from headroom.errors import DeviceError
from headroom.families.config import ModelConfig
from headroom.kernels.weight import plain_type
from headroom.plan.lines import WORKER_SENDS
from headroom.plan.plan import Plan
from headroom.split.model import HandedRows
from headroom.split.worker_messages import LoadOrder

torch_dist: Any = torch.distributed  # torch declares no types for what is used here

# A neighbour may compute for long, so gloo must not give up. The engine notices by heartbeats that
# a worker has died or hangs, and then ends all.
LONGEST_WAIT = timedelta(days=1)
MEETING_TIMEOUT = timedelta(minutes=10)  # for all workers to load their weights


class NeighbourLostError(DeviceError):
    """The worker before or after this one has ended."""


@dataclass(slots=True, eq=False)
class _SendBuffer:
    """Rows that are being sent to the next worker."""

    stream: torch.Tensor  # [rows, hidden], in the hand-over type
    inputs: torch.Tensor  # float32 [rows, layers, width]: per-layer inputs; empty if there are none
    sends: list[Any]  # torch's handles of the sends under way

    def wait(self) -> None:
        """Wait until the buffer may be filled again."""
        for send in self.sends:
            send.wait(LONGEST_WAIT)
        self.sends.clear()


class Neighbours:
    """The links of a worker to the ones before and after it."""

    def __init__(
        self,
        group: Any,  # ProcessGroupGloo; None: there is only one worker
        number: int,
        workers: int,
        received: HandedRows | None,  # buffers for the rows of the worker before
        buffers: list[_SendBuffer],
    ) -> None:
        self._group, self._number, self._received = group, number, received
        self._buffers, self._turn = buffers, 0
        self.is_last = number == workers - 1
        self.last_send_s = 0.0  # seconds to copy the last step's rows, and to wait for a buffer

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        received = 0 if self._received is None else self._received.nbytes
        return received + sum(x.stream.nbytes + x.inputs.nbytes for x in self._buffers)

    @classmethod
    def meet(
        cls, order: LoadOrder, address: str, plan: Plan, config: ModelConfig, number: int
    ) -> "Neighbours":
        """Connect the workers of one start; `address` is this worker's own."""
        workers, group = len(plan.devices), None
        if workers > 1:
            host, port = order.meeting
            store = torch_dist.TCPStore(
                host, port, None, False, MEETING_TIMEOUT, wait_for_workers=False
            )
            # The public init_process_group() cannot say on which address gloo listens.
            options = torch_dist.ProcessGroupGloo._Options()
            options._timeout = LONGEST_WAIT
            options._devices = [torch_dist.ProcessGroupGloo.create_device(hostname=address)]
            named = torch_dist.PrefixStore(order.group, store)
            group = torch_dist.ProcessGroupGloo(named, number, workers, options)
        first, last = plan.devices[number].layers
        layers, width = len(config.layers), config.layers[0].per_layer_width or 0
        settings = plan.devices[number].settings
        kind, rows = plain_type(settings.handover_type), settings.rows

        def handed(first_layer: int) -> HandedRows:
            inputs = torch.zeros(rows, layers - first_layer, width) if width else None
            return HandedRows(torch.zeros(rows, config.hidden, dtype=kind), inputs)

        received = None if number == 0 else handed(first)
        buffers = []
        for _ in range(0 if number == workers - 1 else WORKER_SENDS):
            made = handed(last + 1)
            inputs = torch.zeros(0) if made.inputs is None else made.inputs
            buffers.append(_SendBuffer(made.stream, inputs, []))
        return cls(group, number, workers, received, buffers)

    def receive(self, rows: int) -> HandedRows | None:
        """Wait for the rows of a step from the worker before; None: this is the first worker."""
        if self._received is None:
            return None
        stream, inputs = self._received.stream[:rows], self._received.inputs
        self._receive(stream)
        if inputs is not None:
            inputs = inputs[:rows]
            self._receive(inputs)
        return HandedRows(stream, inputs)

    def send(self, handed: HandedRows) -> int:
        """Start to send the rows of a step to the worker after; return their bytes."""
        started = time.perf_counter()
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        rows = len(handed.stream)
        try:
            buffer.wait()
            self._send(buffer, buffer.stream[:rows].copy_(handed.stream))
            if handed.inputs is not None:
                self._send(buffer, buffer.inputs[:rows].copy_(handed.inputs))
        except RuntimeError as error:
            told = f"Sending rows to worker {self._number + 2} failed: {error}"
            raise NeighbourLostError(told) from error
        self.last_send_s = time.perf_counter() - started
        return handed.nbytes

    def _receive(self, into: torch.Tensor) -> None:
        assert self._group is not None
        try:
            self._group.recv([_as_bytes(into)], self._number - 1, 0).wait(LONGEST_WAIT)
        except RuntimeError as error:
            told = f"Receiving rows from worker {self._number} failed: {error}"
            raise NeighbourLostError(told) from error

    def _send(self, buffer: _SendBuffer, rows: torch.Tensor) -> None:
        assert self._group is not None
        buffer.sends.append(self._group.send([_as_bytes(rows)], self._number + 1, 0))


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Return contiguous rows as bytes, since gloo does not know all types."""
    return rows.view(-1).view(torch.uint8)
