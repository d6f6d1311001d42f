"""What people call models of Hugging Face, and the files of a repository by their quantisation."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants

from headroom.errors import FormatError
from headroom.formats.gguf import PART_NAME, part_names

USUAL_QUANT = "Q4_K_M"  # of a repository that is named without a file
MOST_LISTED = 8  # names in an error
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_QUANT = re.compile(
    r"(UD-)?(I?Q\d\w*|TQ\d\w*|BF16|FP?16|FP?32|MXFP4\w*|NVFP4\w*|FP8\w*)", re.ASCII | re.IGNORECASE
)
_LAST_WORD = re.compile(rf"(?:^|[-._])(?P<quant>{_QUANT.pattern})$", re.ASCII | re.IGNORECASE)
_PAGES = ("blob", "resolve", "raw", "tree")  # what follows a repository in the address of a page
_NO_MODELS = ("datasets", "spaces", "models", "docs", "collections", "papers")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository, and which of its models: a file, a quantisation, or its own."""

    repo: str  # org/repo
    file: str | None = None  # a GGUF file in it; of several parts the first
    quant: str | None = None  # as in Q4_K_M, in upper case

    def __str__(self) -> str:
        chosen = self.file or self.quant
        return f"{self.repo}:{chosen}" if chosen else self.repo


def parse_hub_name(text: str) -> HubName | None:
    """Return what a text names on Hugging Face; None if it has no such form.

    `org/repo`, `org/repo:Q4_K_M` and `org/repo:file.gguf` may follow `hf.co/`, and the address of
    a page of a repository or of a file in it is taken, too.
    """
    if (page := _page_of(text)) is not None:
        return _parse_page(text, page)
    repo, _, chosen = text.partition(":")
    if _REPOSITORY.fullmatch(repo) is None or (":" in text and not chosen):
        return None
    return _choose(repo, chosen)


def _choose(repo: str, chosen: str) -> HubName | None:
    if not chosen:
        return HubName(repo)
    if chosen.endswith(".gguf") and ":" not in chosen:
        return HubName(repo, file=chosen)
    return HubName(repo, quant=chosen.upper()) if _QUANT.fullmatch(chosen) else None


def _page_of(text: str) -> str | None:
    """Return the path of an address on the hub, or on its mirror; None for other texts."""
    address = text if re.match(r"https?://", text) else f"https://{text}"
    try:
        parts = urlsplit(address)
        host = (parts.hostname or "").lower()
    except ValueError:
        return None
    mirror = urlsplit(constants.ENDPOINT)
    known = host in _HOSTS or (host == mirror.hostname and parts.port == mirror.port)
    return unquote(parts.path).strip("/") if known else None


def _parse_page(text: str, page: str) -> HubName:
    path, _, chosen = page.partition(":")
    words = path.split("/")
    if len(words) < 2 or words[0] in _NO_MODELS or not _REPOSITORY.fullmatch("/".join(words[:2])):
        raise FormatError(
            f"{text} is not the address of a model's repository.",
            hint="Give hf.co/org/repo, hf.co/org/repo:Q4_K_M or the address of a GGUF file.",
        )
    repo, rest = "/".join(words[:2]), words[2:]
    if rest and rest[0] in _PAGES:
        if len(rest) > 1 and rest[1] != "main":
            raise FormatError(
                f"{text} is of the revision {rest[1]}, and only the revision main is pulled.",
                hint=f"Give hf.co/{repo}, or download the file and give its path.",
            )
        rest = rest[2:]
    name = "/".join(rest)
    found = _choose(repo, chosen or (name if name.endswith(".gguf") else ""))
    if found is None:
        raise FormatError(
            f"{chosen!r} in {text} names neither a GGUF file nor a quantisation.",
            hint="A file ends with .gguf; a quantisation is called like Q4_K_M.",
        )
    return found


def quant_of_file(file: str) -> str | None:
    """Return the quantisation that the name of a GGUF file ends with, in upper case."""
    name = PurePosixPath(file)
    part = PART_NAME.fullmatch(name.name)
    found = _LAST_WORD.search(name.stem if part is None else part["stem"])
    return None if found is None else found["quant"].upper()


def first_files(names: Iterable[str]) -> list[str]:
    """Return the GGUF models among the files of a repository, of one in several parts the first.

    Projectors of pictures (`mmproj`) are no models.
    """
    found = []
    for name in sorted(names):
        last = PurePosixPath(name).name
        if not last.endswith(".gguf") or "mmproj" in last.lower():
            continue
        part = PART_NAME.fullmatch(name)
        if part is None or part_names(part)[0] == name:
            found.append(name)
    return found


def choose_file(name: HubName, names: Iterable[str]) -> str:
    """Return the GGUF file that a name without a file means, of all files of its repository.

    Without a quantisation that is the only model, or the usual quantisation.
    """
    there = first_files(names)
    wanted = name.quant or USUAL_QUANT
    fitting = [file for file in there if quant_of_file(file) == wanted]
    if not fitting and name.quant is None and len(there) == 1:
        return there[0]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise FormatError(
            f"{len(fitting)} files of {name.repo} are of {wanted}.",
            hint=f"Name one of them: {_listed([f'{name.repo}:{file}' for file in fitting])}.",
        )
    quants = list(dict.fromkeys(quant for file in there if (quant := quant_of_file(file))))
    told = f"has no GGUF file of {wanted}" if there else "holds no safetensors and no GGUF files"
    hint = f"There are {_listed(quants)}: name one, as in {name.repo}:{quants[0]}" if quants else (
        f"Its GGUF files: {_listed(there)}." if there else "Check the name of the repository."
    )  # fmt: skip
    raise FormatError(f"The repository {name.repo} {told}.", hint=hint)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:MOST_LISTED]) + (", ..." if len(names) > MOST_LISTED else "")
