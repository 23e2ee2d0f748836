"""Logging: logged values (kinds, `Record`), and their destination (`Backend`). It imports only the ground."""

from typing import TYPE_CHECKING

from loopkit.base.lazy import homes, lazily

if TYPE_CHECKING:
    from loopkit.logs.backend import Backend as Backend
    from loopkit.logs.backend import Run as Run
    from loopkit.logs.csv_file import Csv as Csv
    from loopkit.logs.json_lines import JsonLines as JsonLines
    from loopkit.logs.kinds import Audio as Audio
    from loopkit.logs.kinds import Figure as Figure
    from loopkit.logs.kinds import File as File
    from loopkit.logs.kinds import Graph as Graph
    from loopkit.logs.kinds import Histogram as Histogram
    from loopkit.logs.kinds import Hyperparameters as Hyperparameters
    from loopkit.logs.kinds import Image as Image
    from loopkit.logs.kinds import Kind as Kind
    from loopkit.logs.kinds import Table as Table
    from loopkit.logs.kinds import Text as Text
    from loopkit.logs.kinds import Value as Value
    from loopkit.logs.reading import Log as Log
    from loopkit.logs.reading import read_log as read_log
    from loopkit.logs.record import Group as Group
    from loopkit.logs.record import Record as Record
    from loopkit.logs.record import Records as Records

__getattr__ = lazily(__name__)
__all__ = list(homes(__name__))
__dir__ = __all__.copy
