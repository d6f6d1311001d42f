"""ModelCard: what the server knows about a model without loading it, its plan included."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headroom.errors import DeviceError, FormatError, HeadroomError, OptionError, PlanError
from headroom.families.files import open_checkpoint
from headroom.formats.checkpoint import Checkpoint
from headroom.formats.facts import model_facts
from headroom.llm import LLM, model_name
from headroom.options import Options
from headroom.plan.describe import describe
from headroom.plan.lines import Line
from headroom.plan.plan import Plan
from headroom.plan.shape import ModelShape
from headroom.split.choice import NOT_NEEDED, NOTHING_FREED, make_run_plan, named_devices

HOST = "cpu"  # the name of host memory, also of that behind a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What is known about a model of the server; fields stay empty if its files cannot be read."""

    name: str
    aliases: frozenset[str] = frozenset()  # further names, in lower case
    path: Path | None = None  # None: a model that was loaded by the caller
    size_bytes: int = 0  # of all its tensors in the files
    changed: float = 0.0  # seconds since 1970: when the file was last written
    digest: str = ""  # hexadecimal, equal for equal contents
    format: str = ""  # "gguf" or "safetensors"
    family: str = ""  # GGUF's name of the architecture
    parameters: int = 0
    quant: str = ""  # the tensor type with the most bytes
    trained_context: int = 0  # the model's longest context, in tokens; 0: not known
    chat_template: str | None = field(default=None, repr=False)
    metadata: Mapping[str, object] = field(default_factory=dict, repr=False)  # plain values only
    shape: ModelShape | None = field(default=None, repr=False)
    plan: Plan | None = field(default=None, repr=False)  # as if no other model were loaded
    error: HeadroomError | None = None  # why the model can never be loaded on this machine
    unfit: HeadroomError | None = None  # why it did not fit when it was planned last

    @property
    def context(self) -> int | None:
        """The context of one sequence, in tokens; None if the model has no plan."""
        return None if self.plan is None else self.plan.settings.context

    def fixed(self, options: Options) -> Options:
        """Return the options with what the plan without other models has chosen.

        These are the devices, the context, the parallel sequences, the chunk and the KV cache. So a
        client finds the same limits whatever else is loaded; only fewer experts may be hot. Workers
        keep the devices that the options name: those of the plan belong to other processes.
        """
        assert self.plan is not None
        settings = self.plan.settings
        return replace(
            options,
            device=named_devices(self.plan) if options.workers is None else options.device,
            context=settings.context,
            parallel=settings.parallel,
            chunk=settings.chunk,
            cache_tokens=settings.cache_tokens,
        )


def read_card(name: str, path: Path, options: Options, *, planned: bool = True) -> ModelCard:
    """Read a model's headers and plan it; errors of the model are kept in the card, not raised."""
    card = ModelCard(name=name, path=path)
    try:
        checkpoint = open_checkpoint(path)
        card = _describe(name, path, checkpoint)
        card = replace(card, shape=describe(checkpoint).shape)
        if planned:
            card = planned_card(card, options)
    except OptionError:
        raise  # a wrong option is wrong for every model
    except HeadroomError as error:
        return replace(card, error=error)
    except OSError as error:
        return replace(card, error=FormatError(f"Cannot read {path}: {error.strerror}."))
    return card


def planned_card(
    card: ModelCard, options: Options, freed: Mapping[str, int] = NOTHING_FREED
) -> ModelCard:
    """Return the card with the plan of its model without others, or with why it does not fit.

    `freed` is the memory in bytes, by device, that loaded models hold and would give back.
    """
    assert card.shape is not None
    try:
        return replace(card, plan=make_run_plan(card.shape, options, freed=freed), unfit=None)
    except (PlanError, DeviceError) as error:
        return replace(card, unfit=error)


def loaded_card(llm: LLM) -> ModelCard:
    """Return the card of a model that the caller has loaded."""
    return ModelCard(name=llm.name)


def planned_bytes(plan: Plan) -> dict[str, int]:
    """Return the bytes that the model of a plan takes beside other models, by device."""
    sizes: Counter[str] = Counter()
    for device in plan.devices:
        sizes[device.name] += _taken(device.lines)
    sizes[HOST] += _taken(plan.host.lines)
    return {name: size for name, size in sizes.items() if size}


def _taken(lines: Iterable[Line]) -> int:
    """Return the bytes of lines that only this model takes: the process has the others once."""
    return sum(line.bytes for line in lines if line.name not in NOT_NEEDED)


def available_bytes(plan: Plan) -> dict[str, int]:
    """Return the bytes that a plan found available, by device."""
    devices = plan.problem.devices
    return {
        (device.name if device.runs_layers else HOST): device.available_bytes for device in devices
    }


def names_of(
    paths: Sequence[Path], given: Sequence[str], aliases: Mapping[Path, str] | None = None
) -> list[str]:
    """Return the name of each model: its alias, if it was given by one, or that of its file.

    Raise OptionError if two models have one name.
    """
    chosen = aliases or {}
    names = [
        chosen.get(path) or model_name(text, path) for text, path in zip(given, paths, strict=True)
    ]
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
    facts = model_facts(checkpoint)
    return ModelCard(
        name=name,
        path=path,
        size_bytes=facts.tensor_bytes,
        changed=facts.changed,
        digest=facts.identity,
        format=facts.format,
        family=facts.architecture,
        parameters=facts.parameters,
        quant=facts.quant,
        trained_context=facts.trained_context,
        chat_template=checkpoint.chat_template,
        metadata=_plain_metadata(checkpoint),
    )


def _plain_metadata(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the metadata that is text or numbers, by GGUF key, without the tokenizer's."""
    found: dict[str, object] = {"general.architecture": checkpoint.architecture}
    for key in checkpoint.metadata.values:
        if not key.startswith("tokenizer."):
            value = checkpoint.metadata.values.get(key)
            if isinstance(value, str | int | float | bool):
                prefix = "" if key.startswith("general.") else f"{checkpoint.architecture}."
                found[prefix + key] = value
    return found
