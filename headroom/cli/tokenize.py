"""`headroom tokenize`: show the tokens of a text."""

import json
from dataclasses import replace
from typing import Annotated

import typer

from headroom.cli.completion import first_model_name
from headroom.cli.loading import ready_model
from headroom.cli.run import read_words
from headroom.cli.settings import with_settings
from headroom.families.files import open_checkpoint
from headroom.formats.aliases import with_aliases
from headroom.options import Options
from headroom.text.tokenizer import Tokenizer


@with_settings("program", log_level="warning")
def tokenize(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] TEXT",
            help="one word: the text, for the default model; two: the model and the text; "
            "a text of - is read from standard input",
            show_default=False,
            autocompletion=first_model_name,
        ),
    ],
    options: Options,
    no_special: Annotated[
        bool, typer.Option("--no-special", help="read special tokens as plain text")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show the tokens of a text, one per line: id, then text."""
    asked = read_words(words, "")
    model, text = asked.model, asked.prompt
    options = with_aliases(replace(options, model=model or options.model))
    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(ready_model(options)))
    ids = tokenizer.encode(text, special=not no_special)
    pieces = [tokenizer.token_text(token_id) for token_id in ids]
    if as_json:
        print(json.dumps({"ids": ids, "pieces": pieces}))
        return
    for token_id, piece in zip(ids, pieces, strict=True):
        print(f"{token_id:>8}  {piece!r}")
