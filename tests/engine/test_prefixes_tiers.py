"""Every tier of the prefix cache gives the cold answer, however a model is divided."""

from pathlib import Path
from typing import Any

import pytest

from headroom.engine.prefix_folder import key_digest
from headroom.llm import LLM
from tests.engine.test_prefix_disk import LONG, until
from tests.engine.test_prefixes import SETTINGS, WAYS, Heard, LlmAsker, push_out, words
from tests.families.oracles import variant

MODELS = (
    *("llama", "mixtral", "mistral", "ministral", "smollm3", "qwen3-tied", "qwen3moe", "qwen35"),
    *("qwen35moe", "laguna", "gemma3", "gemma4-31b", "gemma4-26b", "gemma4-e4b"),
)
PLACES: dict[str, dict[str, Any]] = {
    "one": {},
    "stages": {"device": "cpu,cpu"},
    "processes": {"workers": "2"},
}
PROMPTS = {
    "same": LONG,
    "longer": LONG + words("longer", 40),
    "branch": LONG[:330] + words("branch", 40),
}
CASES = [(way, kind) for way in WAYS for kind in PROMPTS]


class TierAsker(LlmAsker):
    """Asks for prompts of which a beginning is kept in one tier."""

    def check(self, way: str, kind: str, tier: str, cold: dict[tuple[str, str], Heard]) -> None:
        """Ask a prompt whose beginning is in a tier; compare the answer with the cold one."""
        before = self.engine.stats().prefixes
        warm = self.ask(PROMPTS[kind], way, key=f"{way} {kind} {tier}")
        after = self.engine.stats().prefixes
        assert warm.tokens == cold[way, kind].tokens, (tier, way, kind)
        assert warm.logprobs == pytest.approx(cold[way, kind].logprobs, abs=1e-3)
        assert 256 <= warm.cached <= len(PROMPTS[kind])
        assert (after.promoted_pages > before.promoted_pages) == (tier == "host")
        assert after.file_hits - before.file_hits == (tier == "disk")

    def to_host(self) -> None:
        """Move all that is kept to host memory."""
        push_out(self)

    def to_disk(self, key: str) -> None:
        """Wait until the prefix of a key is in a file, and forget what is kept in memory."""
        disk = self.engine._prefixes._disk
        assert disk is not None
        folder = disk._folder
        until(lambda: folder.find(key_digest(key), LONG, len(LONG)) is not None)
        until(lambda: self.engine.stats().cache_pages_used == 0)  # nothing is being written
        self.engine._between_steps(self.engine._prefixes._cache.clear).result(60)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        pytest.param(
            *(name, place),
            marks=[] if (name, place) == ("qwen35", "stages") else pytest.mark.slow,
        )
        for name in MODELS
        for place in PLACES
    ],
)
def test_every_tier_gives_the_cold_answer(name: str, place: str, tmp_path: Path) -> None:
    variant(name).save_gguf(path := tmp_path / "m.gguf")
    settings = SETTINGS | {"cache_tokens": 512, "parallel": 1, "cache_ram": "64MiB"} | PLACES[place]
    with LLM(str(path), **settings) as llm:
        asker = TierAsker(llm)
        cold = {(way, kind): asker.ask(PROMPTS[kind], way, key=None) for way, kind in CASES}
        for way, kind in CASES:
            asker.ask(LONG, way, key=f"{way} {kind} device")
            asker.check(way, kind, "device", cold)
            asker.ask(LONG, way, key=f"{way} {kind} host")
            asker.to_host()
            asker.check(way, kind, "host", cold)
    folder = tmp_path / "prefixes"
    settings["cache_tokens"] = 1024  # half of the pages may be held for a file
    with LLM(str(path), **settings, cache_dir=str(folder)) as llm:
        asker = TierAsker(llm)
        for way, kind in CASES:
            asker.ask(LONG, way, key=f"{way} {kind} disk")
            asker.to_disk(f"{way} {kind} disk")
            asker.check(way, kind, "disk", cold)
    with LLM(str(path), **settings, cache_dir=str(folder)) as llm:
        for way, kind in CASES:
            TierAsker(llm).check(way, kind, "disk", cold)
