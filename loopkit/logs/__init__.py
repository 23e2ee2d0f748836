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

__getattr__ = lazily(__name__)
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
