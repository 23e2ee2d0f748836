"""Logging: what is logged (kinds, `Record`), and where it goes (`Backend`). It imports the ground alone."""

from typing import TYPE_CHECKING

from loopkit.lazy import lazily

if TYPE_CHECKING:
    from loopkit.logs.backend import Backend, Run
    from loopkit.logs.csv_file import Csv
    from loopkit.logs.json_lines import JsonLines
    from loopkit.logs.kinds import (
        Audio,
        Figure,
        File,
        Graph,
        Histogram,
        Hyperparameters,
        Image,
        Kind,
        Table,
        Text,
        Value,
    )
    from loopkit.logs.reading import Log, read_log
    from loopkit.logs.record import Record, Records

HOMES = {
    "Audio": "loopkit.logs.kinds",
    "Backend": "loopkit.logs.backend",
    "Csv": "loopkit.logs.csv_file",
    "Figure": "loopkit.logs.kinds",
    "File": "loopkit.logs.kinds",
    "Graph": "loopkit.logs.kinds",
    "Histogram": "loopkit.logs.kinds",
    "Hyperparameters": "loopkit.logs.kinds",
    "Image": "loopkit.logs.kinds",
    "JsonLines": "loopkit.logs.json_lines",
    "Kind": "loopkit.logs.kinds",
    "Log": "loopkit.logs.reading",
    "Record": "loopkit.logs.record",
    "Records": "loopkit.logs.record",
    "Run": "loopkit.logs.backend",
    "Table": "loopkit.logs.kinds",
    "Text": "loopkit.logs.kinds",
    "Value": "loopkit.logs.kinds",
    "read_log": "loopkit.logs.reading",
}
"""Where the names come from; a module is imported when somebody asks for one."""

__getattr__ = lazily(__name__, HOMES)
__all__ = [
    "Audio",
    "Backend",
    "Csv",
    "Figure",
    "File",
    "Graph",
    "Histogram",
    "Hyperparameters",
    "Image",
    "JsonLines",
    "Kind",
    "Log",
    "Record",
    "Records",
    "Run",
    "Table",
    "Text",
    "Value",
    "read_log",
]


def __dir__() -> list[str]:
    return __all__
