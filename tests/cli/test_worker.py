"""`headroom worker`: where it joins an engine, on which device, and how it ends."""

from typing import Any

import pytest

from headroom.cli.main import run_command
from headroom.errors import ModelError
from headroom.machine.devices import DeviceSpec
from headroom.options import Options
from headroom.split.neighbours import NeighbourLostError
from headroom.split.wire import RefusedError, WireError
from headroom.units import GIB


class Runs:
    """What workers were run with; the last one ends with an error, if there is one."""

    def __init__(self) -> None:
        self.options: list[Options] = []
        self.addresses: list[tuple[str, int]] = []
        self.error: Exception | None = None
        self.joined_again = 0

    def join_again(self) -> None:
        self.joined_again += 1


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    seen = Runs()

    class Worker:
        def __init__(self, options: Options, token: str, *more: Any, **others: Any) -> None:
            assert token == "t"
            seen.options.append(options)

        def run(self, address: tuple[str, int], wait_s: float, timeout_s: float) -> None:
            seen.addresses.append(address)
            if seen.error is not None:
                raise seen.error

    monkeypatch.setattr("headroom.split.worker.Worker", Worker)
    monkeypatch.setattr("headroom.cli.worker.join_again", seen.join_again)
    monkeypatch.setenv("HEADROOM_WORKER_TOKEN", "t")
    for name in ("MASTER_ADDR", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return seen


def as_torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.5")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))


@pytest.mark.parametrize(
    ("join", "address"),
    [
        ([], ("10.0.0.5", 7070)),
        (["--join", ":7171"], ("10.0.0.5", 7171)),
        (["--join", "10.0.0.9:7171"], ("10.0.0.9", 7171)),
    ],
)
def test_a_process_of_torchrun_joins_its_first_machine_unless_told_otherwise(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, join: list[str], address: tuple[str, int]
) -> None:
    as_torchrun(monkeypatch, 0, 1)
    assert run_command(["worker", *join]) == 0
    assert runs.addresses == [address]


@pytest.mark.parametrize(
    ("gpus", "given", "devices"),
    [
        (0, [], ["cpu", "cpu", "cpu"]),
        (3, [], ["cuda:0", "cuda:1", "cuda:2"]),
        (2, [], ["cuda:0", "cuda:1", "cuda:0"]),
        (3, ["--device", "cuda:2", "--device", "cpu"], ["cuda:2", "cpu", "cuda:2"]),
    ],
)
def test_each_process_of_torchrun_takes_its_own_device_and_share_of_cores(
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    given: list[str],
    devices: list[str],
) -> None:
    found = [
        DeviceSpec(name=f"cuda:{n}", kind="cuda", total_bytes=GIB, available_bytes=GIB)
        for n in range(gpus)
    ]
    cpu = DeviceSpec(name="cpu", kind="cpu", total_bytes=GIB, available_bytes=GIB, cores=12)
    monkeypatch.setattr("headroom.cli.worker.detect_gpus", lambda: found)
    monkeypatch.setattr("headroom.cli.worker.detect_cpu", lambda: cpu)
    for rank in range(3):
        as_torchrun(monkeypatch, rank, 3)
        assert run_command(["worker", *given]) == 0
    assert [options.device for options in runs.options] == devices
    assert {options.threads for options in runs.options} == {4}


def test_a_worker_started_by_hand_needs_an_address_and_one_device(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["worker"]) == 2
    assert "Write --join 10.0.0.5:7070" in capsys.readouterr().err
    line = ["worker", "--join", "10.0.0.5:7070"]
    assert run_command([*line, "--device", "cpu", "--device", "cuda:0"]) == 2
    assert "--device names 2 devices for 1 worker." in capsys.readouterr().err
    assert runs.options == []
    assert run_command(line) == 0
    assert (runs.options[0].device, runs.options[0].threads) == (None, None)


def test_a_worker_without_a_token_is_refused(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HEADROOM_WORKER_TOKEN")
    assert run_command(["worker", "--join", "10.0.0.5:7070"]) == 2
    assert "Set HEADROOM_WORKER_TOKEN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "slot", "code", "again"),
    [
        (RefusedError("no place"), [], 1, 0),
        (ModelError("another model"), [], 1, 0),
        (WireError("cut"), [], 0, 1),
        (RuntimeError("a kernel failed"), [], 0, 1),
        (NeighbourLostError("worker 1 is gone"), [], 0, 1),
        (NeighbourLostError("worker 1 is gone"), ["--slot", "1"], 70, 0),
        (RuntimeError("a kernel failed"), ["--slot", "1"], 1, 0),
    ],
    ids=str,
)
def test_a_worker_joins_again_where_that_can_help_and_nobody_else_starts_it(
    runs: Runs, error: Exception, slot: list[str], code: int, again: int
) -> None:
    runs.error = error
    assert run_command(["worker", "--join", "10.0.0.5:7070", *slot]) == code
    assert runs.joined_again == again
