"""Small models whose slots change hands within steps, on the stand-in GPU."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from headroom.engine.batching import make_batch
from headroom.engine.scheduler import Turn
from headroom.experts import cache
from headroom.experts import store as stores
from headroom.experts.cache import POLICIES, Policy
from headroom.experts.cold import ColdExperts
from headroom.experts.layer_store import LayerStore
from headroom.experts.store import ExpertStore
from headroom.families.synth.recipe import cut
from headroom.families.synth.values import Source
from headroom.families.synth.write import write_gguf
from headroom.formats.checkpoint import Checkpoint
from headroom.plan import plan as planning
from headroom.plan.cost_model import DecodeChoice
from tests.running import PAGE_SIZE, running
from tests.stand_in.gpu import TURING
from tests.stand_in.model import ModelOnGpu
from tests.synth_models import MODELS

# Of so many misses of a layer, how many cross the link; the CPU computes the others.
LINK = (0, 1, 1, 2, 2, 3, 3, 4)


def allow_small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a layer have a cache whose slots do not hold the experts of four tokens."""
    for module in (cache, planning):
        monkeypatch.setattr(module, "LEAST_TOKENS", 1)


def share_misses(monkeypatch: pytest.MonkeyPatch, cold: str) -> None:
    """Let every layer ask the CPU with "auto", and none with "gpu"."""
    path = "cpu" if cold == "auto" else "gpu"
    monkeypatch.setattr(
        stores,
        "choose_decode",
        lambda speeds, size, used, *more, **rates: DecodeChoice(path, tuple(range(used + 1))),
    )


def write_narrow(name: str, folder: Path, layers: int) -> Path:
    """Write the first layers of a model, with experts of few columns."""
    recipe = MODELS[name]
    dims = replace(cut(recipe.dims, layers), expert_ffn=64)
    path = folder / f"{name}.gguf"
    write_gguf(Source(replace(recipe, dims=dims), seed=3), path, "q8_0")
    return path


def set_link(experts: ColdExperts) -> None:
    """Let LINK say how many misses cross the link, in all layers that ask the CPU."""
    for layer in cached_layers(experts.store):
        table = experts._tables.of_layer(layer)
        of_misses = [LINK[min(misses, len(LINK) - 1)] for misses in range(len(table))]
        table.copy_(torch.tensor(of_misses, dtype=torch.int32).to("cuda"))


def cached_layers(store: ExpertStore) -> list[LayerStore]:
    """Return the layers with experts, which all have a cache."""
    layers = [layer for layer in store.layers if layer is not None]
    assert layers
    assert all(layer.is_cached for layer in layers)
    return layers


def begin_with(experts: ColdExperts, policy: Policy) -> None:
    """Begin anew with the placement; a policy decides from now on."""
    experts.restart()
    for layer in cached_layers(experts.store):
        layer.set_policy(POLICIES.index(policy))


@dataclass(slots=True)
class Decoded:
    """What some steps of one row for each sequence left."""

    logits: torch.Tensor  # [steps, sequences, vocabulary]
    # Slots that an expert gave up which a row had used in the step before.
    given_up: int = field(default=0)


class DecodingModel(ModelOnGpu):
    """A model in f16 that decodes some sequences from their first token on."""

    def __init__(self, checkpoint: Checkpoint, sequences: int, **settings: object) -> None:
        given = {"dtype": "f16", "kv_type": "f16", "parallel": sequences, "context": 128}
        super().__init__(checkpoint, TURING.spec, **given | settings)  # type: ignore[arg-type]
        self._sequences = sequences

    def decode(self, steps: int) -> Decoded:
        """Run steps of one row for each sequence, from the first token on."""
        draw, found, given_up = torch.Generator().manual_seed(1), [], 0
        tokens = torch.randint(300, 1000, (self._sequences, steps), generator=draw).tolist()
        rows = [
            running(prompt, [2 * index + 1, 2 * index], state_slot=index)
            for index, prompt in enumerate(tokens)
        ]
        used: list[set[int]] = []
        for _ in range(steps):
            before = self._resident()
            if self.model.decode_worker is not None:
                self.model.decode_worker.begin_step()
            with torch.inference_mode():
                found.append(self.logits(make_batch([Turn(one, 1) for one in rows], PAGE_SIZE)))
            for layer, (old, new) in enumerate(zip(before, self._resident(), strict=True)):
                given_up += len((old - new) & used[layer]) if used else 0
            used = self._picked()
            for one in rows:
                one.cached += 1
        return Decoded(torch.stack(found), given_up)

    def _resident(self) -> list[set[int]]:
        """Return the experts in slots, for each layer with a cache."""
        if (store := self.model.store) is None:
            return []
        store.take_places()
        return [set(layer.hot) for layer in store.layers if layer is not None]

    def _picked(self) -> list[set[int]]:
        """Return the experts that the last step used, for each layer with a cache."""
        if (store := self.model.store) is None:
            return []
        seen = store.seen.cpu()
        return [
            set(seen[index, : self._sequences * layer.blobs.used].tolist())
            for index, layer in enumerate(store.layers)
            if layer is not None
        ]
