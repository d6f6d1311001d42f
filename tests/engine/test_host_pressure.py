"""Kept prefixes leave host memory before it runs out, and come back when there is room."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from headroom.engine import host_pressure
from headroom.engine.host_pressure import HostPressure, HostTier
from headroom.engine.pages import PagePool
from headroom.engine.prefix_cache import HostPages, PrefixCache
from headroom.formats.checkpoint import Checkpoint
from headroom.machine.cgroups import read_limits
from headroom.machine.devices import HostRoom, host_room
from headroom.units import GIB, MIB
from tests.engine.test_prefix_disk import until
from tests.engine.test_prefixes import PROMPT, WAYS, Asker, checkpoint, push_out, words

__all__ = ["checkpoint"]

SETTINGS: dict[str, Any] = {"cache_tokens": 512, "parallel": 1, "cache_ram": "64MiB"}


class Group:
    """A control group of 1 GiB that an engine finds itself in."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "sys"
        (folder / "proc" / "self").mkdir(parents=True)
        self._folder.mkdir()
        (folder / "proc" / "self" / "cgroup").write_text("0::/\n")
        (folder / "proc" / "meminfo").write_text("MemTotal: 99999999 kB\n")
        (self._folder / "memory.max").write_text(str(GIB))
        self.leave(512 * MIB)
        proc, root = folder / "proc", self._folder
        monkeypatch.setattr(host_pressure, "LOOK_S", 0.02)
        monkeypatch.setattr(
            host_pressure, "host_room", lambda: host_room(proc, read_limits(proc, root))
        )

    def leave(self, free: int) -> None:
        """Let all processes of the group use all but so many bytes."""
        (self._folder / "new").write_text(str(GIB - free))
        (self._folder / "new").replace(self._folder / "memory.current")


@pytest.mark.parametrize("checkpoint", ["llama", "qwen35", "gemma4-31b"], indirect=True)
def test_prefixes_leave_host_memory_while_a_group_runs_short(
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    group = Group(tmp_path, monkeypatch)
    asker = Asker(checkpoint, **SETTINGS)

    def counts() -> tuple[int, int]:
        found = asker.engine.stats().prefixes
        return found.host_pages, found.snapshots

    def check_warm() -> None:
        for way in WAYS:
            cold = asker.ask(PROMPT, way, key=None)
            assert asker.ask(PROMPT, way).tokens == cold.tokens

    asker.ask(PROMPT)
    push_out(asker)
    snapshots = counts()[1]
    group.leave(40 * MIB)  # more than a 32nd
    asker.ask(words("calm", 20))
    assert counts()[0] > 0
    group.leave(20 * MIB)
    until(lambda: "nothing more to give up" in caplog.text)
    assert counts() == (0, 0)
    assert re.search(
        r"pressure: 20.0 MiB of 1.00 GiB of host memory are free, less than 32.0 MiB: the prefix "
        r"cache gives up its pages there, up to \d",
        caplog.text,
    )
    assert ("gives up its snapshots there" in caplog.text) == (snapshots > 0)
    check_warm()
    asker.ask(words("room", 500), key=None)
    assert counts() == (0, 0)
    group.leave(512 * MIB)
    until(lambda: "prefixes are kept there again" in caplog.text)
    asker.ask(PROMPT)
    push_out(asker)
    assert counts()[0] > 0
    check_warm()
    asker.engine.close()
    assert asker.engine.stats().cache_pages_used == 0
    assert caplog.text.count("nothing more to give up") == 1


class Noted:
    """A mover that notes what is dropped."""

    needs_snapshots = True

    def __init__(self) -> None:
        self.dropped: list[str] = []

    def drop_host_pages(self) -> None:
        self.dropped.append("pages")

    def drop_snapshots(self) -> None:
        self.dropped.append("snapshots")


def test_memory_in_use_is_given_up_when_its_last_user_has_gone() -> None:
    mover = Noted()
    pool = PagePool(8)
    cache = PrefixCache(pool, 4, 2, HostPages(4, lambda page, slot: None))
    pressure = HostPressure(cache, mover, HostTier(100, 50))  # type: ignore[arg-type]
    short, roomy = HostRoom(GIB, MIB), HostRoom(GIB, GIB // 2)
    assert pressure.watches
    assert not pressure.concerns(roomy)
    assert pressure.concerns(short)
    slot = cache.take_snapshot_slot()
    assert slot is not None
    pressure.look(short)
    pressure.look(short)
    assert mover.dropped == ["pages"]  # a sequence may still keep its snapshot
    assert cache.take_snapshot_slot() is None
    cache.give_back_snapshot_slot(slot)
    pressure.look(short)
    assert mover.dropped == ["pages", "snapshots"]
    pressure.look(HostRoom(GIB, 64 * MIB))  # not if it would be short again
    assert cache.take_snapshot_slot() is None
    pressure.look(roomy)
    assert cache.take_snapshot_slot() is not None


def test_a_tier_that_was_only_closed_is_opened_again_when_there_is_room() -> None:
    mover = Noted()
    cache = PrefixCache(PagePool(8), 4, 2, HostPages(0, lambda page, slot: None))
    pressure = HostPressure(cache, mover, HostTier(0, 50))  # type: ignore[arg-type]
    short, roomy = HostRoom(GIB, MIB), HostRoom(GIB, GIB // 2)
    slot = cache.take_snapshot_slot()
    assert slot is not None
    pressure.look(short)
    assert mover.dropped == []
    assert pressure.concerns(roomy)
    cache.give_back_snapshot_slot(slot)
    pressure.look(roomy)
    assert mover.dropped == []
    assert cache.take_snapshot_slot() is not None
    assert not pressure.concerns(roomy)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_call_between_steps_that_fails_ends_no_request(checkpoint: Checkpoint) -> None:
    def fail() -> None:
        raise OSError("madvise failed")

    asker = Asker(checkpoint)
    with pytest.raises(OSError, match="madvise"):
        asker.engine._between_steps(fail).result(timeout=20)
    assert asker.ask(PROMPT).tokens
    asker.engine.close()


def test_nothing_is_watched_where_host_memory_keeps_nothing() -> None:
    cache = PrefixCache(PagePool(8), 4)
    assert not HostPressure(cache, Noted(), HostTier(0, 0)).watches  # type: ignore[arg-type]
