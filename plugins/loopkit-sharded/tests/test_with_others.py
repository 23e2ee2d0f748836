"""FSDP with other plugins: what one process decides, all do; what stands in the weights' place; what is sent."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo  # fully_shard does, which takes seconds in each process
import torch.distributed as dist
from distributed import test_collectives, test_ddp, test_votes
from distributed.processes import run
from distributed.test_collectives import OBJECTS, STEPS
from distributed.test_votes import KINDS, Local, check_alone, check_equal, params, train
from engine.life.runs import at, same, saved, sigterm
from helpers import keeps_contract
from loopkit_testing import Case
from loopkit_testing.processes import compared, train_together
from torch import nn

from loopkit import Learner, every, hookimpl
from loopkit.author import options_of
from loopkit.data import TensorLoader
from loopkit.errors import NonFiniteError, WorldError
from loopkit.plugins import Checkpoint, EarlyStopping, Metrics, StopOnNonFinite, WeightAverage
from loopkit_sharded import FSDP


def wrap(path, module):
    return isinstance(module, nn.Linear)


def test_plugin_keeps_the_contract():
    keeps_contract(FSDP, "fsdp")


@pytest.mark.slow
def test_plugin_with_options_keeps_the_contract():  # alone: torch's batch norm on the CPU takes no bfloat16
    keeps_contract(lambda: FSDP(nn.Linear, mixed_precision=torch.bfloat16), "fsdp")


def test_plugin_keeps_in_two_processes():
    assert compared(run(lambda rank: train_together(Case(FSDP)), 2, timeout=60)) == []


def test_options_are_those_that_it_was_made_with():
    given = {
        "wrap": wrap,
        "mixed_precision": torch.bfloat16,
        "reshard_after_forward": False,
        "sync_each_step": True,
        "mesh": (1,),
        "init": wrap,
        "offload": True,
        "shard": False,
        "tail": "drop",
        "backend": "gloo",
        "timeout": 9.0,
        "name": "shards",
    }
    assert options_of(FSDP(**given)) == given


# Plugins that decide something


@pytest.mark.parametrize("name", ["noise", "spikes", "clip", "scaling"])
def test_sharded_parameters_train_with(name):
    one, other = run(lambda rank: train(rank, KINDS[name], sync=FSDP), 2)
    check_equal(one[0], other[0])
    assert (one[1].cancelled, one[1].skipped) == (other[1].cancelled, other[1].skipped)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_spike_of_one_process_is_skipped_in_all(accumulate):
    one, other = run(test_votes.mean_spike, 2, [(1, 5, 1000.0), (0, 8, 1000.0)], FSDP, accumulate)
    check_equal(one[0], other[0])
    assert one[1].cancelled == other[1].cancelled == [5, 8]


@pytest.mark.parametrize(
    ("policy", "accumulate"), [("skip", 1), ("rollback", 2), pytest.param("skip", 2, marks=pytest.mark.slow)]
)
def test_bad_loss_of_one_process_has_one_consequence_in_all(policy, accumulate):
    def each(rank):
        found, log, _, _, progress, plugin = test_votes.bad_loss(rank, policy, FSDP, accumulate)
        return found, log, progress, plugin.rollbacks

    one, other = run(each, 2)
    check_equal(one[0], other[0])
    assert one[1].cancelled == other[1].cancelled == [4]
    assert one[2:] == other[2:]
    assert one[3] == (policy == "rollback")


def test_rollback_goes_back_to_what_a_loaded_state_holds():
    for straight, resumed in run(test_votes.rolled_back, 2, FSDP):
        check_equal(straight[0], resumed[0])
        assert straight[1] == resumed[1] == 1


@pytest.mark.parametrize("policy", ["skip", pytest.param("rollback", marks=pytest.mark.slow)])
def test_bad_gradient_of_one_process_has_one_consequence_in_all(policy):
    one, other = run(test_votes.bad_gradient, 2, policy, FSDP)
    check_equal(one[0], other[0])
    happened = [log.skipped if policy == "skip" else log.cancelled for log in (one[1], other[1])]
    assert happened == [[4], [4]]
    assert one[4] == other[4]


def test_raise_names_the_process_to_the_others():
    def each(rank):
        with pytest.raises((NonFiniteError, WorldError)) as caught:
            train(rank, lambda rank: [StopOnNonFinite()], [(1, 4, math.nan)], sync=FSDP)
        return type(caught.value).__name__, str(caught.value)

    one, other = run(each, 2)
    assert other[0] == "NonFiniteError"
    assert other[1].startswith("the loss is nan")
    assert one[0] == "PeerError"
    assert "rank 1 failed" in one[1]
    assert "the loss is nan" in one[1]


@pytest.mark.parametrize("device", [pytest.param(None, marks=pytest.mark.slow), "cpu"])
def test_early_stopping_restores_sharded_parameters(device):
    def each(rank):
        stopping = EarlyStopping("train/own", patience=2, restore_best=True, best_device=device, mode="min")
        kept = []

        class Keep:
            @hookimpl(reads=("params",))
            def phase_end(self, learner):
                kept.append(params(learner))

        after, *_ = train(rank, lambda rank: [Local(rank), stopping, Keep()], epochs=4, sync=FSDP)
        return kept[0], after, len(kept)

    one, other = run(each, 2)
    check_equal(one[0], one[1])
    check_equal(one[1], other[1])
    assert one[2] == other[2] == 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_process_alone_trains_bitwise_as_without(accumulate):
    check_alone(FSDP, accumulate)


# What stands in the weights' place


def ended_in_a_validation(rank, directory):
    """The ends of a run, whole, and ended in a validation and resumed."""

    def fit(*plugins, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        learner = Learner(
            model,
            nn.MSELoss(),
            lambda params: torch.optim.AdamW(params, lr=0.05),
            plugins=[FSDP(wrap=nn.Linear, timeout=60), WeightAverage(0.8), Metrics(), *plugins],
            standard=False,
        )
        x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
        data = TensorLoader(x, x.sum(1, keepdim=True), batch_size=3)
        learner.fit(data, data, epochs=3)
        state = learner.state_dict()
        return {part: state[part] for part in ("models", "optimizers", "progress", "metrics")}

    straight = fit(seed=1)
    with pytest.raises(SystemExit):
        fit(Checkpoint(directory, save=every(epochs=100)), at(sigterm, phase="val", epochs=2, index=1), seed=1)
    dist.barrier()  # rank 0 has written it
    [manifest] = saved(directory)
    assert manifest.about["progress"]["epochs"] == 2
    assert "val/loss" not in manifest.about["metrics"]  # the validation was not over
    dist.barrier()
    same(straight, fit(Checkpoint(directory, resume="auto"), seed=99))


def test_sharded_run_that_sigterm_ends_in_a_validation_goes_on(tmp_path):
    run(ended_in_a_validation, 2, tmp_path)


# What is sent, and what is compared


def test_collectives_of_an_epoch():
    # Each of two layers is gathered for each forward and each backward, and once more after a validation.
    train = {
        "allgather_base": 4 * STEPS + 1,
        "reduce_scatter_base": 2 * STEPS,
        "allgather": OBJECTS,
        "allreduce": 2,
    }
    val = {"allgather_base": 2 * STEPS, "allgather": OBJECTS, "allreduce": 2}
    assert run(test_collectives.counted, 2, lambda: [FSDP(wrap=nn.Linear, timeout=60)]) == [[train, val]] * 2


def test_different_models_are_refused_before_anything_is_sent():
    assert all("(4, 6)" in text and "(3, 6)" in text for text in run(test_ddp.different_at_once, 2, FSDP))


def test_what_is_compared_are_the_parameters():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    plugin = FSDP()
    learner = Learner(model, nn.MSELoss(), torch.optim.SGD, plugins=[plugin], standard=False)
    assert list(plugin.equal(learner)) == [name for name, _ in model.named_parameters()]
