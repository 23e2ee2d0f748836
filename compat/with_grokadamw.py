"""grokadamw: an optimizer that keeps its moments in the groups, by parameters."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from checks import Program, main
from grokadamw import GrokAdamW
from torch import nn

NEEDS = ["grokadamw==0.1.2"]
logging.disable(logging.INFO)
REASON = "its moments have parameters as keys, which no file brings back: by hand they begin anew; here a save raises"


class Grok(Program):
    known: ClassVar[dict[str, str]] = {"best": REASON, "resume": REASON}

    def optimizer(self, model: nn.Module) -> Any:
        return GrokAdamW(model.parameters(), lr=0.01)


if __name__ == "__main__":
    main(NEEDS, [Grok()])
