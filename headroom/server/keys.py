"""API keys: who may use the server, and how many requests and tokens each key has per minute."""

import hmac
import math
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request

from headroom.errors import OptionError
from headroom.options import Options
from headroom.server.refusals import RefusalError

MINUTE_S = 60.0
DEFAULT_NAME = "default"  # of the key that --api-key gives
KEY_LIMITS = ("requests_per_minute", "tokens_per_minute")

Clock = Callable[[], float]  # seconds, from any start


class Allowance:
    """An amount that grows by `per_minute` every minute, and never beyond that."""

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._filled_at = clock()

    def wait_s(self) -> float:
        """Return the seconds until there is one whole unit."""
        self._fill()
        return max(0.0, (1.0 - self._left) * MINUTE_S / self._per_minute)

    def spend(self, amount: int) -> None:
        """Subtract an amount, even if less is left; then `wait_s` grows."""
        self._fill()
        self._left -= amount

    def _fill(self) -> None:
        now = self._clock()
        grown = (now - self._filled_at) * self._per_minute / MINUTE_S
        self._left = min(float(self._per_minute), self._left + grown)
        self._filled_at = now


class ApiKey:
    """One client's key."""

    def __init__(
        self,
        name: str,
        key: str,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = name
        self._key = key.encode()
        self._requests = Allowance(requests_per_minute, clock) if requests_per_minute else None
        self._tokens = Allowance(tokens_per_minute, clock) if tokens_per_minute else None

    def matches(self, sent: bytes) -> bool:
        """Return whether a client sent this key; the time taken reveals nothing about it."""
        return hmac.compare_digest(sent, self._key)

    def take_request(self) -> None:
        """Count a request, or refuse it if a limit of the key is reached."""
        for allowance, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            if allowance is not None and (wait_s := allowance.wait_s()) > 0:
                raise RefusalError(
                    429,
                    "rate_limit_exceeded",
                    f"The key {self.name!r} has used up its {what} of this minute.",
                    hint=f"Try again in {math.ceil(wait_s)} s.",
                    retry_after_s=math.ceil(wait_s),
                )
        if self._requests is not None:
            self._requests.spend(1)

    def spend_tokens(self, count: int) -> None:
        """Count the tokens of a request that has ended."""
        if self._tokens is not None:
            self._tokens.spend(count)


class KeyRing:
    """All keys of a server; without keys, everybody may use it."""

    def __init__(self, options: Options) -> None:
        self._keys: list[ApiKey] = []
        if options.api_key is not None:
            _check_key(options.api_key, "--api-key", "api_key")
            self._keys.append(ApiKey(DEFAULT_NAME, options.api_key))
        if options.api_keys is not None:
            self._keys += _read_keys(Path(options.api_keys))

    def find(self, request: Request) -> ApiKey | None:
        """Return the key that a client sent; None if the server has no keys; refuse a wrong key."""
        if not self._keys:
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        sent = [given] if scheme.lower() == "bearer" else []
        if "x-api-key" in request.headers:  # as Anthropic's clients send it
            sent.append(request.headers["x-api-key"])
        # Starlette decodes headers as Latin-1; encoding them again gives the bytes that were sent.
        as_sent = [text.strip().encode("latin-1") for text in sent]
        found = [key for key in self._keys if any(key.matches(each) for each in as_sent)]
        if found:
            return found[0]
        what = "The API key is wrong." if any(as_sent) else "This server requires an API key."
        hint = "Send `Authorization: Bearer KEY` or `x-api-key: KEY`."
        raise RefusalError(401, "invalid_api_key", what, hint=hint)


def _read_keys(path: Path) -> list[ApiKey]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise _wrong_file(f"Cannot read the file of keys {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _wrong_file(f"{path} is not a TOML file: {error}.") from error
    keys = [_parse_key(path, name, entry) for name, entry in table.items()]
    texts = [entry["key"] for entry in table.values()]
    if not keys:
        raise _wrong_file(f"{path} has no keys.")
    if len(set(texts)) < len(texts):
        raise _wrong_file(f"{path} has the same key twice.")
    return keys


def _parse_key(path: Path, name: str, entry: Any) -> ApiKey:
    if not isinstance(entry, dict) or not isinstance(entry.get("key"), str):
        raise _wrong_file(f"{path}: {name} has no `key`.")
    _check_key(entry["key"], f"{path}: the key of {name}", "api_keys")
    for setting, value in entry.items():
        if setting not in ("key", *KEY_LIMITS):
            known = ", ".join(("key", *KEY_LIMITS))
            raise _wrong_file(
                f"{path}: {name} has the unknown setting {setting!r}; known: {known}."
            )
        if setting in KEY_LIMITS and (type(value) is not int or value < 1):
            raise _wrong_file(f"{path}: {setting} of {name} is {value!r}, not a number above 0.")
    return ApiKey(name, **entry)


def _check_key(key: str, what: str, param: str) -> None:
    if not key.strip():
        raise OptionError(
            f"{what} is empty, so that anybody could use the server.",
            hint="Give a key, or leave the setting (HEADROOM_API_KEY, too) out.",
            param=param,
        )
    if key != key.strip():
        raise OptionError(f"{what} begins or ends with a blank.", param=param)


def _wrong_file(message: str) -> OptionError:
    hint = "docs/api.md shows how such a file is written."
    return OptionError(message, hint=hint, param="api_keys")
