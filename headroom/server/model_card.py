"""ModelCard: what the server tells of a model without loading it, and how it would run alone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from headroom.errors import FormatError, HeadroomError, OptionError
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.llm import LLM, model_name
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.plan import Plan
from headroom.plan.shape import ModelShape
from headroom.split.choice import NOTHING_LOADED, make_run_plan

HOST = "cpu"  # the name of host memory, also of that behind a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model that the server can answer with; some fields are empty if it cannot be read."""

    name: str
    path: Path | None = None  # None: a model that was loaded by the caller
    size_bytes: int = 0  # of all its tensors in the files
    changed: float = 0.0  # seconds since 1970: when the file was last written
    digest: str = ""  # hexadecimal, equal for equal contents
    format: str = ""  # "gguf" or "safetensors"
    family: str = ""  # GGUF's name of the architecture
    parameters: int = 0
    quant: str = ""  # the type that most of the bytes have
    trained_context: int = 0  # tokens that the model was made for; 0: not known
    chat_template: str | None = field(default=None, repr=False)
    metadata: Mapping[str, object] = field(default_factory=dict, repr=False)  # plain values only
    shape: ModelShape | None = field(default=None, repr=False)
    plan: Plan | None = field(default=None, repr=False)  # with no other model loaded
    error: HeadroomError | None = None  # why it can never be loaded here

    @property
    def context(self) -> int | None:
        """The tokens that one conversation may hold; None if the model does not fit."""
        return None if self.plan is None else self.plan.settings.context

    def fixed(self, options: Options) -> Options:
        """Return the options under which the model runs beside others as it does alone.

        Device, context, number of conversations, chunk and KV cache are those of the plan without
        other models, so that a client finds the same limits whatever else is loaded. Only the
        number of hot experts may be smaller.
        """
        assert self.plan is not None
        settings = self.plan.settings
        return replace(
            options,
            device=self.plan.devices[0].name,
            context=settings.context,
            parallel=settings.parallel,
            chunk=settings.chunk,
            cache_tokens=settings.cache_tokens,
        )


def read_card(name: str, path: Path, options: Options, *, planned: bool = True) -> ModelCard:
    """Read a model's headers and plan it; its own errors go into the card, not to the caller."""
    card = ModelCard(name=name, path=path)
    try:
        checkpoint = open_checkpoint(path)
        card = _describe(name, path, checkpoint)
        card = replace(card, shape=describe(checkpoint).shape)
        if planned:
            assert card.shape is not None
            card = replace(card, plan=make_run_plan(card.shape, options, NOTHING_LOADED))
    except OptionError:
        raise  # a wrong option is wrong for every model
    except HeadroomError as error:
        return replace(card, error=error)
    except OSError as error:
        return replace(card, error=FormatError(f"Cannot read {path}: {error.strerror}."))
    return card


def loaded_card(llm: LLM) -> ModelCard:
    """Return the card of a model that the caller has loaded."""
    return ModelCard(name=llm.name)


def planned_bytes(plan: Plan) -> dict[str, int]:
    """Return the bytes that the engine of a plan allocates, by device."""
    sizes: Counter[str] = Counter()
    for device in plan.devices:
        sizes[device.name] += sum(device.allocated.values())
    lines = plan.host.lines
    sizes[HOST] += sum(line.bytes for line in lines if line.name not in ("runtime", "reserve"))
    return {name: size for name, size in sizes.items() if size}


def available_bytes(plan: Plan) -> dict[str, int]:
    """Return the bytes that a plan found available, by device."""
    devices = plan.problem.devices
    return {
        (device.name if device.runs_layers else HOST): device.available_bytes for device in devices
    }


def names_of(paths: Sequence[Path], given: Sequence[str]) -> list[str]:
    """Return the name of each model; two of one name are refused."""
    names = [model_name(text, path) for text, path in zip(given, paths, strict=True)]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise OptionError(
                f"Two models have the name {name!r}: {paths[names.index(name)]} and "
                f"{paths[index]}.",
                hint="Rename one of the files: clients choose models by their names.",
                param="model",
            )
    return names


def _describe(name: str, path: Path, checkpoint: Checkpoint) -> ModelCard:
    tensors = checkpoint.tensors.values()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[str(tensor.quant)] += tensor.nbytes
    return ModelCard(
        name=name,
        path=path,
        size_bytes=sum(sizes.values()),
        changed=checkpoint.path.stat().st_mtime,
        digest=checkpoint.identity,
        format=checkpoint.format,
        family=checkpoint.architecture,
        parameters=sum(prod(tensor.shape) for tensor in tensors),
        quant=sizes.most_common(1)[0][0] if sizes else "",
        trained_context=checkpoint.metadata.get_int("context_length", 0),
        chat_template=checkpoint.chat_template,
        metadata=_plain_metadata(checkpoint),
    )


def _plain_metadata(checkpoint: Checkpoint) -> dict[str, object]:
    """Return texts and numbers of the metadata with GGUF's keys, without those of the tokenizer."""
    found: dict[str, object] = {"general.architecture": checkpoint.architecture}
    for key in checkpoint.metadata.values:
        if not key.startswith("tokenizer."):
            value = checkpoint.metadata.values.get(key)
            if isinstance(value, str | int | float | bool):
                prefix = "" if key.startswith("general.") else f"{checkpoint.architecture}."
                found[prefix + key] = value
    return found
