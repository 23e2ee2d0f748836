"""Phases for models that compute their loss themselves, as models of transformers do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

import loopkit
from loopkit.author import describe, nearest
from loopkit.errors import LossError, PhaseError, PhaseInputError
from loopkit.events import ForwardBegin, LossBegin

if TYPE_CHECKING:
    from loopkit import Learner, Step

__all__ = ["PredictionPhase", "TrainingPhase", "ValidationPhase"]


class ModelLoss(loopkit.Phase):
    """The base of this module's phases; see `TrainingPhase`."""

    def __init__(
        self,
        name: str | None = None,
        *,
        labels: str = "labels",
        ignore_index: int = -100,
        causal: bool | None = None,
        skip_none: bool = False,
    ) -> None:
        super().__init__(name, skip_none=skip_none)
        self.labels = labels
        self.ignore_index = ignore_index
        self.causal = causal

    def unpack(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch into the inputs, a dict, and the labels, or None.

        Raises:
            PhaseInputError: It is not a mapping.
        """
        if not isinstance(batch, Mapping):
            raise PhaseInputError(
                f"phase {self.name!r} calls model(**batch), and this batch is {describe(batch)}: give mappings such as "
                f"{{'input_ids': ..., {self.labels!r}: ...}}, as the collators of transformers make them"
            )
        inputs = dict(batch)
        return inputs, inputs.pop(self.labels, None)

    def forward(self, learner: Learner, inputs: Any) -> Any:
        """``learner.model(**inputs)``; the inputs have the labels if the batch has."""
        return learner.model(**inputs)  # type: ignore[operator]

    def loss(self, learner: Learner, outputs: Any, targets: Any) -> Tensor:
        """The loss in the model's outputs; override it to add your own terms.

        Raises:
            LossError: There is none.
        """
        loss = _entry(outputs, "loss")
        if loss is None:
            model = type(learner.models[next(iter(learner.models))]).__name__
            raise LossError(
                f"phase {self.name!r}: {model} returned no loss in its {describe(outputs)}: "
                + (
                    f"the batch has no {self.labels!r}; let the collator add them, as "
                    f"DataCollatorForLanguageModeling(tokenizer, mlm=False) does, or name their key, labels=..."
                    if targets is None
                    else "take a class with a head for the task, such as AutoModelForCausalLM, which returns an output "
                    "with a loss if it is given labels"
                )
            )
        return loss  # type: ignore[no-any-return]

    def compute(self, learner: Learner, step: Step) -> None:
        """Set ``inputs``, ``targets``, ``outputs``, ``weight`` and ``loss``, with the events between them."""
        step.inputs, step.targets = self.unpack(step.batch)
        step.emit(ForwardBegin)
        labels = step.targets
        output = self.forward(learner, step.inputs if labels is None else {**step.inputs, self.labels: labels})
        try:
            loss = self.loss(learner, output, labels)
        except LossError as error:
            if labels is None:
                error.add_note(f"the batch has {', '.join(step.inputs)}{nearest(self.labels, step.inputs)}")
            raise
        logits = _entry(output, "logits")
        if isinstance(logits, Tensor) and isinstance(labels, Tensor):
            if labels.ndim > 1 and self._shifts(learner):
                logits, labels = logits[:, :-1], labels[:, 1:]
            elif labels.is_floating_point() and logits.shape == (*labels.shape, 1):
                logits = logits[..., 0]
        outputs = step.outputs = output if logits is None else logits
        targets = step.targets = labels
        step.model_output = output  # type: ignore[attr-defined]
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            step.weight = targets.ne(self.ignore_index).sum()
            if isinstance(loss, Tensor):  # the mean over no labels is nan, and this is no host sync
                loss = loss.masked_fill(step.weight.eq(0).to(loss.device), 0.0)
        step.emit(LossBegin)
        if step.outputs is not outputs or step.targets is not targets:
            raise PhaseError(
                f"phase {self.name!r}: a plugin put other outputs or targets on the step at loss_begin, and the model "
                f"has computed its loss from the first ones: change them before the forward, at forward_begin"
            )
        step.loss = loss

    def _shifts(self, learner: Learner) -> bool:
        return _is_causal(next(iter(learner.models.values()))) if self.causal is None else self.causal


class TrainingPhase(ModelLoss, loopkit.TrainingPhase):
    """Training with the loss that the model returns: ``model(**batch)``, of whose output loss and logits are taken.

    Events of a step: as in `loopkit.TrainingPhase`.

    A batch is a mapping (a dict, a ``BatchEncoding``) of the model's keyword arguments. A step then has:

    - ``inputs``: the batch without the labels;
    - ``targets``: the labels, None if there are none; ``(batch,)``, or ``(batch, length)`` for one label per token;
    - ``outputs``: the logits, ``(batch, classes)`` or ``(batch, length, classes)``, or ``(batch,)`` beside labels that
      are such numbers, of a regression; all of the model's output if it has no logits. Of a tuple, as models return it
      with ``return_dict=False``, the first is the loss and the only other tensor the logits;
    - ``model_output``: all that the model returned;
    - ``weight``: how many labels are not ``ignore_index``, if they are whole numbers. So metrics are means over these
      labels, and accumulated gradients equal the gradients of one big batch. It stays on the device. Where it is 0, so
      are the loss, which would be nan, and the gradients.

    A causal language model compares the logits of each token with the label of the next one. There, outputs are without
    the last token and targets without the first, so that they stand side by side as metrics need it.

    The loss is the model's: a ``loss_fn`` of the learner is not used, and at ``loss_begin``, where it is computed
    already, outputs and targets can be read but not replaced. At ``forward_begin`` inputs and targets can.

    Args:
        name: Replaces the phase's name.
        labels: The key of the labels in a batch.
        ignore_index: Labels of this value do not count for ``weight``; the models of transformers leave out -100.
        causal: Whether the model compares logits with the next label. With None, models of transformers that
            generate text from logits for all of their input do, and all others do not.
        skip_none: Pass over batches that are None.

    Raises:
        PhaseInputError: A batch is not a mapping.
        LossError: The model returned no loss.
        PhaseError: A plugin put other outputs or targets on the step at ``loss_begin``.

    Example::

        phases = [TrainingPhase(), ValidationPhase(), PredictionPhase()]
        learner = Learner(model, optimizer=torch.optim.AdamW, phases=phases, accumulate=4)
    """

    def step(self, learner: Learner, step: Step) -> None:  # noqa: D102 - the class's docstring says it
        self.compute(learner, step)
        step.backward(step.loss)
        step.update()


class ValidationPhase(ModelLoss, loopkit.ValidationPhase):
    """Validation with the loss that the model returns, in eval mode and without gradients: see `TrainingPhase`.

    Events of a step: StepBegin, ForwardBegin, LossBegin, StepEnd.
    """

    def step(self, learner: Learner, step: Step) -> None:  # noqa: D102 - the class's docstring says it
        self.compute(learner, step)


class PredictionPhase(ModelLoss, loopkit.PredictionPhase):
    """The logits for batches as in `TrainingPhase`; labels in them are left out, without a shift."""

    def forward(self, learner: Learner, inputs: Any) -> Any:
        """The logits of ``learner.model(**inputs)``; all of its output if it has none."""
        output = super().forward(learner, inputs)
        logits = _entry(output, "logits")
        return output if logits is None else logits


def _entry(output: Any, name: str) -> Any:
    """An entry of a model's output, be it a mapping, an object or a tuple; None without it."""
    if type(output) is tuple:  # return_dict=False: the loss, if there is one, and then the logits
        has_loss = isinstance(output[0], Tensor) and not output[0].ndim
        if name == "loss":
            return output[0] if has_loss else None
        tensors = [each for each in output[has_loss:] if isinstance(each, Tensor)]
        return tensors[0] if len(tensors) == 1 else None
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _is_causal(model: nn.Module) -> bool:
    """Whether a model of transformers predicts, at each token of its labels, the next one."""
    can_generate = getattr(model, "can_generate", None)
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return callable(can_generate) and bool(can_generate()) and not encodes
