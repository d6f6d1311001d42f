"""Headers over HTTP: range requests that read what a plan needs and not one weight."""

import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub

from headroom.errors import FormatError
from headroom.formats.gguf import (
    PART_NAME,
    GgufFile,
    HeaderCutError,
    check_parts,
    parse_gguf,
    part_names,
)
from headroom.formats.header import ModelHeader
from headroom.formats.names import Namings
from headroom.formats.read_header import gguf_header, safetensors_header
from headroom.formats.safetensors import (
    INDEX_NAME,
    INDEX_SUFFIX,
    MAX_HEADER_BYTES,
    SafetensorsFile,
    header_end,
    indexed_names,
    keep_named,
    parse_json,
    parse_safetensors,
)

FIRST_BYTES = 1 << 20  # of a first request; headers without a vocabulary are shorter
MAX_REMOTE_BYTES = 128 << 20  # of one header; the largest known ones have 20 MiB
MAX_CONFIG_BYTES = 16 << 20
MAX_PARTS = 1000
NETWORK_TIMEOUT_S = 30.0
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class MissingFileError(FormatError):
    """The server has no such file."""


class RemoteFile:
    """The first bytes of a file on a server, and more of them when asked for."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url
        self.path = Path(_folders(url)[-1])
        self.file_bytes: int | None = None  # known after the first request
        self.data = bytearray()
        self._token = token

    def read_to(self, end: int) -> memoryview:
        """Return the file from its start to `end` or to its own end, whichever comes first."""
        if end > MAX_REMOTE_BYTES:
            raise FormatError(
                f"The header of {self.url} has {end} bytes; at most {MAX_REMOTE_BYTES} are read.",
                hint="It is corrupt or not a model file.",
            )
        start = len(self.data)
        if self.file_bytes is not None:
            end = min(end, self.file_bytes)
        if start < end:
            self.data += self._range(start, end)
        return memoryview(bytes(self.data))

    def _range(self, start: int, end: int) -> bytes:
        with _open(self.url, self._token, {"Range": f"bytes={start}-{end - 1}"}) as response:
            if response.status != 206:
                raise FormatError(
                    f"The server of {self.url} answers range requests with the whole file "
                    f"(status {response.status}).",
                    hint="Download the file and plan from it.",
                )
            found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != start or not start <= int(found[2]) < end:
                raise FormatError(
                    f"{self.url}: asked for bytes {start} to {end - 1}, the server sent "
                    f"{response.headers.get('Content-Range') or 'no Content-Range'}."
                )
            total = int(found[3])
            if self.file_bytes not in (None, total):
                raise FormatError(f"{self.url} changed while it was read.", hint="Try again.")
            self.file_bytes = total
            wanted = int(found[2]) + 1 - start
            data = _read(response, self.url, wanted)
        if len(data) != wanted or wanted < min(end, total) - start:
            raise FormatError(
                f"{self.url}: asked for {min(end, total) - start} bytes and got {len(data)}.",
                hint="The connection broke off; try again.",
            )
        return data


def read_remote(url: str, namings: Namings, token: str | None = None) -> ModelHeader:
    """Read the header of the model at a URL: a GGUF file, safetensors, an index, a config.json."""
    name = _folders(url)[-1]
    if name.endswith(".gguf"):
        return gguf_header(_gguf_parts(url, token), Path(name), namings)
    if name == "config.json":
        return _with_config(url, (), namings, token)
    if name.endswith(INDEX_SUFFIX):
        return _with_config(url, _indexed(url, token), namings, token)
    if name.endswith(".safetensors"):
        return _with_config(url, (_safetensors(url, token),), namings, token)
    raise FormatError(
        f"{url} does not name a model file.",
        hint="Give the URL of a .gguf or .safetensors file, an index or a config.json.",
    )


def read_hub(repo: str, file: str | None, namings: Namings) -> ModelHeader:
    """Read the header of a model on Hugging Face: one GGUF file, or the repository's own."""
    token = huggingface_hub.get_token()
    if file is not None:
        return read_remote(huggingface_hub.hf_hub_url(repo, file), namings, token)
    for name in (INDEX_NAME, "model.safetensors"):
        try:
            header = read_remote(huggingface_hub.hf_hub_url(repo, name), namings, token)
        except MissingFileError:
            continue
        return replace(header, name=repo)
    raise MissingFileError(
        f"The repository {repo} holds no safetensors.",
        hint=f"For a GGUF file of it, name the file: {repo}:FILE.gguf",
    )


def _gguf_parts(url: str, token: str | None) -> Sequence[GgufFile]:
    first = _gguf(url, token)
    count = first.values.get("split.count", 1)
    if not isinstance(count, int) or count <= 1:
        return (first,)
    name = PART_NAME.fullmatch(first.path.name)
    if name is None or int(name["count"]) != count or count > MAX_PARTS:
        raise FormatError(f"{url} is one of {count} parts, but is not named as one.")
    names = part_names(name)
    if first.path.name != names[0]:
        raise FormatError(f"{url} is not the first of {count} parts.", hint=f"Give {names[0]}.")
    parts = (first, *(_gguf(_beside(url, part), token) for part in names[1:]))
    check_parts(parts)
    return parts


def _gguf(url: str, token: str | None) -> GgufFile:
    file, wanted = RemoteFile(url, token), FIRST_BYTES
    while True:
        view = file.read_to(wanted)
        assert file.file_bytes is not None
        try:
            return parse_gguf(view, file.path, file.file_bytes)
        except HeaderCutError as cut:
            wanted = max(cut.needed_bytes, 2 * len(view))
            if cut.needed_bytes <= MAX_REMOTE_BYTES:  # doubling alone must not go beyond
                wanted = min(wanted, MAX_REMOTE_BYTES)


def _safetensors(url: str, token: str | None) -> SafetensorsFile:
    file = RemoteFile(url, token)
    view = file.read_to(FIRST_BYTES)
    assert file.file_bytes is not None
    end = header_end(view, file.path, file.file_bytes)
    assert end <= MAX_HEADER_BYTES + 8 <= MAX_REMOTE_BYTES
    if end > len(view):
        view = file.read_to(end)
    return parse_safetensors(view, file.path, file.file_bytes)


def _indexed(url: str, token: str | None) -> tuple[SafetensorsFile, ...]:
    index = Path(INDEX_NAME)
    wanted = indexed_names(_json(url, token), index)
    if len(wanted) > MAX_PARTS:
        raise FormatError(f"{url} names {len(wanted)} files; at most {MAX_PARTS} are read.")
    return tuple(
        keep_named(_safetensors(_beside(url, part), token), names, index)
        for part, names in wanted.items()
    )


def _with_config(
    url: str, parts: Sequence[SafetensorsFile], namings: Namings, token: str | None
) -> ModelHeader:
    config_url = _beside(url, "config.json")
    folders = _folders(url)
    name = folders[-2] if len(folders) > 1 and folders[-2] else config_url
    config = _json(config_url, token)
    return safetensors_header(config, Path("config.json"), parts, name, namings)


def _folders(url: str) -> list[str]:
    """Return the parts of a URL's path; the last one is the file's name."""
    try:
        return urllib.parse.unquote(urllib.parse.urlsplit(url).path).split("/")
    except ValueError as error:
        raise FormatError(f"{url} is not a URL: {error}.") from error


def _beside(url: str, name: str) -> str:
    """Return the URL of a file in the same folder; the query, if any, stays."""
    parts = urllib.parse.urlsplit(url)
    folder = parts.path.rsplit("/", 1)[0]
    return parts._replace(path=f"{folder}/{urllib.parse.quote(name)}").geturl()


def _json(url: str, token: str | None) -> dict[str, Any]:
    with _open(url, token, {}) as response:
        data = _read(response, url, MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise FormatError(f"{url} has more than the {MAX_CONFIG_BYTES} bytes that are read.")
    return parse_json(memoryview(data), Path(url.rsplit("/", 1)[-1]))


def _open(url: str, token: str | None, headers: dict[str, str]) -> Any:
    """Send a request; a token goes to the named host only, never along with a redirect."""
    plain = {"Accept-Encoding": "identity", "User-Agent": "headroom", **headers}
    try:
        request = urllib.request.Request(url, headers=plain)
        if request.type not in ("http", "https"):
            raise FormatError(f"{url} is not an http or https URL.")
        if token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        return urllib.request.urlopen(request, timeout=NETWORK_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        kind = MissingFileError if error.code == 404 else FormatError
        raise kind(f"{url}: the server answers {error.code} {error.reason}.") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise FormatError(
            f"Cannot reach {url}: {reason}.", hint="Check the address and the network."
        ) from error


def _read(response: Any, url: str, size: int) -> bytes:
    try:
        data = response.read(size)
    except (OSError, http.client.HTTPException) as error:
        raise FormatError(
            f"{url}: the connection broke off: {error}.", hint="Try again."
        ) from error
    assert isinstance(data, bytes)
    return data
