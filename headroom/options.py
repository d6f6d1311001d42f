"""Options: every setting is declared here once; flag, HEADROOM_ variable and config key follow."""

import logging
import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from headroom.errors import OptionError

log = logging.getLogger(__name__)

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
EXACT_TYPE = "int24"  # whole numbers of 24 bits, no less exact than f32
ROUNDED_TYPES = ("int8", EXACT_TYPE)  # of activations in a CPU's products with packed weights
COMPUTE_TYPES = (*ROUNDED_TYPES, "f32", "bf16", "f16")
ACTIVATION_TYPES = ("f32", "bf16", "f16")
FEATURE_TYPES = ("f32", "f16", "bf16", "q8_0")
SWAP_WINDOW = 8192  # tokens; exchanges of experts follow the choices of about the last so many
NGRAM = "ngram"
MTP = "mtp"
DRAFT_MODEL = "model"  # what requests call a draft model
DRAFTERS = (NGRAM, MTP)  # values of --draft that need no other model
NGRAM_GUESSES = 8  # usual ones, found in the text
MTP_GUESSES = 4  # usual ones of a prediction head, which sees less the further ahead it looks
MOST_GUESSES = 31  # besides the row of the last token, a step's guesses fill 32 rows
OFF = "off"  # a value that some settings take instead of a path or a number
BOOLEANS = {
    "1": True, "true": True, "yes": True, "on": True,
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


def option(
    default: object,
    help: str,
    *,
    group: str = "engine",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    repeatable: bool = False,
) -> Any:
    """Declare one setting; a default of None means that the plan decides.

    The flag of a repeatable setting may be given several times; its values are joined by commas.
    """
    metadata = {"help": help, "group": group, "min": minimum, "max": maximum, "choices": choices}
    return field(default=default, metadata={**metadata, "repeatable": repeatable})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All settings of one engine and its server."""

    model: str = option(
        "", "a file, a folder or a known name; the default model if left out", group="model"
    )
    context: int | None = option(None, "tokens one conversation may hold", minimum=16)
    parallel: int | None = option(
        None, "conversations that run at the same time", minimum=1, maximum=1024
    )
    chunk: int | None = option(None, "prompt tokens computed in one step", minimum=1, maximum=65536)
    cache_tokens: int | None = option(
        None,
        "tokens that the KV cache holds for all conversations (default: context x parallel)",
        minimum=16,
    )
    kv_type: str | None = option(None, "type of cached keys and values", choices=KV_TYPES)
    k_type: str | None = option(None, "type of cached keys, if not --kv-type", choices=KV_TYPES)
    v_type: str | None = option(None, "type of cached values, if not --kv-type", choices=KV_TYPES)
    threads: int | None = option(
        None, "CPU threads (default: the physical cores this process may use)", minimum=1
    )
    pin_threads: bool = option(False, "keep each CPU thread on a core of its own")
    device: str | None = option(
        None,
        "where to run: cpu or cuda:0 (default: GPUs that can); given several times, each runs a "
        "part of the layers; a plan also takes rtx3060-12gb or 24GiB",
        repeatable=True,
    )
    split: str | None = option(
        None, "share of layers for each device, as in 2,1 (default: by memory and speed)"
    )
    activation_dtype: str | None = option(
        None,
        "type of the rows that one device hands to the next (default: by the devices)",
        choices=ACTIVATION_TYPES,
    )
    workers: str | None = option(
        None,
        "run the layers in so many other processes, as in 2, or host1:2,host2:1 on other machines",
        group="workers",
    )
    worker_address: str = option(
        "127.0.0.1", "address, or address:port, that workers connect to", group="workers"
    )
    worker_token: str | None = option(
        None, "secret that the engine shares with workers of other machines", group="workers"
    )
    worker_timeout: float = option(
        6.0, "seconds of silence after which a worker counts as lost", group="workers", minimum=2
    )
    on_worker_loss: str = option(
        "restart",
        "start all workers again when one is lost, or stop the engine",
        group="workers",
        choices=("restart", "stop"),
    )
    worker_restarts: int = option(
        5,
        "losses of workers in ten minutes after which the engine stops",
        group="workers",
        minimum=0,
    )
    dtype: str | None = option(None, "type that matrix products compute in", choices=COMPUTE_TYPES)
    kernels: str = option(
        "auto",
        "auto for the fastest there are, triton for a GPU's in Triton, reference for plain torch",
        choices=("auto", "triton", "reference"),
    )
    weights: str = option(
        "auto",
        "keep weights packed as in the file, or unpack them when they are loaded",
        choices=("auto", "packed", "unpacked"),
    )
    routing_stats: str | None = option(
        None,
        "file of routing statistics, or off (default: MODEL.routing.json beside the model or, "
        "if that cannot be written, in the home folder)",
    )
    swap_every: str = option(
        "0", "tokens between rounds of expert exchanges; 0: only between requests; off: never"
    )
    swap_bytes: str = option(
        "256MiB", "maximum bytes that a round of exchanges sends over the link"
    )
    swap_min_gain: float = option(
        16.0, f"hits in the last {SWAP_WINDOW} tokens that an exchange must gain", minimum=0
    )
    swap_false_chance: float = option(
        0.001,
        "maximum chance that a round makes an exchange although all experts are chosen equally "
        "often; 1: exchanges need no proof",
        minimum=0,
        maximum=1,
    )
    swap_per_layer: int = option(2, "maximum exchanges of one layer in a round", minimum=1)
    save_placement: str | None = option(
        None, "file that the placement of experts is written to when the engine ends"
    )
    device_memory: str | None = option(
        None, "maximum memory that the engine takes of each GPU, as in 12GiB (default: all)"
    )
    expert_budget: str | None = option(
        None, "maximum GPU memory for routed experts, as in 8GiB or 60% of them"
    )
    cold: str = option(
        "auto",
        "what computes experts that are not in GPU memory; drop leaves them out, which is lossy",
        choices=("auto", "gpu", "cpu", "drop"),
    )
    no_pin: bool = option(
        False, "do not pin the memory of cold experts; the GPU cannot read them then"
    )
    keep_host_copy: bool = option(False, "keep a copy of hot experts in host memory")
    expert_policy: str = option(
        "auto",
        "how experts change places while tokens are generated: lru, spare (lru that spares experts "
        "used often), counts, or static for none; auto measures which is best",
        choices=("auto", "static", "lru", "spare", "counts"),
    )
    expert_pin: float = option(
        0.0,
        "share of each layer's slots that keep the experts chosen most often, by statistics",
        minimum=0,
        maximum=1,
    )
    exact_batch: bool = option(
        False,
        "compute each prompt in steps of its own, cut at fixed tokens, so that in 16 bits on a GPU "
        "an answer does not depend on which other requests run, nor on what is cached",
    )
    no_prefix_cache: bool = option(
        False, "compute every prompt from its start, even if an earlier one began alike"
    )
    cache_ram: str | None = option(
        None,
        "host memory for kept prefixes, as in 4GiB: for pages that leave the devices, and half of "
        "it for snapshots, if the model needs any (default: up to a sixteenth of host memory for "
        "snapshots, none for pages)",
    )
    cache_dir: str | None = option(
        None, "folder in which the beginnings of prompts outlast a restart (default: none)"
    )
    cache_bytes: str = option("16GiB", "maximum bytes of the files in --cache-dir")
    placement: str | None = option(None, "file that says which experts are hot")
    draft: str | None = option(
        None,
        "what guesses tokens ahead: mtp is the prediction head of the file, ngram looks in the "
        "prompt and the answer, a file, folder or name is a DFlash draft of the model, none "
        "generates one token at a time (default: mtp on CPUs if the file has such a head, else "
        "none)",
    )
    draft_always: bool = option(
        False, "check as many guesses as there are, even where that makes answers slower"
    )
    draft_tokens: int | None = option(
        None,
        "tokens that are guessed for a conversation at a time, at most; more than a draft model's "
        "block has make a tree (default: 8 by ngram, 4 by mtp, the block of a draft model)",
        minimum=1,
        maximum=MOST_GUESSES,
    )
    feature_dtype: str = option(
        "f32",
        "type of the target's hidden states that a draft model reads of each step",
        choices=FEATURE_TYPES,
    )
    ram: str | None = option(None, "host memory to plan for, as in 64GiB", group="plan")
    activation_model: str = option(
        "own",
        "how the plan counts scratch: its own formula, or the published one",
        group="plan",
        choices=("own", "published"),
    )
    queue: int = option(
        256, "requests that may wait; further ones are refused", group="server", minimum=1
    )
    host: str = option("127.0.0.1", "address to listen on", group="server")
    port: int = option(8080, "port to listen on", group="server", minimum=0, maximum=65535)
    max_connections: int = option(
        1024,
        "connections that may be open; further clients get 503, but for /health",
        group="server",
        minimum=1,
    )
    drain: float = option(
        8.0,
        "seconds that running requests have to end when the server is told to stop",
        group="server",
        minimum=0,
    )
    api_key: str | None = option(
        None, "key that clients must send as a bearer token", group="server"
    )
    api_keys: str | None = option(
        None, "TOML file of several keys, with their names and limits", group="server"
    )
    allow_host: str | None = option(
        None,
        "further name that the server answers to (* for any)",
        group="server",
        repeatable=True,
    )
    cors: str | None = option(
        None,
        "origin whose pages may use the server (* for any)",
        group="server",
        repeatable=True,
    )
    tls_cert: str | None = option(
        None, "file of the certificate for HTTPS, with its chain (PEM)", group="server"
    )
    tls_key: str | None = option(None, "file of the certificate's key (PEM)", group="server")
    served_name: str | None = option(
        None, "name under which the server lists the model", group="server"
    )
    strict_model: bool = option(
        False,
        "refuse requests for other models; otherwise the only model answers to any name",
        group="server",
    )
    idle_unload: float = option(
        0.0,
        "seconds without a request after which a model is unloaded; 0: never",
        group="server",
        minimum=0,
    )
    keep_alive: float = option(
        15.0,
        "seconds without a token after which a stream sends a comment",
        group="server",
        minimum=0.05,
    )
    stored_responses: int = option(
        1000,
        "responses that /v1/responses keeps for clients that continue them; 0 for none",
        group="server",
        minimum=0,
    )
    stored_bytes: str = option(
        "256MiB", "maximum bytes of all responses that are kept", group="server"
    )
    max_body: int = option(8 << 20, "maximum bytes of a request body", group="server", minimum=1024)
    home: str = option("", "folder of pulled models (default: ~/.cache/headroom)", group="program")
    aliases: str = option(
        "", "file of aliases (default: ~/.config/headroom/aliases.json)", group="program"
    )
    log_level: str = option(
        "info",
        "lowest log level that is shown",
        group="program",
        choices=("debug", "info", "warning", "error"),
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            _check(setting, getattr(self, setting.name))

    @property
    def drafts(self) -> bool:
        """Whether tokens are guessed ahead."""
        return self.draft not in (None, "", "none")

    @property
    def draft_model(self) -> str | None:
        """The model that guesses tokens; None: no model does."""
        return None if self.draft in (*DRAFTERS, "", "none") else self.draft

    @property
    def most_guesses(self) -> int:
        """Tokens that are guessed for a conversation at a time; 0: none are."""
        usual = {NGRAM: NGRAM_GUESSES, MTP: MTP_GUESSES}.get(self.draft or "", MOST_GUESSES)
        return (self.draft_tokens or usual) if self.drafts else 0

    @property
    def home_path(self) -> Path:
        """The folder of pulled models."""
        try:
            return Path(self.home or "~/.cache/headroom").expanduser()
        except RuntimeError as error:  # neither $HOME nor the user database names one
            raise OptionError(
                "There is no home folder for pulled models.", hint="Set --home or HEADROOM_HOME."
            ) from error

    @property
    def aliases_path(self) -> Path:
        """The file of aliases, in the folder for settings of programs."""
        folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        try:
            return Path(self.aliases or f"{folder}/headroom/aliases.json").expanduser()
        except RuntimeError as error:  # neither $HOME nor the user database names one
            raise OptionError(
                "There is no home folder for aliases.", hint="Set --aliases or HEADROOM_ALIASES."
            ) from error


def flag(setting: "Field[Any]") -> str:
    """Return the command-line flag of a setting."""
    return "--" + setting.name.replace("_", "-")


def variable(setting: "Field[Any]") -> str:
    """Return the environment variable of a setting."""
    return "HEADROOM_" + setting.name.upper()


def value_type(setting: "Field[Any]") -> type:
    """Return the plain type of a setting: int for `int | None`."""
    kind: Any = setting.type
    if isinstance(kind, UnionType):
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    assert isinstance(kind, type)
    return kind


def load_options(
    given: Mapping[str, object],
    config: Path | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Options:
    """Return the settings: `given` first, then the environment, the config file and `defaults`."""
    known = {setting.name: setting for setting in fields(Options)}
    config_text = config or os.environ.get("HEADROOM_CONFIG")
    merged = dict(defaults or {})
    if config_text:
        merged.update(_read_config(Path(config_text), known))
    for name, setting in known.items():
        if (text := os.environ.get(variable(setting))) is not None:
            merged[name] = _parse(setting, text)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise OptionError(f"Unknown setting {unknown[0]!r}.", hint=f"Known: {', '.join(known)}.")
    merged.update({name: value for name, value in given.items() if value is not None})
    return Options(**merged)  # type: ignore[arg-type]  # each value was checked against its field


def warn_unknown_variables() -> None:
    """Log a warning for each HEADROOM_ variable that is no setting, with the nearest that is."""
    known = ["HEADROOM_CONFIG", *(variable(setting) for setting in fields(Options))]
    for name in sorted(os.environ):
        if name.startswith("HEADROOM_") and name not in known:
            nearest = get_close_matches(name, known, n=1, cutoff=0.8)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            log.warning("options: %s is ignored, since there is no such setting%s", name, hint)


def completed_words() -> list[str]:
    """Return the words after the program's name that a shell wants completed; else none."""
    if "_HEADROOM_COMPLETE" not in os.environ:
        return []
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return line.split()[1:]


def child_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with `changes`, for another program."""
    return dict(os.environ) | dict(changes)


def cuda_variables() -> dict[str, str]:
    """Return the CUDA variables that are set and choose which GPUs are seen, and in which order."""
    names = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")
    return {name: os.environ[name] for name in names if name in os.environ}


def _read_config(path: Path, known: Mapping[str, "Field[Any]"]) -> dict[str, object]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise OptionError(f"Cannot read the config file {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not a TOML file: {error}.") from error
    for key in table:
        if key.replace("-", "_") not in known:
            raise OptionError(
                f"{path}: unknown setting {key!r}.", hint=f"Known: {', '.join(known)}."
            )
    return {key.replace("-", "_"): value for key, value in table.items()}


def _parse(setting: "Field[Any]", text: str) -> object:
    kind = value_type(setting)
    try:
        return BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError) as error:
        raise OptionError(f"{variable(setting)} is {text!r}, not {kind.__name__}.") from error


def _check(setting: "Field[Any]", value: object) -> None:
    if value is None and setting.default is None:
        return
    kind, rules = value_type(setting), setting.metadata
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise OptionError(f"{flag(setting)} is {value!r}, not {kind.__name__}.", param=setting.name)
    if rules["choices"] and value not in rules["choices"]:
        raise OptionError(
            f"{flag(setting)} is {value!r}.",
            hint=f"Choose from {', '.join(rules['choices'])}.",
            param=setting.name,
        )
    for bound, below in ((rules["min"], True), (rules["max"], False)):
        if (
            bound is not None
            and isinstance(value, int | float)
            and (value < bound if below else value > bound)
        ):
            word = "at least" if below else "at most"
            raise OptionError(
                f"{flag(setting)} is {value}; it must be {word} {bound}.", param=setting.name
            )


assert all(setting.default is not MISSING for setting in fields(Options))
