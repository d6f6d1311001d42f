"""Speeds of prompts and of decoding, measured through the engine as a user meets them."""

import statistics

from headroom.bench.crowd import Answer, Crowd, Decoded, random_prompt
from headroom.bench.expert_use import Reading, read_experts, use_between
from headroom.bench.figures import (
    SHORT_CONTEXT,
    BenchSettings,
    DecodeFigure,
    Figures,
    PromptFigure,
    VerifyFigure,
)
from headroom.bench.opening import Opened
from headroom.bench.steps import step_seconds
from headroom.bench.traffic import Chances, step_traffic, token_operations
from headroom.engine.request import SamplingParams

SHORT_PROMPT = 128  # tokens of one that tells how long others would take


class SpeedBench:
    """Measures one loaded model; what cannot be measured is left out with a reason."""

    def __init__(self, opened: Opened, settings: BenchSettings) -> None:
        self._opened = opened
        self._settings = settings
        self._plan = opened.plan.settings
        self._params = SamplingParams(temperature=settings.temperature, ignore_eos=True)
        self._short_speed = 0.0  # of prompts, in tokens a second; 0 where it was not needed
        self.figures = Figures()

    def run(self) -> Figures:
        """Measure prompts, decoding and a step of several rows."""
        only = self._settings.only
        if "prompts" in only:
            for tokens in self._settings.prompts:
                self._prompt(tokens)
        if "decode" in only:
            for context in self._settings.contexts:
                self._decode(context)
        if "verify" in only and self.figures.decodes:
            self._verify(self.figures.decodes[0])
        return self.figures

    def _prompt(self, tokens: int) -> None:
        if tokens >= self._plan.context:
            self._leave_out(f"prompt of {tokens}", f"the context holds {self._plan.context}")
            return
        self._prompt_seconds(tokens, 0)  # warms up
        before = self._read()
        times = [self._prompt_seconds(tokens, 1 + seed) for seed in range(self._settings.rounds)]
        operations, after = tokens * token_operations(self._opened.shape), self._read()
        self.figures.prompts.append(
            PromptFigure(
                tokens=tokens,
                seconds=statistics.median(times),
                operations=operations,
                experts=use_between(before, after, sum(times)) if before and after else None,
            )
        )

    def _prompt_seconds(self, tokens: int, seed: int) -> float:
        """Return the time of one prompt, from its first step to its first token."""
        engine = self._opened.engine
        params = SamplingParams(temperature=self._settings.temperature, max_tokens=1)
        answer = Answer(engine, random_prompt(tokens, engine.vocab, seed), params)
        answer.submit()
        answer.wait(1)
        answer.end()
        assert answer.last is not None
        assert answer.last.timings is not None
        return answer.last.timings.prefill_s

    def _prompt_speed(self) -> float:
        """Return tokens a second of the last prompt; of a short one where none was measured."""
        if self.figures.prompts:
            return self.figures.prompts[-1].tokens_per_s
        if not self._short_speed:
            tokens = min(SHORT_PROMPT, self._plan.context - 1)
            seconds = min(self._prompt_seconds(tokens, seed) for seed in range(2))
            self._short_speed = tokens / seconds
        return self._short_speed

    def _decode(self, context: int) -> None:
        """Measure all batches after one context, the largest first where prompts are long."""
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
        """Say why sequences of this context cannot be measured; None if they can."""
        if batch > self._plan.parallel:
            return f"{self._plan.parallel} sequences run together"
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
        """Start the largest batch, measure it, end some of its sequences, measure the next."""
        before, crowd = self._counts(), Crowd(
            self._opened.engine, context, batches[0], self._params
        )  # fmt: skip
        measured = []
        read = None if self._opened.engine.upkeep is None else self._read_now
        try:
            crowd.start()
            for batch in batches:
                crowd.shrink(batch)
                decoded = crowd.decode(self._settings.tokens, self._settings.warm, read)
                measured.append((batch, decoded))
        finally:
            crowd.close()
        chances = self._chances(before)
        return [self._figure(context, *one, chances) for one in measured]

    def _figure(
        self, context: int, batch: int, decoded: Decoded, chances: Chances | None
    ) -> DecodeFigure:
        opened, mean = self._opened, decoded.mean_context
        return DecodeFigure(
            batch=batch,
            context=context,
            mean_context=mean,
            step_s=decoded.step_s,
            pipeline_s=step_seconds(opened, round(mean), batch=batch),
            traffic=step_traffic(opened.shape, self._plan, [mean] * batch, chances),
            experts=None if decoded.readings is None else use_between(*decoded.readings),
        )

    def _read(self) -> Reading | None:
        """Read experts while no request runs; None where there are none."""
        return None if self._opened.engine.upkeep is None else self._read_now()

    def _read_now(self) -> Reading:
        assert self._opened.engine.upkeep is not None
        return read_experts(self._opened.engine.upkeep)

    def _counts(self) -> list[list[int]]:
        routing = self._opened.pipeline.routing
        counts: list[list[int]] = routing.counts().tolist() if routing is not None else []
        return counts

    def _chances(self, before: list[list[int]]) -> Chances | None:
        """Return how often a token visited each expert since `before`."""
        chances = []
        pairs = zip(self._counts(), before, self._opened.shape.layers, strict=False)
        for now, then, layer in pairs:
            new = [high - low for high, low in zip(now, then, strict=True)]
            tokens = sum(new) / layer.experts_used if layer.experts_used else 0
            chances.append([count / tokens if tokens else 0.0 for count in new])
        return chances or None

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
