"""Steps are counted and told."""

from headroom.progress import StepCounter


def test_each_step_is_told_when_it_begins_with_those_before_it() -> None:
    told: list[tuple[str, int, int]] = []
    steps = StepCounter(2, lambda *step: told.append(step))
    steps.begin("one")
    steps.tell("one, half of it")
    steps.begin("two")
    assert told == [("one", 0, 2), ("one, half of it", 0, 2), ("two", 1, 2)]


def test_more_steps_than_were_announced_never_exceed_the_total() -> None:
    told: list[int] = []
    steps = StepCounter(1, lambda what, done, total: told.append(done))
    for what in "abc":
        steps.begin(what)
    assert told == [0, 1, 1]
