"""What pluggy's own tools see: a specification for each hook, those of other distributions included."""

from __future__ import annotations

import pluggy

from loopkit import Event
from loopkit.hooks import PROJECT, hookimpl, hooks, specification


class Other:
    @hookimpl
    def forward_begin(self, step):
        """Takes one of four arguments."""


def test_pluggy_lists_every_hook_with_its_arguments_and_what_it_says():
    manager = pluggy.PluginManager(PROJECT)
    known = hooks()
    manager.add_hookspecs(specification(tuple(known.values())))
    for name, hook in known.items():
        spec = getattr(manager.hook, name).spec
        assert tuple(spec.argnames) == hook.arguments
        assert spec.function.__doc__ == hook.doc
    plugin = Other()
    manager.register(plugin)
    manager.check_pending()
    assert [each.name for each in manager.get_hookcallers(plugin)] == ["forward_begin"]


def test_event_of_another_distribution_is_a_hook_like_any(monkeypatch):
    monkeypatch.setattr(Event, "by_hook", dict(Event.by_hook))

    class JudgeBegin(Event):
        """step.verdict exists."""

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specification(tuple(hooks().values())))
    assert manager.hook.judge_begin.spec.argnames == ("learner", "phase", "epoch", "step")
    assert manager.hook.judge_begin.spec.function.__doc__ == "step.verdict exists."
