"""SpeedBench: the speed of prompts and of decoding, measured through the engine."""

import statistics

from headroom.bench.expert_use import TelemetryReading, read_experts, use_between
from headroom.bench.figures import (
    SHORT_CONTEXT,
    BenchSettings,
    DecodeFigure,
    Figures,
    PromptFigure,
    VerifyFigure,
    stage_figures,
)
from headroom.bench.traffic import VisitRates, step_traffic
from headroom.bench.workload import (
    ConcurrentRequests,
    DecodeMeasurement,
    Reading,
    TimedRequest,
    move_trace,
    random_prompt,
    step_seconds,
)
from headroom.engine.request import SamplingParams
from headroom.llm import OpenedModel
from headroom.plan.cost_model import token_operations
from headroom.progress import StepCounter
from headroom.units import counted

SHORT_PROMPT = 128  # tokens of a prompt that only estimates how long others would take


class SpeedBench:
    """Measures one loaded model; a figure that cannot be measured is left out with a reason."""

    def __init__(self, opened: OpenedModel, settings: BenchSettings, steps: StepCounter) -> None:
        self._opened = opened
        self._steps = steps
        self._settings = settings
        self._plan = opened.plan.settings
        self._params = SamplingParams(
            temperature=settings.temperature, ignore_eos=True, draft="none"
        )
        self._short_speed = 0.0  # tokens per second of a short prompt; 0: not measured
        self.figures = Figures()

    def run(self) -> Figures:
        """Measure prompts, decoding and a verify step, as far as the settings ask for them."""
        only = self._settings.only
        if "prompts" in only:
            for tokens in self._settings.prompts:
                self._steps.begin(f"prompt of {tokens} tokens")
                self._prompt(tokens)
        if "decode" in only:
            for context in self._settings.contexts:
                self._steps.begin(f"answers after {context} tokens")
                self._decode(context)
        if "verify" in only and self.figures.decodes:
            self._steps.begin("a verify step")
            self._verify(self.figures.decodes[0])
        return self.figures

    def _prompt(self, tokens: int) -> None:
        if tokens >= self._plan.context:
            self._leave_out(f"prompt of {tokens}", f"the context holds {self._plan.context}")
            return
        self._prompt_seconds(tokens, 0)  # warm-up
        before = self._read()
        times = [self._prompt_seconds(tokens, 1 + seed) for seed in range(self._settings.rounds)]
        operations, after = tokens * token_operations(self._opened.shape.layers), self._read()
        self.figures.prompts.append(
            PromptFigure(
                tokens=tokens,
                seconds=statistics.median(times),
                operations=operations,
                experts=use_between(before, after, sum(times)) if before and after else None,
            )
        )

    def _prompt_seconds(self, tokens: int, seed: int) -> float:
        """Return the seconds of one prompt, from its first step to its first token."""
        engine = self._opened.engine
        params = SamplingParams(temperature=self._settings.temperature, max_tokens=1)
        answer = TimedRequest(engine, random_prompt(tokens, engine.vocab, seed), params)
        answer.submit()
        answer.wait(1)
        answer.end()
        move_trace(self._opened, tokens)
        assert answer.last is not None
        assert answer.last.timings is not None
        return answer.last.timings.prefill_s

    def _prompt_speed(self) -> float:
        """Return the tokens per second of the last prompt figure, else of a short prompt."""
        if self.figures.prompts:
            return self.figures.prompts[-1].tokens_per_s
        if not self._short_speed:
            tokens = min(SHORT_PROMPT, self._plan.context - 1)
            seconds = min(self._prompt_seconds(tokens, seed) for seed in range(2))
            self._short_speed = tokens / seconds
        return self._short_speed

    def _decode(self, context: int) -> None:
        """Measure all batches after one context; of long contexts the largest batch comes first."""
        wanted = []
        for batch in sorted(set(self._settings.batches)):
            if reason := self._refuses(context, batch):
                self._leave_out(f"decode of {batch} after {context}", reason)
            else:
                wanted.append(batch)
        found: list[DecodeFigure] = []
        if context <= SHORT_CONTEXT:
            for batch in wanted:
                found += self._shrinking(context, [batch])
        elif wanted:
            found = self._shrinking(context, wanted[::-1])
        self.figures.decodes += sorted(found, key=lambda figure: figure.batch)

    def _refuses(self, context: int, batch: int) -> str | None:
        """Return why this batch cannot be measured after this context; None if it can."""
        if batch > self._plan.parallel:
            return f"at most {counted(self._plan.parallel, 'sequence')} at a time"
        batches = tuple(one for one in self._settings.batches if one <= batch)
        if context <= SHORT_CONTEXT:
            batches = (batch,)
        needed = context + self._settings.room(context, batches, self._plan.chunk)
        if needed > self._plan.context:
            return f"it needs {needed} tokens and the context holds {self._plan.context}"
        if -(-needed // self._plan.page_size) * batch > self._plan.pages:
            return f"the cache holds {self._plan.cache_tokens} tokens"
        seconds = context * batch / self._prompt_speed()
        if seconds > self._settings.patience_s:
            limit = f"{self._settings.patience_s:.0f} s (--patience)"
            return f"its prompts would take {seconds:.0f} s and may take {limit}"
        return None

    def _shrinking(self, context: int, batches: list[int]) -> list[DecodeFigure]:
        """Measure batches of falling size: between two, some of the requests are ended."""
        before, requests = self._counts(), ConcurrentRequests(
            self._opened.engine, context, batches[0], self._params
        )  # fmt: skip
        measured = []
        try:
            requests.start()
            for batch in batches:
                requests.shrink(batch)
                decoded = requests.decode(self._settings.tokens, self._settings.warm, self._reading)
                measured.append((batch, decoded))
        finally:
            requests.close()
        written = self._settings.warm + self._settings.tokens
        move_trace(self._opened, context + len(batches) * written)
        rates = self._visit_rates(before)
        return [self._figure(context, *one, rates) for one in measured]

    def _figure(
        self, context: int, batch: int, decoded: DecodeMeasurement, rates: VisitRates | None
    ) -> DecodeFigure:
        opened, mean = self._opened, decoded.mean_context
        assert decoded.readings is not None
        before, after = decoded.readings
        used = None
        if before.experts is not None and after.experts is not None:
            used = use_between(before.experts, after.experts)
        return DecodeFigure(
            batch=batch,
            context=context,
            mean_context=mean,
            step_s=decoded.step_s,
            pipeline_s=step_seconds(opened, round(mean), batch=batch),
            traffic=step_traffic(opened.shape, self._plan, [mean] * batch, rates),
            experts=used,
            stages=stage_figures(before.stages, after.stages),
        )

    def _reading(self) -> Reading:
        return Reading(self._read(), self._opened.pipeline.stage_times())

    def _read(self) -> TelemetryReading | None:
        """Read the expert counters; None if the model has no experts.

        No request may run, or the engine's thread reads.
        """
        upkeep = self._opened.engine.upkeep
        return None if upkeep is None else read_experts(upkeep)

    def _counts(self) -> list[list[int]]:
        routing = self._opened.pipeline.routing
        counts: list[list[int]] = routing.counts().tolist() if routing is not None else []
        return counts

    def _visit_rates(self, before: list[list[int]]) -> VisitRates | None:
        """Return the share of tokens that visited each expert since `before`, by layer."""
        rates = []
        pairs = zip(self._counts(), before, self._opened.shape.layers, strict=False)
        for now, then, layer in pairs:
            new = [high - low for high, low in zip(now, then, strict=True)]
            tokens = sum(new) / layer.experts_used if layer.experts_used else 0
            rates.append([count / tokens if tokens else 0.0 for count in new])
        return rates or None

    def _verify(self, single: DecodeFigure) -> None:
        rows, context = self._settings.verify_rows, round(single.mean_context)
        if context + rows > self._plan.context or rows > self._plan.chunk:
            self._leave_out(f"a step of {rows} rows", "neither context nor chunk may be smaller")
            return
        seconds = step_seconds(self._opened, context, rows=rows)
        alone = step_seconds(self._opened, context)
        self.figures.verify = VerifyFigure(rows, context, seconds, alone)

    def _leave_out(self, what: str, why: str) -> None:
        self.figures.left_out.append(f"{what}: {why}")
