"""What the steps of a stage took adds up, as a worker tells it and as it is measured here."""

from headroom.split.stage_times import StageTimes


def test_times_of_steps_add_up() -> None:
    times = StageTimes()
    told = {"busy_s": 0.25, "waited_s": 0.5, "handover_bytes": 100, "handover_s": 0.125}
    times.add_told({**told, "type": "result", "step": 3})
    times.add(busy_s=0.5, handover_bytes=7)
    assert times == StageTimes(2, 0.75, 0.5, 107, 0.125)
