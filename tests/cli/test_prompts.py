"""Files of prompts: lines or JSON lines; anything else is refused with its line."""

from pathlib import Path

import pytest

from headroom.cli.prompts import HINT, read_prompts
from headroom.errors import OptionError


def test_a_text_has_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("Erste Zeile\r\n\n  zweite: ü\n".encode())
    found = read_prompts(path)
    assert [(x.line, x.text) for x in found] == [(1, "Erste Zeile"), (3, "  zweite: ü")]
    assert found[0].messages == [{"role": "user", "content": "Erste Zeile"}]


def test_json_lines_have_prompts_and_conversations(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "two\\nlines"}\n\n'
        '{"messages": [{"role": "system", "content": "be brief"}, '
        '{"role": "user", "content": "hi"}]}\n'
    )
    first, second = read_prompts(path)
    assert (first.line, first.text) == (1, "two\nlines")
    assert (second.line, second.text) == (3, None)
    assert [message["role"] for message in second.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "{path} holds no prompts."),
        (b" \n\n", "{path} holds no prompts."),
        (b"a\xff", "{path} is not UTF-8 text: invalid start byte at byte 1."),
        (b'{"prompt": "a"}\nb\n', "{path}, line 2: not JSON: "),
        (b'{"text": "a"}', '{path}, line 1: neither a "prompt" nor "messages" that can be used.'),
        (b'{"prompt": 5}', "{path}, line 1: neither a"),
        (b'{"prompt": ""}', "{path}, line 1: neither a"),
        (b'{"prompt": "a"}\n[]', "{path}, line 2: neither a"),
        (b'{"messages": []}', "{path}, line 1: neither a"),
        (b'{"messages": [{"role": "user"}]}', "{path}, line 1: neither a"),
        (b'{"messages": ["hi"]}', "{path}, line 1: neither a"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "p"
    path.write_bytes(content)
    with pytest.raises(OptionError) as refused:
        read_prompts(path)
    assert str(refused.value).startswith(text.format(path=path))
    assert str(refused.value).endswith(HINT)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"Cannot read .*none: No such file or directory"):
        read_prompts(tmp_path / "none")
