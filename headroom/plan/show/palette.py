"""How each line of a plan looks: its letter in the terminal's map, its colours, its short name."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LineLook:
    """How one kind of line is drawn; the same in every plan."""

    letter: str  # in the terminal's map; no two lines share one
    terminal: str  # a colour of rich
    fill: str  # in pictures; readable on white and on black
    title: str  # in pictures


FREE_LETTER = "."
OTHER_LETTERS = "bij"  # for lines without a look of their own
LOOKS = {
    "core_weights": LineLook("w", "blue", "#3b6fb5", "core weights"),
    "head": LineLook("o", "bright_blue", "#6f97d6", "head"),
    "embeddings": LineLook("e", "bright_blue", "#93b5e6", "embeddings"),
    "hot_experts": LineLook("h", "cyan", "#1f8f84", "hot experts"),
    "cold_experts": LineLook("c", "bright_cyan", "#7cc8bd", "cold experts"),
    "expert_staging": LineLook("x", "bright_yellow", "#d9a53a", "expert staging"),
    "expert_spare": LineLook("p", "bright_yellow", "#e3bd6b", "expert spare"),
    "kv": LineLook("k", "green", "#58a33c", "KV cache"),
    "recurrent_state": LineLook("s", "bright_green", "#8cc870", "recurrent state"),
    "snapshots": LineLook("n", "bright_green", "#b0d69d", "snapshots"),
    "host_pages": LineLook("z", "bright_green", "#c9e3bb", "pages in host memory"),
    "staging": LineLook("t", "yellow", "#c98a2b", "staging"),
    "workspace": LineLook("a", "bright_yellow", "#e2703a", "workspace"),
    "verify_scratch": LineLook("v", "yellow", "#b86b1f", "verify scratch"),
    "logits": LineLook("l", "yellow", "#ec9a6e", "logits"),
    "draft_weights": LineLook("d", "magenta", "#8a56ac", "draft weights"),
    "draft_kv": LineLook("y", "bright_magenta", "#b183c9", "draft KV cache"),
    "draft_state": LineLook("q", "magenta", "#9d6fc0", "draft state"),
    "features": LineLook("m", "bright_magenta", "#e0c9ec", "features"),
    "graphs": LineLook("g", "white", "#7f8794", "graphs"),
    "runtime": LineLook("r", "white", "#9aa1ac", "runtime"),
    "reserve": LineLook("u", "bright_black", "#bcc2cb", "reserve"),
}


def line_looks(names: list[str]) -> dict[str, LineLook]:
    """Return the look of every name; a line without one of its own gets a letter that is left."""
    others = [name for name in dict.fromkeys(names) if name not in LOOKS]
    assert len(others) <= len(OTHER_LETTERS)
    extra = {
        name: LineLook(letter, "", "#000000", name.replace("_", " "))
        for name, letter in zip(others, OTHER_LETTERS, strict=False)
    }
    return {name: LOOKS.get(name) or extra[name] for name in names}
