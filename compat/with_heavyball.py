"""heavyball: optimizers made of chained parts, with states of their own."""

from __future__ import annotations

from typing import Any, ClassVar

import heavyball
from checks import Program, main
from torch import nn

NEEDS = ["heavyball==3.2.1"]
heavyball.utils.compile_mode = None


class Heavyball(Program):
    kind: ClassVar[str]

    @property
    def name(self) -> str:
        return self.kind

    def optimizer(self, model: nn.Module) -> Any:
        return getattr(heavyball, self.kind)(model.parameters(), lr=0.01)


KINDS = ["AdamW", "SGD", "Muon", "SOAP", "ADOPT", "LaProp", "PSGDKron", "PaLMAdamW"]


if __name__ == "__main__":
    main(NEEDS, [type(kind, (Heavyball,), {"kind": kind})() for kind in KINDS if hasattr(heavyball, kind)])
