"""The plugins of every step keep the contract, alone and in two processes."""

import pytest
from distributed.processes import run
from loopkit_testing import Case, plugin_contract
from loopkit_testing.processes import compared, train_together
from problems import CLASSES, images

from loopkit_recipes import ASAM, SAM, CutMix, LabelSmoothing, Mixup

FORKED = {"two_processes": "it is test_plugin_keeps_in_two_processes, which starts them faster"}

test_sam = plugin_contract(SAM, name="sam", skip=FORKED)
test_asam = plugin_contract(ASAM, name="asam", skip=FORKED)
test_mixup = plugin_contract(lambda: Mixup(CLASSES), name="mixup", problem=images, skip=FORKED)
test_cut_mix = plugin_contract(lambda: CutMix(CLASSES), name="cut_mix", problem=images, skip=FORKED)
test_label_smoothing = plugin_contract(
    lambda: LabelSmoothing(CLASSES), name="label_smoothing", problem=images, skip=FORKED
)


@pytest.mark.parametrize(
    "case",
    [
        Case(SAM),
        Case(ASAM),
        Case(lambda: Mixup(CLASSES), problem=images),
        Case(lambda: CutMix(CLASSES), problem=images),
        Case(lambda: LabelSmoothing(CLASSES), problem=images),
    ],
    ids=["sam", "asam", "mixup", "cut_mix", "label_smoothing"],
)
def test_plugin_keeps_in_two_processes(case):
    assert compared(run(lambda rank: train_together(case), 2, timeout=60)) == []
