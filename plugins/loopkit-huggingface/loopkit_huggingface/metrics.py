"""Metrics of language models."""

from __future__ import annotations

import math

from torch import Tensor

from loopkit.metrics import Mean

__all__ = ["Perplexity"]


class Perplexity(Mean):
    """``exp`` of the mean loss per token over an epoch: 1 is certain and right, the size of the vocabulary is a guess.

    The mean is weighted by ``step.weight``, which the phases of this package set to the number of label tokens that
    count, so it does not depend on how the tokens are cut into batches.

    Example::

        Metrics(Perplexity(), Accuracy(ignore_index=-100))
    """

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__("loss")
        self.name = "perplexity"

    def compute(self) -> Tensor | float:
        """The value so far; nan before the first batch."""
        mean = super().compute()
        return mean.exp() if isinstance(mean, Tensor) else math.exp(mean)
