"""Models that other programs have on this disk: Hugging Face's cache, LM Studio and ollama.

They are read where they lie. Only the program that a model belongs to deletes it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from headroom.errors import FormatError

OLLAMA = "ollama:"  # what the name of one of ollama's models begins with
_WEIGHTS = "application/vnd.ollama.image.model"  # ollama's type of a GGUF file
_REGISTRY = "registry.ollama.ai"
_LIBRARY = "library"  # whose models ollama names without an owner
_LEAST_NAMES = 2  # a manifest's folders: at least a registry and a model


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A GGUF file or a folder with safetensors that another program has fetched."""

    name: str  # what commands take
    path: Path
    owner: str  # the program's name


def repository_folders(repo: str) -> Iterator[Path]:
    """Yield the folders in which other programs may have files of a repository of the hub."""
    cached = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    if (snapshot := _snapshot(cached)) is not None:
        yield snapshot
    for folder in _lm_studio():
        if (there := folder / repo).is_dir():
            yield there


def all_folders() -> Iterator[tuple[str, Path, str]]:
    """Yield the repositories that other programs have: name, folder, program."""
    for cached in _folders(Path(constants.HF_HUB_CACHE), "models--*--*"):
        if (snapshot := _snapshot(cached)) is not None:
            repo = cached.name.removeprefix("models--").replace("--", "/", 1)
            yield repo, snapshot, "Hugging Face's cache"
    for root in _lm_studio():
        for folder in _folders(root, "*/*"):
            yield f"{folder.parent.name}/{folder.name}", folder, "LM Studio"


def find_ollama(name: str) -> Path | None:
    """Return the weights of a model such as `ollama:qwen3:8b`; None if it is not here."""
    model, _, tag = name.removeprefix(OLLAMA).partition(":")
    owner = [_REGISTRY, _LIBRARY, model]
    if (slashes := model.count("/")) == 1:
        owner = [_REGISTRY, model]
    elif slashes > 1:
        owner = [model]
    for root in _ollama():
        manifest = root.joinpath("manifests", *owner, tag or "latest")
        if ".." not in manifest.parts and (path := _ollama_weights(manifest, root)) is not None:
            return path
    return None


def ollama_models() -> Iterator[OtherFile]:
    """Yield the models that ollama has pulled."""
    for root in _ollama():
        for manifest in sorted((root / "manifests").rglob("*")):
            names = manifest.relative_to(root / "manifests").parts
            if len(names) <= _LEAST_NAMES or not manifest.is_file():
                continue
            if (path := _ollama_weights(manifest, root)) is None:
                continue
            if names[0] == _REGISTRY:
                names = names[1:]
            if names[0] == _LIBRARY:
                names = names[1:]
            yield OtherFile(f"{OLLAMA}{'/'.join(names[:-1])}:{names[-1]}", path, "ollama")


def owner_of(path: Path) -> str:
    """Return the program whose folder a file lies in; "" if it is none of them."""
    roots = [(Path(constants.HF_HUB_CACHE), "Hugging Face's cache")]
    roots += [(root, "LM Studio") for root in _lm_studio()]
    roots += [(root, "ollama") for root in _ollama()]
    there = path.absolute()
    return next((name for root, name in roots if root.absolute() in there.parents), "")


def check_ollama(name: str) -> None:
    """Refuse a name of ollama's that is not on this disk."""
    known = [model.name for model in ollama_models()]
    raise FormatError(
        f"ollama has no model {name.removeprefix(OLLAMA)!r} on this disk.",
        hint=f"It has {', '.join(known[:8])}." if known else "Fetch it with: ollama pull",
    )


def _snapshot(cached: Path) -> Path | None:
    """Return the folder of the newest known revision of a repository in the hub's cache."""
    try:
        revision = (cached / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = cached / "snapshots" / revision
    return folder if revision and "/" not in revision and folder.is_dir() else None


def _ollama_weights(manifest: Path, root: Path) -> Path | None:
    try:
        table = json.loads(manifest.read_text())
        layers = table["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _WEIGHTS]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if len(digests) != 1 or not isinstance(digests[0], str) or "/" in digests[0]:
        return None
    path = root / "blobs" / digests[0].replace(":", "-")
    return path if path.is_file() else None


def _folders(root: Path, pattern: str) -> list[Path]:
    try:
        return [path for path in sorted(root.glob(pattern)) if path.is_dir()]
    except OSError:
        return []


def user_home() -> Path:
    """Return the folder below which other programs keep a user's models."""
    return Path.home()


def _lm_studio() -> list[Path]:
    return [user_home() / ".lmstudio/models", user_home() / ".cache/lm-studio/models"]


def _ollama() -> list[Path]:
    # The second folder is that of the service which ollama's installer sets up on Linux.
    return [user_home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]
