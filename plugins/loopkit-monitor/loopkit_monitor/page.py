"""The page as one file with its data (from `loopkit_monitor.views`), scripts and styles."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopkit_monitor.views import encode

__all__ = ["MODULES", "embed"]

STATIC = Path(__file__).parent / "static"
MODULES = (
    "dom.js",
    "source.js",
    "data.js",
    "filter.js",
    "state.js",
    "markdown.js",
    "export.js",
    "plot.js",
    "chart.js",
    "views.js",
    "compare.js",
    "workspace.js",
    "app.js",
)
"""The page's scripts; each imports only from those before it, and no name is declared by two."""
IMPORT = re.compile(r'^import \{[^}]*\} from "\./[a-z]+\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?function|class|const)", re.MULTILINE)
TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>loopkit report</title>
<link rel="icon" href="data:,">
{styles}
</head>
<body>
<noscript>This report needs JavaScript. All of it is in this file.</noscript>
<div id="app"></div>
<script type="application/json" id="loopkit-data">{data}</script>
{scripts}
</body>
</html>
"""


def embed(data: Mapping[str, Any]) -> bytes:
    """The whole page, with its data in it. It opens from a disk, without requests.

    Args:
        data: ``runs``: the result of `views.runs`. By a run's id: ``details``: the result of `views.run`; ``series``:
            its ``"series"`` of `views.series`, for all names; ``media``: the result of `views.media`, by name;
            ``files``: by the path in the log, a ``data:`` URL.

    Example::

        data = {"runs": views.runs(store), "details": {"a": views.run(store, "a")}, "series": {"a": {}}}
        Path("report.html").write_bytes(embed(data))
    """
    own = "".join(EXPORT.sub("", IMPORT.sub("", _text(name))) for name in MODULES)
    style = _text("app.css")
    policy = (
        f"default-src 'none'; script-src {_hash(own)}; style-src {_hash(style)}; "
        f"img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    )
    page = TEMPLATE.format(
        policy=policy,
        styles=f"<style>{style}</style>",
        scripts=f'<script type="module">{own}</script>',
        data=encode(data).decode("ascii"),
    )
    return page.encode()


def _text(name: str) -> str:
    """A file of the page, with line ends as a browser counts them."""
    text = (STATIC / name).read_text("utf-8").replace("\r\n", "\n")
    if "</script" in text or "<!--" in text:
        raise ValueError(f"{name} cannot stand in a page: it holds </script or <!--")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
