"""Passwords and tokens, by the names of their options: no log shows them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import Any

__all__ = ["SECRET", "masked_arguments", "masked_config"]

SECRET = re.compile("password|passwd|secret|token$|credential|api[_-]?key|[_-]key$", re.IGNORECASE)
"""Names of options that hold one."""
MASK = "***"


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command, without the values of such options.

    >>> masked_arguments(["train.py", "--hf-token", "abc", "--set", "logger.api_key=abc", "--lr=0.1"])
    ['train.py', '--hf-token', '***', '--set', 'logger.api_key=***', '--lr=0.1']
    """
    found: list[str] = []
    follows = False
    for argument in arguments:
        parts = argument.split("=")
        at = next((i for i, part in enumerate(parts) if SECRET.search(part)), len(parts))
        is_option = argument.startswith("-")
        if follows and not is_option:
            found.append(MASK)
        else:
            found.append(argument if at >= len(parts) - 1 else "=".join([*parts[: at + 1], MASK]))
        follows = is_option and at == 0 and len(parts) == 1
    return found


def masked_config(text: str) -> str:
    """A configuration as TOML, without the values of such keys; the text itself if it has none."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return text
    masked = _masked(values)
    if masked == values:
        return text
    import tomli_w

    return tomli_w.dumps(masked)


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: MASK if SECRET.search(key) else _masked(each) for key, each in value.items()}
    return [_masked(each) for each in value] if isinstance(value, list) else value
