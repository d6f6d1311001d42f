"""The settings of clients as docs/clients.md gives them: what users copy is what is tested."""

import re
from pathlib import Path

from tests.clients.conftest import Running

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"


def documented(heading: str, running: Running, model: str) -> str:
    """Return the first block of a section, with this server's address, key and model."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"^```\w+\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found, f"{PAGE.name} has no block for {heading}"
    text = found[1]
    assert "http://127.0.0.1:8080" in text
    assert "local" in text
    text = text.replace("http://127.0.0.1:8080", running.address).replace("none", running.key)
    return re.sub(r"\blocal\b", model, text)
