"""Files that are attached to a message: what is refused, and how they stand there."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.cli.attachments import MOST_ATTACHED_BYTES, Attachment, read_attachments
from headroom.errors import OptionError


def test_a_file_stands_in_a_block_of_code_under_its_path(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_bytes(b"\xef\xbb\xbfx = 'caf\xc3\xa9'\n\n")  # with a byte order mark
    assert read_attachments([file])[0].framed() == f"{file}:\n```py\nx = 'café'\n```"


@given(st.text(st.sampled_from("`~ a\n"), max_size=60))
def test_a_file_cannot_close_its_own_block(text: str) -> None:
    first, fence, *body, last = Attachment(Path("a"), text).framed().split("\n")
    assert (first, last) == ("a:", fence)
    assert set(fence) == {"`"}
    assert not any(line.strip().startswith(fence) for line in body)
    assert "\n".join(body) == text.rstrip()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"PNG\0\1", "is not text: it has a zero byte at 3. Only text files can be attached."),
        (b"caf\xe9 au lait", "is not UTF-8 text: invalid continuation byte at byte 3."),
        (
            b"x" * (MOST_ATTACHED_BYTES + 1),
            "has 16.0 MiB; at most 16.0 MiB can be attached. Attach a part",
        ),
    ],
    ids=["binary", "latin-1", "large"],
)
def test_a_file_that_is_no_text_or_too_large_is_refused(
    content: bytes, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(OptionError) as refused:
        read_attachments([file])
    assert str(refused.value).startswith(f"{file} {told}")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path, code in ((tmp_path / "none", 2), (tmp_path, 21)):
        with pytest.raises(OptionError, match=f"Cannot read {path}: {os.strerror(code)}"):
            read_attachments([path])
    with pytest.raises(OptionError, match="Cannot read ~nobody-of-this-name/x"):
        read_attachments([Path("~nobody-of-this-name/x")])


def test_what_another_program_writes_can_be_attached() -> None:
    reader, writer = os.pipe()  # as a shell gives it for <(command)
    os.write(writer, b"from a pipe\n")
    os.close(writer)
    assert read_attachments([Path(f"/dev/fd/{reader}")])[0].text == "from a pipe\n"
    os.close(reader)
