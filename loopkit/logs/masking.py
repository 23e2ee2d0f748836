"""Passwords and tokens, by the names of their options and by their place in a URL: no log shows them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SECRET = re.compile(
    r"password|passwd|passphrase|secret|credential|api[_-]?key|access[_-]?key|[_-]key$|token$|signature$|bearer$"
    r"|(?:^|[._-])(?:pwd|pass|pw|auth|authorization)$",
    re.IGNORECASE,
)
"""Names of options that hold one."""
SHORT = "-p"
"""The option of commands that take a password by a single letter."""
MASK = "***"

IN_URL = re.compile(r"([a-z][a-z0-9+.-]{0,20}://[^\s\"'/?#@:]{0,500}):(?!\d{1,5}[/?#])[^\s\"']{0,500}@", re.IGNORECASE)
"""``scheme://user:password@``; a port, and what a path has behind it, is none. Bounded, as all texts go through it."""
ALONE_IN_URL = re.compile(r"(https?://)[^\s\"'/?#@:]{1,500}@", re.IGNORECASE)
"""``https://token@``."""
IN_QUERY = re.compile(r"(?<=[?&])([^\s\"'?&=#]{1,100})=[^\s\"'&#]+")


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, without the values of such options.

    >>> masked_arguments(["train.py", "--hf-token", "abc", "--set", "logger.api_key=abc", "-p", "abc", "--lr=0.1"])
    ['train.py', '--hf-token', '***', '--set', 'logger.api_key=***', '-p', '***', '--lr=0.1']
    """
    found: list[str] = []
    follows = False
    for argument in arguments:
        parts = argument.split("=")
        at = next((i for i, part in enumerate(parts) if SECRET.search(part) or part == SHORT), len(parts))
        is_option = argument.startswith("-")
        if follows and not is_option:
            found.append(MASK)
        else:
            found.append(masked_text(argument if at >= len(parts) - 1 else "=".join([*parts[: at + 1], MASK])))
        follows = is_option and at == 0 and len(parts) == 1
    return found


def masked_text(text: str) -> str:
    """A text without the passwords in its URLs.

    >>> masked_text("no answer from postgres://me:abc@db:5432/runs?sslkey=a&password=abc")
    'no answer from postgres://me:***@db:5432/runs?sslkey=a&password=***'
    """
    if "://" not in text:
        return text
    text = ALONE_IN_URL.sub(rf"\1{MASK}@", IN_URL.sub(rf"\1:{MASK}@", text))
    return IN_QUERY.sub(lambda found: f"{found[1]}={MASK}" if SECRET.search(found[1]) else found[0], text)


def masked_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, with secret options masked, also in tables and lists.

    >>> masked_values({"password": "abc", "url": "https://me:abc@host", "lr": 0.1})
    {'password': '***', 'url': 'https://me:***@host', 'lr': 0.1}
    """
    return {name: MASK if _is_secret(name, value) else _masked(value) for name, value in values.items()}


def masked_config(text: str) -> str:
    """A configuration as TOML, without the values of such keys; the text itself if it has none."""
    import tomllib

    try:
        values = tomllib.loads(text)
    except ValueError:
        return text
    masked = masked_values(values)
    if masked == values:
        return text
    import tomli_w

    return tomli_w.dumps(masked)


def _is_secret(name: Any, value: Any) -> bool:
    if value is None or isinstance(value, bool) or SECRET.search(str(name)) is None:
        return False
    return not (isinstance(value, Mapping) and str(name).lower().endswith("auth"))  # whose parts say what they are


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return masked_text(value)
    if isinstance(value, Mapping):
        return masked_values(value)
    return [_masked(each) for each in value] if isinstance(value, list) else value
