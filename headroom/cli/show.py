"""`headroom show`: what a model's files say about it."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headroom.cli.abilities import ability_facts, ability_texts
from headroom.cli.loading import ready_model
from headroom.cli.progress import progress_bar
from headroom.cli.settings import with_settings
from headroom.options import Options
from headroom.units import MIB, gib

HASHED_BYTES = 4 * MIB  # read and hashed at a time


@with_settings("model", "program", log_level="warning")
def show(
    options: Options,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    digest: Annotated[
        bool, typer.Option("--digest", help="read the weights whole and compute their SHA-256")
    ] = False,
) -> None:
    """Show what a model is: its family, size, types, context, sampling, abilities and files."""
    facts = describe_model(ready_model(options), options.home_path, read_whole=digest)
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("what", style="bold", no_wrap=True)
    table.add_column("value", overflow="fold")
    for name, text in fact_texts(facts).items():
        table.add_row(name, text)
    Console(highlight=False).print(table)


def describe_model(path: Path, home: Path, *, read_whole: bool) -> dict[str, Any]:
    """Return what a model's files say, as plain data; null where they do not say it."""
    # Readers of files import numpy, and abilities jinja2; --help must not wait for them.
    from headroom.families.files import open_checkpoint
    from headroom.families.registry import FAMILIES, read_dims
    from headroom.formats.facts import model_facts
    from headroom.formats.pulled import recorded_sha256, stored_file
    from headroom.text.abilities import Abilities
    from headroom.text.fill_in import find_fill_in

    checkpoint = open_checkpoint(path)
    facts, abilities = model_facts(checkpoint), Abilities.of(checkpoint)
    files = [file for file in sorted(checkpoint.files) if file.is_file()]
    weights = [file for file in files if file.suffix in (".gguf", ".safetensors")] or [facts.path]
    if read_whole:
        digests = file_digests(weights)
    else:
        recorded = {file.name: recorded_sha256(file, home) for file in weights}
        digests = {name: found for name, found in recorded.items() if found is not None}
    fills = find_fill_in(checkpoint, abilities.tokenizer) is not None
    dims = read_dims(checkpoint.header) if checkpoint.architecture in FAMILIES else None
    return {
        "version": 1,
        "name": checkpoint.header.name,
        "title": facts.title or None,
        "format": facts.format,
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "active_parameters": facts.active_parameters,
        "quantisation": facts.quant,
        "types": dict(facts.types),
        "context": facts.trained_context or None,
        **ability_facts(checkpoint, abilities),
        "fills_in": fills,
        "prediction_head": dims is not None and dims.mtp,
        "prediction_head_refused": (dims.mtp_refused or None) if dims is not None else None,
        "licence": facts.licence or None,
        "path": str(facts.path),
        "size_bytes": stored_file(facts.path).size_bytes,
        "identity": facts.identity,
        "sha256": digests,
        "sha256_source": ("computed" if read_whole else "recorded by pull") if digests else None,
    }


def head_text(facts: dict[str, Any]) -> str:
    """Return whether a file has a prediction head (MTP), or why it does not run."""
    if refused := facts["prediction_head_refused"]:
        return f"not used: {refused}"
    return "yes, for --draft mtp" if facts["prediction_head"] else "no"


def file_digests(files: list[Path]) -> dict[str, str]:
    """Return the SHA-256 of each file by its name."""
    total, done, found = sum(file.stat().st_size for file in files), 0, {}
    with progress_bar("reading") as progress:
        for file in files:
            digest = hashlib.sha256()
            with file.open("rb") as opened:
                while chunk := opened.read(HASHED_BYTES):
                    digest.update(chunk)
                    done += len(chunk)
                    progress(done, total)
            found[file.name] = digest.hexdigest()
    return found


def fact_texts(facts: dict[str, Any]) -> dict[str, str]:
    """Return what people read, in the order in which they read it."""
    sizes = facts["types"]
    total = sum(sizes.values()) or 1
    types = ", ".join(f"{name} {100 * size / total:.0f} %" for name, size in sizes.items())
    parameters = counted_parameters(facts["parameters"])
    if facts["active_parameters"] < facts["parameters"]:
        parameters += f", of which a token uses {counted_parameters(facts['active_parameters'])}"
    texts = {
        "name": facts["name"],
        "title": facts["title"] or "-",
        "architecture": f"{facts['architecture']}, {facts['format']}",
        "parameters": parameters,
        "quantisation": f"{facts['quantisation']} ({types})",
        "context": f"{facts['context']:,} tokens" if facts["context"] else "-",
        **ability_texts(facts),
        "fills in": "yes" if facts["fills_in"] else "no",
        "MTP head": head_text(facts),
        "licence": facts["licence"] or "the files do not say",
        "file": facts["path"],
        "size": gib(facts["size_bytes"]),
        "identity": f"{facts['identity']} (of headers and samples of weights)",
    }
    for index, (file, digest) in enumerate(facts["sha256"].items()):
        name = "sha256" if not index else f"sha256 ({index + 1})"
        texts[name] = f"{digest} ({facts['sha256_source']}), {file}"
    if not facts["sha256"]:
        texts["sha256"] = "not recorded; --digest computes it"
    return texts


def counted_parameters(number: int) -> str:
    """Return a number of parameters as people say it: 134.5 million."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.4g} {word}"
    return f"{number:,}"
