"""Headers over HTTP, against a local server that counts the bytes it sends."""

import json
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from headroom.errors import FormatError
from headroom.families.files import open_header
from headroom.families.registry import NAMINGS
from headroom.formats import remote
from headroom.formats.remote import MissingFileError, read_hub, read_remote
from tests.formats.test_gguf import part, write_parts
from tests.tiny import llama_config, random_model, save_gguf, save_safetensors


@dataclass
class Served:
    """A folder on a server, what was asked of it, and how it should misbehave."""

    folder: Path
    url: str = ""
    sent_bytes: int = 0
    ranges: list[str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    mode: str = "plain"  # or "whole", "short", "wrong", "redirect", "growing"


class Handler(BaseHTTPRequestHandler):
    served: Served

    def do_GET(self) -> None:
        served = self.served
        served.tokens.append(self.headers.get("Authorization"))
        if served.mode == "redirect" and not self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", f"{served.url}/moved{self.path}")
            self.end_headers()
            return
        path = served.folder / self.path.removeprefix("/moved").lstrip("/").partition("?")[0]
        if not path.is_file():
            self.send_error(404)
            return
        self._send(path.read_bytes())

    def _send(self, data: bytes) -> None:
        served, wanted = self.served, self.headers.get("Range")
        if wanted is None or served.mode == "whole":
            self.send_response(200)
            body = data
        else:
            served.ranges.append(wanted)
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
            assert found is not None
            first, last = int(found[1]), min(int(found[2]), len(data) - 1)
            body = data[first : last + 1]
            total = len(data) + (len(served.ranges) if served.mode == "growing" else 0)
            shown = first + 1 if served.mode == "wrong" else first
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {shown}-{last}/{total}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if served.mode == "short":
            body = body[: len(body) // 2]
            self.close_connection = True
        served.sent_bytes += len(body)  # before: the client may be done before this thread
        with suppress(BrokenPipeError, ConnectionResetError):  # a client that has seen enough
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    folder = tmp_path / "served"
    folder.mkdir()
    state = Served(folder)
    handler = type("Bound", (Handler,), {"served": state})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield state
        server.shutdown()
        thread.join()


def small_gguf(served: Served, name: str = "m.gguf") -> Path:
    return save_gguf(random_model(llama_config()), served.folder / name)


def test_only_the_header_of_a_large_file_travels(served: Served, smollm2_path: Path) -> None:
    (served.folder / "smollm2.gguf").symlink_to(smollm2_path)
    found, local = read_remote(f"{served.url}/smollm2.gguf", NAMINGS), open_header(smollm2_path)
    assert (found.architecture, found.name) == (local.architecture, "smollm2")
    assert found.tensors == {
        key: type(info)(
            info.name, info.shape, info.quant, Path("smollm2.gguf"), info.offset, info.source
        )
        for key, info in local.tensors.items()
    }
    assert dict(found.metadata.values)["block_count"] == 30
    # The header has 1.8 MB: one request of 1 MiB and one of as much again, of 98 MB.
    assert served.sent_bytes == 2 << 20
    assert served.ranges == ["bytes=0-1048575", "bytes=1048576-2097151"]


def test_weights_of_a_remote_file_cannot_be_used(served: Served, smollm2_path: Path) -> None:
    (served.folder / "smollm2.gguf").symlink_to(smollm2_path)
    found = read_remote(f"{served.url}/smollm2.gguf", NAMINGS)
    with pytest.raises(FormatError, match=r"Only the header of smollm2.gguf was read, not"):
        found.tensors["layers.29.ffn.down"].data()


def test_a_header_grows_request_by_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_BYTES", 100)
    path = small_gguf(served)
    found = read_remote(f"{served.url}/m.gguf", NAMINGS)
    assert found.tensors.keys() == open_header(path).tensors.keys()
    assert 5 <= len(served.ranges) <= 12
    assert served.sent_bytes < 64 << 10


def test_safetensors_send_their_header_and_settings(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_BYTES", 64)
    folder = save_safetensors(random_model(llama_config()), served.folder / "tiny")
    found = read_remote(f"{served.url}/tiny/model.safetensors", NAMINGS)
    assert found.tensors.keys() == open_header(folder).tensors.keys()
    assert (found.name, found.architecture) == ("tiny", "llama")
    assert served.sent_bytes < (folder / "model.safetensors").stat().st_size // 2


def test_an_index_sends_the_header_of_each_part(served: Served) -> None:
    model = random_model(llama_config())
    model.save_pretrained(served.folder / "parts", max_shard_size="100KB")
    found = read_remote(f"{served.url}/parts/model.safetensors.index.json", NAMINGS)
    assert found.tensors.keys() == open_header(served.folder / "parts").tensors.keys()
    assert len(served.ranges) == len(list((served.folder / "parts").glob("*.safetensors"))) > 1


def test_a_config_alone_is_enough_and_a_query_is_kept(served: Served) -> None:
    save_safetensors(random_model(llama_config()), served.folder / "tiny")
    found = read_remote(f"{served.url}/tiny/config.json?download=true", NAMINGS)
    assert (found.tensors, found.metadata.get_int("block_count")) == ({}, 3)


def test_a_server_without_ranges_is_refused(served: Served) -> None:
    small_gguf(served)
    served.mode = "whole"
    with pytest.raises(
        FormatError, match=r"answers range requests with the whole file \(status 200"
    ):
        read_remote(f"{served.url}/m.gguf", NAMINGS)


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("short", "asked for .* bytes and got|the connection broke off"),
        ("wrong", "asked for bytes 0 to 1048575, the server sent bytes 1-"),
    ],
)
def test_a_server_that_sends_something_else_is_refused(
    mode: str, told: str, served: Served
) -> None:
    small_gguf(served)
    served.mode = mode
    with pytest.raises(FormatError, match=told):
        read_remote(f"{served.url}/m.gguf", NAMINGS)


def test_a_file_that_changes_meanwhile_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_BYTES", 100)
    small_gguf(served)
    served.mode = "growing"
    with pytest.raises(FormatError, match="changed while it was read"):
        read_remote(f"{served.url}/m.gguf", NAMINGS)


def test_a_truncated_file_is_refused(served: Served) -> None:
    path = small_gguf(served)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(FormatError, match=r"outside the file|left in the file|bytes that follow"):
        read_remote(f"{served.url}/m.gguf", NAMINGS)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 1), "the number of tensors is 1099511627776"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 50), "the name of key 0 takes"),
        (b"NOPE" + bytes(60), "m.gguf is not a GGUF file"),
    ],
)
def test_a_lying_header_costs_one_request(header: bytes, told: str, served: Served) -> None:
    (served.folder / "m.gguf").write_bytes(header + bytes(4 << 20))
    with pytest.raises(FormatError, match=told):
        read_remote(f"{served.url}/m.gguf", NAMINGS)
    assert served.sent_bytes == 1 << 20


def test_a_huge_header_is_not_read_to_its_end(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_REMOTE_BYTES", 2 << 20)
    # One key whose text fills the file: 3 MiB, more than is read.
    text = struct.pack("<Q", 3) + b"key" + struct.pack("<IQ", 8, 3 << 20) + bytes(3 << 20)
    (served.folder / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text)
    with pytest.raises(FormatError, match="at most 2097152 are read"):
        read_remote(f"{served.url}/m.gguf", NAMINGS)
    assert served.sent_bytes == 1 << 20


def test_a_split_file_reads_the_header_of_each_part(served: Served) -> None:
    write_parts(served.folder, [part(0, 3, [], 3), part(1, 3, ["a", "b"]), part(2, 3, ["c"])])
    found = read_remote(f"{served.url}/model-00001-of-00003.gguf", NAMINGS)
    assert set(found.tensors) == {"a", "b", "c"}
    with pytest.raises(FormatError, match=r"not the first of 3 parts\. Give model-00001-of-00003"):
        read_remote(f"{served.url}/model-00002-of-00003.gguf", NAMINGS)
    (served.folder / "model-00003-of-00003.gguf").unlink()
    with pytest.raises(
        MissingFileError, match=r"model-00003-of-00003.gguf: the server answers 404"
    ):
        read_remote(f"{served.url}/model-00001-of-00003.gguf", NAMINGS)


def test_a_file_that_is_not_there_is_told_apart(served: Served) -> None:
    with pytest.raises(MissingFileError, match="the server answers 404"):
        read_remote(f"{served.url}/missing.gguf", NAMINGS)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:1/m.gguf", "Cannot reach"),
        ("http://127.0.0.1:1/m.zip", "does not name a model file"),
        ("file:///etc/m.gguf", "is not an http or https URL"),
        ("http://[broken/m.gguf", "is not a URL"),
    ],
)
def test_a_wrong_address_is_one_clear_error(url: str, told: str) -> None:
    with pytest.raises(FormatError, match=told):
        read_remote(url, NAMINGS)


@pytest.fixture
def hub(served: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    def url(repo: str, file: str) -> str:
        return f"{served.url}/{repo}/{file}"

    monkeypatch.setattr(huggingface_hub, "hf_hub_url", url)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "secret")
    return served


def test_a_hub_name_reads_a_repository_or_one_file(hub: Served) -> None:
    (hub.folder / "org").mkdir()
    save_safetensors(random_model(llama_config()), hub.folder / "org" / "repo")
    small_gguf(hub, "org/repo/m.gguf")
    assert read_hub("org/repo", None, NAMINGS).name == "org/repo"
    assert read_hub("org/repo", "m.gguf", NAMINGS).name == "m"
    with pytest.raises(MissingFileError, match="The repository org/none holds no safetensors"):
        read_hub("org/none", None, NAMINGS)


def test_a_token_is_not_sent_along_with_a_redirect(hub: Served) -> None:
    (hub.folder / "org" / "repo").mkdir(parents=True)
    small_gguf(hub, "org/repo/m.gguf")
    hub.mode = "redirect"
    assert read_hub("org/repo", "m.gguf", NAMINGS).architecture == "llama"
    assert hub.tokens == ["Bearer secret", None]


def test_an_index_cannot_name_files_elsewhere(served: Served) -> None:
    (served.folder / "config.json").write_text("{}")
    index = {"weight_map": {"a": "../secret.safetensors"}}
    (served.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="is not a file name"):
        read_remote(f"{served.url}/model.safetensors.index.json", NAMINGS)
