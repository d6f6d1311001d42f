"""Corrupted and hostile model files: an error of our own or a model that works, and little memory.

A seeded generator mutates the files of small models: the header of a GGUF file, that of a
safetensors file, config.json, tokenizer.json, settings and chat templates. Each mutant is read and
planned; one that is not refused is loaded, and must answer or be refused then.
"""

import copy
import gc
import json
import logging
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import pytest

from headroom.engine.request import SamplingParams
from headroom.errors import HeadroomError
from headroom.families.files import open_checkpoint
from headroom.formats.pooling import find_pooling
from headroom.llm import LLM
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import make_plan
from headroom.text.abilities import Abilities
from headroom.text.fill_in import find_fill_in
from tests.plan.shapes import cpu
from tests.synth_models import write_model
from tests.tiny import llama_config, random_model, save_gguf, save_safetensors

log = logging.getLogger(__name__)  # figures: --log-cli-level info

SAMPLE, ALL = 60, 1000  # mutants of an ordinary run, and behind the mark `slow`
LIMIT_S = 60  # of one mutant: a guard against hanging, not a measurement
ADDRESS_BYTES = 2 << 30  # that one mutant may take, besides what the process has
GROWTH_BYTES = 96 << 20  # of resident memory over all mutants but the first ones
SYNTHETIC = ("qwen35moe", "gemma4-e2b")  # families with many keys, besides a Llama
CHAT = [{"role": "user", "content": "hi"}]

WIDE = (0, 1, 255, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63, (1 << 64) - 1)
HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 7, 1 << 31, 1 << 63, -(1 << 63), 10**30, 10**400, 0.0, -0.5,
    1e-310, 1e308, float("nan"), float("inf"), "", "x", "\x00", "x" * 100_000, "../../etc/passwd",
    [], [[]], {}, {"a": {}}, [1] * 10_000, [None], ["full_attention"] * 3,
)  # fmt: skip
# Pieces of chat templates that loop, nest, grow or reach for Python.
HOSTILE_PIECES = (
    "{% set ns = namespace(l=[0]) %}{% for i in range(40) %}{% set ns.l = ns.l + ns.l %}"
    "{% endfor %}",
    "{% set ns = namespace(l=[0]) %}{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}"
    "{% endfor %}{{ ns.l }}",
    "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{{ 'x' * 10**9 }}", "{{ 9 ** 9 ** 9 }}", "{{ ('x' * 30000000)|upper|length }}",
    "{{ (['x' * 1000000] * 1000)|join }}", "{{ ('x' * 70).replace('x', 'y' * 30000000) }}",
    "{{ '%1000000d' % 1 }}", "{{ messages[0].__class__.__mro__ }}", "{{ messages[99].content }}",
    "{{ raise_exception('no') }}", "{% include 'x' %}", "{{ messages|tojson(indent=100000) }}",
    "{% if", "{{", "}}", "{% endfor %}", "{# ", "{{ 1 // 0 }}", "{{ x.y.z }}", "\x00", "𝕏" * 1000,
    "{{ (" * 500,
)  # fmt: skip


def mutate_bytes(draw: random.Random, content: bytes, header: int) -> bytes:
    """Change, cut, insert or repeat bytes within the first `header` ones, or cut the file."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(min(header, len(data)) or 1)
        kind = draw.randrange(6)
        if kind == 0:
            data[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            data[at : at + 8] = draw.choice(WIDE).to_bytes(8, "little")
        elif kind == 2:
            data[at : at + 4] = (draw.choice(WIDE) % (1 << 32)).to_bytes(4, "little")
        elif kind == 3:
            data[at:at] = draw.randbytes(draw.randrange(1, 40))
        elif kind == 4:
            del data[at : at + draw.randrange(1, 40)]
        else:
            end = at + draw.randrange(1, 200)
            data[at:at] = data[at:end]
    if draw.random() < 0.1:
        del data[draw.randrange(len(data) or 1) :]
    return bytes(data)


def mutate_json(draw: random.Random, content: bytes) -> bytes:
    """Replace, remove or add values of a JSON text; sometimes break the text itself."""
    if draw.random() < 0.2:
        return mutate_bytes(draw, content, len(content))
    if draw.random() < 0.05:
        return draw.choice((b"", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", b'{"a": 1e999}'))
    value = json.loads(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        place = value
        while isinstance(place, dict | list) and place:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = draw.choice(keys)
            inner = place[key]
            if isinstance(inner, dict | list) and inner and draw.random() < 0.8:
                place = inner
                continue
            if draw.random() < 0.15:
                del place[key]
            elif isinstance(inner, int) and not isinstance(inner, bool) and draw.random() < 0.4:
                place[key] = draw.choice((inner + 1, inner * 2, -inner, inner * 10**6, inner // 3))
            else:
                place[key] = copy.deepcopy(draw.choice(HOSTILE_VALUES))
            break
    return json.dumps(value).encode()


def mutate_text(draw: random.Random, content: bytes) -> bytes:
    """Put a hostile piece into a template, or change its bytes."""
    if draw.random() < 0.3:
        return mutate_bytes(draw, content, len(content))
    text = content.decode()
    at = draw.randrange(len(text) + 1)
    return (text[:at] + draw.choice(HOSTILE_PIECES) + text[at:]).encode()


class Mutants:
    """Makes mutants by their numbers in one folder, each of good files with one changed."""

    def __init__(self, folder: Path) -> None:
        model = random_model(llama_config(tie_word_embeddings=False))
        self._gguf = [save_gguf(model, folder / "good.gguf")]
        for name in SYNTHETIC:
            self._gguf.append(write_model(name, "q8_0", folder, few_layers=True))
        self._folder = save_safetensors(model, folder / "good")
        (self._folder / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False})
        )
        self._place = folder / "mutant"
        weights = self._folder / "model.safetensors"
        tensors = int.from_bytes(weights.read_bytes()[:8], "little") + 8
        change: dict[str, Callable[[random.Random, bytes], bytes]] = {
            "model.safetensors": lambda draw, content: mutate_bytes(draw, content, tensors),
            "config.json": mutate_json,
            "tokenizer.json": mutate_json,
            "tokenizer_config.json": mutate_json,
            "generation_config.json": mutate_json,
            "chat_template.jinja": mutate_text,
        }
        self._change = change

    def good(self) -> list[Path]:
        """Return the models that are mutated."""
        return [*self._gguf, self._folder]

    def make(self, number: int) -> Path:
        """Write a mutant and return its path."""
        draw = random.Random(number)
        shutil.rmtree(self._place, ignore_errors=True)
        if number % 7 == 0:
            self._place.mkdir()
            path = self._place / "mutant.gguf"
            good = draw.choice(self._gguf)
            header = gguf.GGUFReader(good).data_offset
            path.write_bytes(mutate_bytes(draw, good.read_bytes(), header))
            return path
        shutil.copytree(self._folder, self._place)
        changed = self._place / list(self._change)[number % 7 - 1]
        changed.write_bytes(self._change[changed.name](draw, changed.read_bytes()))
        return self._place


def use(path: Path) -> None:
    """Use a model as far as its weights are not needed."""
    checkpoint = open_checkpoint(path)
    abilities = Abilities.of(checkpoint)
    tokenizer = abilities.tokenizer
    ids = tokenizer.encode("Hello, wörld <|im_end|>")
    tokenizer.decode(ids)
    abilities.stop_tokens()
    if abilities.template is not None:
        tokenizer.encode(abilities.template.render(CHAT))
    SamplingParams(**checkpoint.sampling.settings)  # type: ignore[arg-type]
    find_fill_in(checkpoint, tokenizer)
    find_pooling(checkpoint)
    make_plan([describe(checkpoint).shape], [cpu(24)], Options(context=256, parallel=2))


def answer(path: Path) -> None:
    """Load a model and generate two tokens."""
    options = Options(context=256, parallel=2, device="cpu", threads=1, routing_stats="off")
    with LLM(path=path, options=options) as llm:
        llm.generate("hi", SamplingParams(max_tokens=2, temperature=0.5, seed=1))


def resident_bytes() -> int:
    """The resident memory of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@contextmanager
def guarded() -> Iterator[None]:
    """Limit time and address space, so that a mutant that hangs or grows fails at once."""

    def stop(*given: object) -> None:
        raise TimeoutError(f"more than {LIMIT_S} s")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ADDRESS_BYTES
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def harm_of(path: Path) -> str | None:
    """Return what a mutant did besides working or being refused by an error of our own."""
    try:
        with guarded():
            use(path)
            answer(path)
    except HeadroomError as error:
        return None if len(str(error)) < 2000 else f"an error of {len(str(error))} characters"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def run_mutants(folder: Path, count: int) -> None:
    """Use so many mutants; no one may do harm, and together they may not take memory."""
    mutants = Mutants(folder)
    for path in mutants.good():
        use(path)
        answer(path)
    harm, settled = {}, 0
    for number in range(count):
        if (found := harm_of(mutants.make(number))) is not None:
            harm[number] = found
        if number == count // 4:
            settled = resident_bytes()
    assert not harm
    grown = resident_bytes() - settled
    log.info("%d mutants; memory %d MiB, then %+d MiB", count, settled >> 20, grown / (1 << 20))
    assert grown < GROWTH_BYTES


def test_a_sample_of_hostile_models_does_no_harm(tmp_path: Path) -> None:
    run_mutants(tmp_path, SAMPLE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_hostile_models_do_no_harm(tmp_path: Path) -> None:
    run_mutants(tmp_path, ALL)
