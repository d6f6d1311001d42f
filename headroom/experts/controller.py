"""ShareController: the share of cold experts that the CPU takes follows what it really took.

Layers with experts of one size form a group, which has one table: of n cold experts, how many the
GPU reads over its link. The CPU computes the others at the same time. The controller starts with
the speeds that were measured by `headroom calibrate`, or listed. From totals that the GPU and the
CPU's worker count anyway it learns how fast the CPU is now, while other programs use it as well,
and changes a table if that saves time. It holds no tensors: callers read counters and write tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb, exp

from headroom.plan.cost_model import ColdSpeeds, link_shares, row_seconds

# Time constants of the smoothing. A slower reading counts quickly, because steps wait for the CPU
# meanwhile. A faster one must last about a second, or the share would follow every pause of another
# program.
WORSE_S, BETTER_S = 0.25, 1.0
# The most time that one reading may stand for: a reading after a pause is a small sample.
WORSE_MOST_S, BETTER_MOST_S = 0.1, 1.0
# A table changes only if that shortens the predicted time of a layer's experts by this share, and
# not sooner than so long after its last change.
MIN_GAIN, HOLD_S = 0.03, 0.2
# A reading with fewer requests to the CPU is added to the next one.
MIN_REQUESTS = 8
# While the CPU gets nothing, nothing is learned about it: then one layer of the group asks it for
# one expert for a moment. The time until the next probe doubles, unless the CPU was found faster
# by PROBE_NEWS.
PROBE_FIRST_S, PROBE_MOST_S, PROBE_NEWS = 0.5, 8.0, 0.2
# The delay of a request shows only in answers that come late. If fewer than RARE_LATES of them are
# late, the estimate decays to its starting value, with the time constant DELAY_S. If that is too
# low, answers are late again and correct it.
RARE_LATES, DELAY_S = 0.1, 4.0
# A measured speed or delay is not taken to be further from the one at the start than this.
MOST_FASTER, MOST_SLOWER = 2.0, 1000.0


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The layers of a step whose cold experts have one size."""

    expert_bytes: int
    used: int  # experts that a row visits
    most: int  # the most cold experts that a table has an entry for
    hit_rate: float  # expected share of picks that are hot
    fills: bool = False  # whether experts that cross the link may stay in GPU memory


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTotals:
    """What all layers of a group have counted since the start, in decode steps."""

    steps: int  # times a layer; a step of three such layers counts three times
    requests: int  # to the CPU
    cpu_experts: int  # that the CPU has read
    cpu_s: float  # that the CPU took for them
    gpu_s: float  # from each request until the GPU had finished its own experts, summed
    gpu_experts: int  # cold experts that the GPU has read over its link
    lates: int  # answers of the CPU for which the GPU had to wait
    late_s: float  # from request to late answer, less the CPU's time for the experts, summed
    link_bytes: int = 0  # read over the link while its time was measured
    link_s: float = 0.0  # that the link took for them; 0: not measured

    def since(self, earlier: "GroupTotals") -> "GroupTotals":
        """Return what was counted after an earlier reading."""
        return GroupTotals(
            steps=self.steps - earlier.steps,
            requests=self.requests - earlier.requests,
            cpu_experts=self.cpu_experts - earlier.cpu_experts,
            cpu_s=self.cpu_s - earlier.cpu_s,
            gpu_s=self.gpu_s - earlier.gpu_s,
            gpu_experts=self.gpu_experts - earlier.gpu_experts,
            lates=self.lates - earlier.lates,
            late_s=self.late_s - earlier.late_s,
            link_bytes=self.link_bytes - earlier.link_bytes,
            link_s=self.link_s - earlier.link_s,
        )


@dataclass(slots=True)
class Trend:
    """A cost that is measured again and again; smoothed."""

    value: float
    least: float
    most: float

    def follow(self, seen: float, elapsed_s: float) -> None:
        """Move towards a cost that was measured over some time."""
        if seen > self.value:
            weight = 1.0 - exp(-min(elapsed_s, WORSE_MOST_S) / WORSE_S)
        else:
            weight = 1.0 - exp(-min(elapsed_s, BETTER_MOST_S) / BETTER_S)
        self.value += weight * (seen - self.value)
        self.value = min(max(self.value, self.least), self.most)


def trend_from(start: float) -> Trend:
    """Return a trend that begins with a calibrated cost."""
    return Trend(start, start / MOST_FASTER, start * MOST_SLOWER)


class GroupController:
    """The table of one group, and the speeds that it follows from."""

    def __init__(self, shape: GroupShape, speeds: ColdSpeeds) -> None:
        assert speeds.cpu
        assert speeds.link
        self.shape, self._start = shape, speeds
        self._cpu_byte_s = trend_from(1.0 / speeds.cpu)
        self._link_byte_s = trend_from(1.0 / speeds.link)
        self._handover_s = trend_from(speeds.handover_s)
        self._misses = shape.used * (1.0 - shape.hit_rate)  # distinct cold experts of a step
        self.table = self._best(speeds, shape.most)
        self.probing = False  # one layer of the group shall use `probe_table`
        self._read: GroupTotals | None = None  # what the trends have taken into account
        self._read_at_s = self._changed_at_s = 0.0
        self._probe_after_s = PROBE_FIRST_S

    @property
    def probe_table(self) -> tuple[int, ...]:
        """The table with which one layer finds out how fast the CPU is: it gets one expert."""
        return tuple(max(0, min(kept, misses - 1)) for misses, kept in enumerate(self.table))

    @property
    def speeds(self) -> ColdSpeeds:
        """The speeds as they are now."""
        return replace(
            self._start,
            cpu=1.0 / self._cpu_byte_s.value,
            link=1.0 / self._link_byte_s.value,
            handover_s=self._handover_s.value,
        )

    @property
    def pace(self) -> float:
        """How fast the CPU computes experts now, as a share of its speed at the start."""
        return 1.0 / (self._cpu_byte_s.value * self._start.cpu)

    @property
    def link_pace(self) -> float:
        """How fast the link is now, as a share of its speed at the start; 1 if not measured."""
        return 1.0 / (self._link_byte_s.value * self._start.link)

    @property
    def share(self) -> float:
        """The expected share of cold experts that the CPU computes, 0 to 1."""
        chances = self._chances()
        cold = sum(chance * misses for misses, chance in chances.items())
        kept = sum(chance * self.table[misses] for misses, chance in chances.items())
        return 1.0 - kept / cold if cold else 0.0

    def update(self, now_s: float, totals: GroupTotals) -> bool:
        """Learn from a reading of the counters; return whether `table` or `probing` changed."""
        before = self.table, self.probing
        if self._read is None:  # totals before the first reading are those of warm-up steps
            self._read, self._read_at_s, self._changed_at_s = totals, now_s, now_s
            return False
        new, elapsed_s = totals.since(self._read), now_s - self._read_at_s
        if new.steps <= 0:
            return False
        if new.requests >= MIN_REQUESTS and new.cpu_experts:
            cost_s = self._request_s()
            self._learn(new, elapsed_s)
            self._read, self._read_at_s = totals, now_s
            self._decide(now_s)
            if self.probing:
                self.probing = False
                news = self._request_s() < (1.0 - PROBE_NEWS) * cost_s
                longer_s = min(2 * self._probe_after_s, PROBE_MOST_S)
                self._probe_after_s = PROBE_FIRST_S if news else longer_s
        elif elapsed_s >= self._probe_after_s:
            self.probing = True
        return before != (self.table, self.probing)

    def _request_s(self) -> float:
        """Return the time that the CPU is expected to take for one expert."""
        return self._handover_s.value + self.shape.expert_bytes * self._cpu_byte_s.value

    def _learn(self, new: GroupTotals, elapsed_s: float) -> None:
        read_bytes = new.cpu_experts * self.shape.expert_bytes
        self._cpu_byte_s.follow(new.cpu_s / read_bytes, elapsed_s)
        delay = self._handover_s
        if new.lates >= RARE_LATES * new.requests:
            delay.follow(new.late_s / new.lates, elapsed_s)
        else:
            # Most answers were there when the GPU had done its own part, so the delay was shorter.
            longest_s = max(0.0, new.gpu_s - new.cpu_s) / new.requests
            delay.follow(min(longest_s, delay.value), elapsed_s)
            usual_s = min(self._start.handover_s, delay.value)
            delay.follow(usual_s, elapsed_s * BETTER_S / DELAY_S)
        if new.link_s > 0 and new.link_bytes:
            self._link_byte_s.follow(new.link_s / new.link_bytes, elapsed_s)
        misses = (new.cpu_experts + new.gpu_experts) / new.steps
        weight = 1.0 - exp(-min(elapsed_s, BETTER_MOST_S) / BETTER_S)
        self._misses += weight * (min(misses, float(self.shape.most)) - self._misses)

    def _decide(self, now_s: float) -> None:
        if now_s - self._changed_at_s < HOLD_S:
            return
        # Most decisions leave the table as it is. So the best entries are found only for numbers of
        # cold experts that a step is likely to have; the whole table follows if they are better.
        best = self._best(self.speeds, max(self._chances()))
        if self._seconds(best) < (1.0 - MIN_GAIN) * self._seconds(self.table):
            self.table, self._changed_at_s = self._best(self.speeds, self.shape.most), now_s

    def _best(self, speeds: ColdSpeeds, most: int) -> tuple[int, ...]:
        shape = self.shape
        return link_shares(speeds, shape.expert_bytes, shape.used, most, fills=shape.fills)

    def _seconds(self, table: Sequence[int]) -> float:
        """Return the predicted time of a step's experts in one layer with a table."""
        shape, speeds = self.shape, self.speeds
        return sum(
            chance
            * row_seconds(
                speeds, shape.expert_bytes, max(0, shape.used - misses), misses, table[misses]
            )
            for misses, chance in self._chances().items()
        )

    def _chances(self) -> dict[int, float]:
        """Return the chances of numbers of cold experts of a step.

        A single row has at most `used`. Of several rows, which have more, only the mean is taken.
        """
        used, miss = self.shape.used, self._misses / self.shape.used
        if miss > 1.0:
            return {round(self._misses): 1.0}
        return {n: comb(used, n) * miss**n * (1.0 - miss) ** (used - n) for n in range(used + 1)}


class ShareController:
    """The tables of all groups of one GPU."""

    def __init__(self, shapes: Sequence[GroupShape], speeds: ColdSpeeds) -> None:
        self.groups = tuple(GroupController(shape, speeds) for shape in shapes)

    def update(self, now_s: float, totals: Sequence[GroupTotals]) -> list[int]:
        """Learn from a reading of the counters; return the groups whose tables changed."""
        changed = [
            group.update(now_s, read) for group, read in zip(self.groups, totals, strict=True)
        ]
        return [index for index, one in enumerate(changed) if one]

    @property
    def share(self) -> float:
        """The expected share of cold experts that the CPU computes, averaged over the groups."""
        return sum(group.share for group in self.groups) / len(self.groups)

    @property
    def pace(self) -> float:
        """How fast the CPU computes experts now, as a share of its speed at the start."""
        return sum(group.pace for group in self.groups) / len(self.groups)

    @property
    def link_pace(self) -> float:
        """How fast the link is now, as a share of its speed at the start; 1 if not measured."""
        return sum(group.link_pace for group in self.groups) / len(self.groups)
