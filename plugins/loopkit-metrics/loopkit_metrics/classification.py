"""Metrics of predicted classes, and of how well scores separate them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from loopkit.author import added, checks, classes_axis, count, describe, wide
from loopkit.logs import Table
from loopkit.metrics import ClassCounts, Metric
from loopkit_metrics.kept import Kept


class TopK(Metric):
    """Share of targets that are among the ``k`` classes with the highest outputs.

    Args:
        k: From 1; its name is ``"top5"``.
        ignore_index: Targets of this value do not count.
        axis: The axis of the classes, -1 or 1; needed only where the shapes leave it open.

    Shapes: outputs ``(..., classes)`` or ``(batch, classes, ...)``, targets class indices without that axis.

    Source: ``sklearn.metrics.top_k_accuracy_score``.
    """

    higher_is_better = True

    def __init__(self, k: int = 5, *, ignore_index: int | None = None, axis: int | None = None) -> None:
        checks.whole("TopK", k=k)
        self.k, self.ignore_index, self.axis = k, ignore_index, axis
        self.name = f"top{k}"
        super().__init__()

    def reset(self) -> None:  # noqa: D102
        self.hits: Tensor | None = None
        self.count: Tensor | None = None

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count one batch."""
        axis = classes_axis(outputs, targets, self.axis)
        hit = outputs.topk(min(self.k, outputs.shape[axis]), axis).indices.eq(targets.unsqueeze(axis)).any(axis)
        counted = torch.ones_like(hit) if self.ignore_index is None else targets.ne(self.ignore_index)
        hits, number = (hit & counted).sum(), counted.sum()
        self.hits = hits if self.hits is None else self.hits + hits
        self.count = number if self.count is None else self.count + number

    def merge(self, states: Sequence[dict[str, Any]]) -> None:  # noqa: D102
        self.load_state_dict(added(states))

    @property
    def is_empty(self) -> bool:  # noqa: D102
        return self.hits is None

    def compute(self) -> Tensor | float:  # noqa: D102
        return math.nan if self.hits is None or self.count is None else wide(self.hits) / self.count


class ConfusionMatrix(Metric):
    """How many samples of each class (rows) were predicted as each class (columns).

    Not a number: ``Metrics`` logs it as a table, and keeps it out of ``learner.metrics``.

    Args:
        normalize: ``"true"``: shares of each row; ``"pred"``: of each column; ``"all"``: of all samples. Without
            samples it is 0.
        labels: The classes' names.
        ignore_index: Targets of this value do not count.
        axis: The axis of the classes, -1 or 1; needed only where the shapes leave it open.

    Shapes: outputs ``(..., classes)`` or ``(batch, classes, ...)``, targets class indices without that axis.

    Source: ``sklearn.metrics.confusion_matrix``.
    """

    name = "confusion_matrix"
    several = True

    def __init__(
        self,
        normalize: Literal["true", "pred", "all"] | None = None,
        labels: Sequence[str] | None = None,
        ignore_index: int | None = None,
        axis: int | None = None,
    ) -> None:
        checks.one_of(type(self).__name__, ("true", "pred", "all", None), normalize=normalize)
        self.normalize, self.labels, self.ignore_index, self.axis = normalize, labels, ignore_index, axis
        super().__init__()

    def reset(self) -> None:  # noqa: D102
        self.counts: Tensor | None = None

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Count one batch."""
        axis = classes_axis(outputs, targets, self.axis)
        classes = outputs.shape[axis]
        predicted, actual = outputs.argmax(axis).flatten(), targets.flatten().long()
        counted = actual.ge(0) & actual.lt(classes)
        if self.ignore_index is not None:
            counted = counted & actual.ne(self.ignore_index)
        cells = actual.clamp(0, classes - 1) * classes + predicted
        counts = count(cells, counted, classes * classes).reshape(classes, classes)
        self.counts = counts if self.counts is None else self.counts + counts

    def merge(self, states: Sequence[dict[str, Any]]) -> None:  # noqa: D102
        self.load_state_dict(added(states))

    @property
    def is_empty(self) -> bool:  # noqa: D102
        return self.counts is None

    def compute(self) -> Tensor | float:  # noqa: D102
        if self.counts is None or self.normalize is None:
            return math.nan if self.counts is None else self.counts
        counts = wide(self.counts)
        axes = {"true": (1,), "pred": (0,), "all": (0, 1)}[self.normalize]
        return counts / counts.sum(axes, keepdim=True).clamp(min=1)


class IoU(ClassCounts):
    """Intersection over union, the Jaccard index, per class and averaged: hits / (predictions + targets - hits).

    For segmentation each pixel counts: outputs ``(batch, classes, height, width)``, targets ``(batch, height, width)``.
    With ``from_logits`` there is one output for each of several masks, ``(batch, masks, height, width)`` like targets.
    Options and shapes are as in `loopkit.metrics.F1`.

    Source: ``sklearn.metrics.jaccard_score``.

    Example::

        Metrics(IoU(ignore_index=255))
    """

    name = "iou"

    def score(self, hits: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:  # noqa: D102
        return hits / (predicted + actual - hits).clamp(min=1)


class Dice(ClassCounts):
    """Dice coefficient of the predictions, per class and averaged: 2 hits / (predictions + targets).

    It is `loopkit.metrics.F1` under the name that segmentation uses. Of each image first, and then averaged, it is
    another number: a function of outputs and targets gives that.

    Source: ``torchmetrics.functional.classification.multiclass_f1_score``.
    """

    name = "dice"

    def score(self, hits: Tensor, predicted: Tensor, actual: Tensor) -> Tensor:  # noqa: D102
        return 2 * hits / (predicted + actual).clamp(min=1)


class Ranking(Kept):
    """A score of how well outputs rank the samples of each class before the others.

    Args:
        from_logits: For several classes: True for raw outputs, False for probabilities. There is no default, because
            a class's raw outputs rank the samples differently.
        average: ``"macro"``: mean over the classes of which there are samples and others; ``"weighted"``: weighted by
            each class's samples; None: each class's score, nan where there are none.
        labels: The classes' names, for ``average=None``.

    Shapes: outputs ``(samples)`` and targets 0 or 1; outputs ``(samples, classes)`` and targets class indices; or both
    ``(samples, labels)``, of 0 or 1.

    It keeps all outputs and targets of an epoch, which is what makes it exact. An output that is nan has no rank: the
    score of its class is nan, and so is a mean that has it.
    """

    def __init__(
        self,
        average: Literal["macro", "weighted"] | None = "macro",
        *,
        from_logits: bool | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        checks.one_of(type(self).__name__, ("macro", "weighted", None), average=average)
        if labels is not None and average is not None:
            raise ValueError(f"labels name scores of classes, and average={average!r} makes one: give average=None")
        self.average, self.from_logits, self.labels = average, from_logits, labels
        self.several = average is None
        super().__init__()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Keep one batch."""
        if outputs.ndim == 2 and outputs.shape[1] > 1 and targets.shape == outputs.shape[:1]:
            if self.from_logits is None:
                raise ValueError(
                    f"{type(self).__name__}: outputs are {describe(outputs)}, of several classes: give "
                    f"from_logits=True "
                    f"for raw outputs, from_logits=False for probabilities"
                )
            outputs = outputs.softmax(1) if self.from_logits else outputs
        elif [n for n in outputs.shape if n != 1] != [n for n in targets.shape if n != 1] or targets.ndim > 2:
            raise ValueError(
                f"{type(self).__name__}: outputs are {describe(outputs)}, targets {describe(targets)}; give class "
                f"indices (samples) for outputs (samples, classes), or both the same shape"
            )
        else:
            outputs = outputs.reshape(targets.shape)
        self.keep(outputs, targets)

    def score(self, scores: Tensor, hits: Tensor) -> Tensor:
        """The score of each row of ``scores``, where ``hits`` is 1 for samples of the class and 0 for others."""
        raise NotImplementedError

    def rows(self) -> tuple[Tensor, Tensor]:
        """Scores and hits of all samples, ``(classes, samples)``; of two classes there is one row."""
        outputs, targets = self.columns()
        if outputs.shape == targets.shape:
            hits = targets.bool()
        else:
            hits = one_hot(targets.clamp(min=0).long(), outputs.shape[1]).bool() & targets.ge(0)[:, None]
        rows = outputs.reshape(len(outputs), -1).T.contiguous()
        return rows if rows.dtype is torch.float64 else rows.float(), wide(hits.reshape(len(hits), -1).T.contiguous())

    def compute(self) -> Tensor | float:  # noqa: D102
        if self.is_empty:
            return math.nan
        rows, hits = self.rows()
        scores = self.score(rows, hits)
        unknown = rows.isnan().any(1)
        scores = scores.masked_fill(unknown, math.nan)
        if self.average is None:
            return scores
        weights = hits.sum(1).where(scores.isfinite(), 0)
        weighted = self.average == "weighted"
        mean = (scores.nan_to_num() * weights).sum() / weights.sum() if weighted else scores.nanmean()
        return mean.masked_fill(unknown.any(), math.nan)


def _sorted(scores: Tensor, hits: Tensor) -> tuple[Tensor, Tensor]:
    scores, order = scores.sort(1)
    return scores, hits.gather(1, order)


class AUROC(Ranking):
    """Area under the ROC curve: how often a sample of the class has a higher score than another one.

    Of several classes, each against the rest. Source: ``sklearn.metrics.roc_auc_score(multi_class="ovr")``.
    """

    name = "auroc"
    higher_is_better = True

    def score(self, scores: Tensor, hits: Tensor) -> Tensor:  # noqa: D102
        scores, hits = _sorted(scores, hits)
        ranks = wide(torch.searchsorted(scores, scores) + torch.searchsorted(scores, scores, right=True) + 1) / 2
        own = hits.sum(1)
        return ((ranks * hits).sum(1) - own * (own + 1) / 2) / (own * (hits.shape[1] - own))


class AveragePrecision(Ranking):
    """Mean precision at the scores of the class's samples: the area under the curve of precision over recall.

    Source: ``sklearn.metrics.average_precision_score``.
    """

    name = "average_precision"
    higher_is_better = True

    def score(self, scores: Tensor, hits: Tensor) -> Tensor:  # noqa: D102
        scores, hits = _sorted(scores, hits)
        below = torch.searchsorted(scores, scores)
        own = hits.sum(1)
        above = own[:, None] - pad(hits.cumsum(1), (1, 0)).gather(1, below)
        return (hits * above / (hits.shape[1] - below)).sum(1) / own


class PrecisionRecall(Ranking):
    """The curve of precision over recall, as a table: for each recall the highest precision at it or above.

    Its first column is ``"recall"``, from 0 to 1; there is a column for each class, one for two classes. It is logged
    as a table, which the monitor draws, and stays out of ``learner.metrics``.

    Args:
        points: Rows, from 2.
        from_logits: As for `AveragePrecision`.
        labels: The classes' names.

    Source: ``sklearn.metrics.precision_recall_curve``.
    """

    name = "precision_recall"

    def __init__(
        self, points: int = 101, *, from_logits: bool | None = None, labels: Sequence[str] | None = None
    ) -> None:
        checks.whole("PrecisionRecall", 2, points=points)
        super().__init__(None, from_logits=from_logits, labels=labels)
        self.points = points

    def compute(self) -> Any:
        """A `loopkit.logs.Table`, ``(points, 1 + classes)``."""
        if self.is_empty:
            return math.nan
        scores, hits = self.rows()
        names = ["precision"] if len(hits) == 1 else [str(at) for at in range(len(hits))]
        names = names if self.labels is None else [*self.labels]
        if len(names) != len(hits):
            raise ValueError(f"PrecisionRecall: there are {len(hits)} classes, and {len(names)} labels")
        at = torch.linspace(0, 1, self.points, dtype=hits.dtype, device=hits.device)
        columns = [at, *(_precision_at(at, *row) for row in zip(scores, hits, strict=True))]
        return Table(["recall", *names], torch.stack(columns, 1).tolist())


def _precision_at(recalls: Tensor, scores: Tensor, hits: Tensor) -> Tensor:
    """The highest precision at each recall or above; nan for a class without samples, or with scores that are nan."""
    own = hits.sum()
    if scores.isnan().any() or not own:
        return torch.full_like(recalls, math.nan)
    scores, order = scores.sort(descending=True)
    found = hits[order].cumsum(0)
    precision = found / torch.arange(1, len(hits) + 1, device=hits.device)
    precision[:-1][scores[1:] == scores[:-1]] = 0.0  # samples of one score come together
    highest = precision.flip(0).cummax(0).values.flip(0)
    needed = (recalls * own).sub(1e-6).ceil().clamp(min=1)
    return highest[torch.searchsorted(found, needed)]
