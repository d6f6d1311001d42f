"""A model whose tokens come from a script; everything else is real."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from headroom.engine.engine import Engine
from headroom.engine.request import (
    FinishReason,
    GenerationRequest,
    Timings,
    TokenConstraint,
    TokenEvent,
    TokenLogprobs,
)
from headroom.llm import LLM
from headroom.options import Options
from headroom.text.tokenizer import Tokenizer

# Takes the rendered prompt as text and returns the whole answer as text, marks of thoughts and
# tool calls included, as the model itself would write them.
Script = Callable[[str], str]


class ScriptedEngine:
    """An engine that answers each prompt with the tokens of a script's text.

    Requests are checked by the real engine. An answer ends where max_tokens or the context ends. A
    token that the request's constraint forbids, or an answer that the constraint does not let end,
    fails the request: then the script is wrong, or the constraint.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, context: int, script: Script) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._context = context
        self.script = script
        self.pause_s = 0.0  # before each token
        self.prompts: list[str] = []  # every prompt that came, as text
        self.answers: list[tuple[int, ...]] = []  # what the script said to it, without its end
        self.requests: list[GenerationRequest] = []
        self.finished: Counter[str] = Counter()
        self._cancelled: dict[str, threading.Event] = {}

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the real engine: sizes, checks, statistics, embeddings."""
        return getattr(self._engine, name)

    def submit(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        """Answer a request in a separate thread; vectors are the real engine's."""
        if request.pooling is not None:
            self._engine.submit(request, on_event)
            return
        self._engine.check(request)
        self._cancelled[request.id] = threading.Event()
        threading.Thread(target=self._run, args=(request, on_event), daemon=True).start()

    def cancel(self, request_id: str) -> None:
        """End a request before its next token."""
        self._engine.cancel(request_id)
        if request_id in self._cancelled:
            self._cancelled[request_id].set()

    def forget(self) -> None:
        """Forget all requests that came."""
        for record in (self.requests, self.prompts, self.answers, self.finished):
            record.clear()

    def _run(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        for event in self._events(request):
            if event.finish_reason is not None:
                self.finished[event.finish_reason] += 1
            on_event(event)

    def _events(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        started, count = time.perf_counter(), 0

        def event(
            token: int | None = None, reason: FinishReason | None = None, error: str = ""
        ) -> TokenEvent:
            logprobs = request.params.logprobs
            return TokenEvent(
                request_id=request.id,
                token=token,
                # Logprob 0: the script always writes this token.
                logprobs=None if token is None or logprobs is None else TokenLogprobs(0.0, ()),
                finish_reason=reason,
                error=error,
                prompt_tokens=len(request.prompt),
                generated_tokens=count,
                timings=Timings(queue_s=0.0, prefill_s=0.0, decode_s=time.perf_counter() - started),
            )

        prompt = self._tokenizer.decode(request.prompt)
        try:
            answer = self.script(prompt)
        except Exception as error:
            yield event(reason="error", error=f"The script failed: {error!r}")
            return
        self.requests.append(request)
        self.prompts.append(prompt)
        most = self._context - len(request.prompt)
        most = min(most, request.params.max_tokens or most)
        tokens = self._tokenizer.encode(answer, add_bos=False)
        self.answers.append(tuple(tokens))
        for token in [*tokens, *self._end(request)]:
            if self._cancelled[request.id].wait(self.pause_s):
                yield event(reason="cancelled")
                return
            if not _allows(request.constraint, token):
                text = self._tokenizer.decode([*tokens[:count], token])
                yield event(
                    reason="error", error=f"The constraint forbids the last token of {text!r}"
                )
                return
            if request.constraint is not None:
                request.constraint.advance(token)
            count += 1
            stops = token in request.stop_ids and not request.params.ignore_eos
            yield event(token, "stop" if stops else "length" if count >= most else None)
            if stops or count >= most:
                return

    def _end(self, request: GenerationRequest) -> list[int]:
        assert self._tokenizer.eos_id in request.stop_ids
        return [cast(int, self._tokenizer.eos_id)]


def _allows(constraint: TokenConstraint | None, token: int) -> bool:
    mask = None if constraint is None else constraint.mask()
    return mask is None or bool(mask[token // 32] >> (token % 32) & 1)


@contextmanager
def scripted_model(path: Path, script: Script, *, context: int, name: str) -> Iterator[LLM]:
    """Load a model file and give it a scripted engine, as `llm.engine`."""
    options = Options(model=str(path), context=context, parallel=4, served_name=name)
    with LLM(str(path), options=options) as llm:
        engine = ScriptedEngine(llm.engine, llm.tokenizer, llm.context, script)
        llm.engine = cast(Engine, engine)
        yield llm
