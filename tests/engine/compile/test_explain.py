"""Explain."""

from __future__ import annotations

from engine.compile.making import Clip, Files, Norms, make
from loopkit import ValidationPhase, hookimpl


class Sync:
    provides = "sync"
    owns = ("grads.sync",)

    @hookimpl(writes=("grads",))
    def update_begin(self, step):
        pass


class Display:
    @hookimpl(phase=ValidationPhase)
    def step_end(self, step):
        pass


def test_explain_says_what_runs_when_and_why():
    learner = make(Norms(), Display(), Clip(), Files(), Sync())
    assert (
        str(learner.explain(full=True))
        == """\
the learner
===========
fit_begin
  1. files
  2. norms
                because 'files' says before 'norms'
fit_end (in reverse of fit_begin)
  1. norms
  2. files

phase 'train'
=============
update_begin
  1. sync     writes grads
  2. norms    reads grads, params; writes metrics.*/norm
                because 'sync' writes 'grads', 'norms' reads 'grads'
  3. clip     updates grads
                because 'norms' says before 'clip'
                because 'sync' writes 'grads', 'clip' updates 'grads'
step_end
  1. files    reads *

phase 'val'
===========
step_end
  1. display
  2. files    reads *
                because 'files' reads everything

phase 'predict'
===============
step_end
  1. files    reads *"""
    )


def test_explain_says_each_reason_once():
    learner = make(Norms(), Files(), Sync(), Clip(), order=["sync", "norms", "clip"])
    assert [row.reasons for row in learner.explain("train").rows if row.plugin == "clip"] == [
        ("the order given to the learner",)
    ]


def test_explain_of_a_phase_leaves_the_others_out():
    learner = make(Display())
    assert str(learner.explain("val")) == "phase 'val'\n===========\nstep_end\n  1. display"


def test_explain_without_plugins_says_so():
    assert str(make().explain()) == "no plugins"
