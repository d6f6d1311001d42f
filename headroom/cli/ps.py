"""`headroom ps`: the models that a running server holds in memory."""

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from headroom.cli.settings import with_settings
from headroom.errors import FormatError, HeadroomError
from headroom.options import Options
from headroom.units import gib

ANSWER_TIMEOUT_S = 10.0
MOST_ANSWER_BYTES = 1 << 22  # of an answer
ANYWHERE = ("0.0.0.0", "::", "")  # a server can listen on these, but no client can connect to them


@with_settings("program", log_level="warning")
def ps(
    options: Options,
    url: Annotated[
        str | None,
        typer.Option("--url", help="server to ask (default: by HEADROOM_HOST and HEADROOM_PORT)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Show the models that a running server holds: memory by device, context, idle time.

    The key of a guarded server is taken from HEADROOM_API_KEY or the config file.
    """
    host = "127.0.0.1" if options.host in ANYWHERE else options.host
    address = url or f"http://{f'[{host}]' if ':' in host else host}:{options.port}"
    models = ask_server(address.rstrip("/"), options.api_key)
    rows = [running_json(model) for model in models]
    if as_json:
        print(json.dumps({"version": 1, "url": address, "models": rows}))
        return
    if not rows:
        print(f"The server at {address} {idle_server(address.rstrip('/'))}.")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    table.add_column("memory", overflow="fold")
    for head in ("context", "idle"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        memory = ", ".join(f"{device} {gib(size)}" for device, size in row["memory"].items())
        context = f"{row['context']:,}" if row["context"] else "-"
        table.add_row(row["model"], memory or "-", context, idle_text(row["idle_s"]))
    Console(highlight=False).print(table)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered."""

    status: int
    table: dict[str, Any] | None  # None: no JSON object


def ask_server(address: str, key: str | None) -> list[dict[str, Any]]:
    """Return what a server says about its loaded models; the errors say what to try."""
    answer = _get(f"{address}/api/ps", address, key)
    if answer.status in (401, 403):
        raise HeadroomError(
            f"The server at {address} wants a key.", hint="Set HEADROOM_API_KEY to it."
        )
    if answer.status == 503:
        raise HeadroomError(
            f"The server at {address} takes no requests now.", hint="Try again later."
        )
    models = answer.table.get("models") if answer.status == 200 and answer.table else None
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise FormatError(
            f"What answers at {address} is not a headroom server.",
            hint="Name the address of one with --url http://HOST:PORT.",
        )
    return models


def idle_server(address: str) -> str:
    """Return what a server without a model in memory does: it waits, or loads its first one."""
    table = _get(f"{address}/health", address, None).table or {}
    share = table.get("progress")
    if table.get("status") == "loading" and isinstance(share, int | float):
        return f"is loading its first model: {100 * share:.0f} %"
    return "has no model in memory"


def _get(url: str, address: str, key: str | None) -> Answer:
    """Return the answer of a server at `address`; raise an error if none comes."""
    try:
        asked = urllib.request.Request(url)
        if key:
            asked.add_header("Authorization", f"Bearer {key}")
        with urllib.request.urlopen(asked, timeout=ANSWER_TIMEOUT_S) as answer:
            status, body = answer.status, answer.read(MOST_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read(MOST_ANSWER_BYTES)
    except urllib.error.URLError as error:
        raise _nobody(address, error.reason) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _nobody(address, error) from error
    try:
        table = json.loads(body)
    except ValueError:
        table = None
    return Answer(status, table if isinstance(table, dict) else None)


def _nobody(address: str, reason: object) -> HeadroomError:
    return HeadroomError(
        f"No server answers at {address} ({reason}).",
        hint="Start one with: headroom serve MODEL; or name another with --url http://HOST:PORT.",
    )


def running_json(model: dict[str, Any]) -> dict[str, Any]:
    """Return one loaded model as plain data; null where the server does not say it."""
    memory, idle = model.get("memory"), model.get("idle_s")
    return {
        "model": str(model.get("name", "-")).removesuffix(":latest"),
        "memory": memory if isinstance(memory, dict) else {},
        "context": model.get("context_length"),
        "idle_s": round(idle, 1) if isinstance(idle, int | float) else None,
    }


def idle_text(seconds: float | None) -> str:
    """Return how long a model has been idle, in the largest fitting unit."""
    if seconds is None:
        return "-"
    if seconds == 0:
        return "working"
    for size, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.0f} s"
