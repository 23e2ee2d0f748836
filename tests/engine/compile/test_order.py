from __future__ import annotations

import random
import re
from fnmatch import fnmatchcase
from itertools import combinations, pairwise, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loopkit import Learner, hookimpl
from loopkit.base.words import nearest
from loopkit.engine.compile.order import Entry, arrange, overlaps
from loopkit.errors import OrderError


def names(entries, chains=()):
    return [placed.entry.plugin for placed in arrange(entries, chains, "update_begin")]


def reasons(entries, chains=()):
    return {placed.entry.plugin: placed.reasons for placed in arrange(entries, chains, "update_begin")}


def test_overlaps_is_true_for_equal_names():
    assert overlaps("grads", "grads")


@pytest.mark.parametrize("pair", [("optimizer", "optimizer.lr"), ("optimizer.lr", "optimizer"), ("a", "a.b.c")])
def test_overlaps_is_true_for_a_name_above_the_other(pair):
    assert overlaps(*pair)


@pytest.mark.parametrize("pair", [("loss", "outputs"), ("optimizer.lr", "optimizer.momentum"), ("grad", "grads")])
def test_overlaps_is_false_for_other_names(pair):
    assert not overlaps(*pair)


@pytest.mark.parametrize(
    "pair",
    [
        ("metrics.*/loss", "metrics.val/loss"),
        ("metrics.val/loss", "metrics.*/loss"),
        ("metrics.*", "metrics.val/loss"),
        ("metrics", "metrics.*/loss"),
        ("metrics.*/loss", "metrics.*/loss"),
    ],
)
def test_overlaps_takes_patterns(pair):
    assert overlaps(*pair)


@pytest.mark.parametrize("pair", [("metrics.*/loss", "metrics.val/accuracy"), ("metrics.val/*", "metrics.train/loss")])
def test_overlaps_is_false_for_a_pattern_that_does_not_match(pair):
    assert not overlaps(*pair)


@pytest.mark.parametrize(
    "pair", [("metrics.*/loss", "metrics.val/*"), ("metrics.val/*", "metrics.*/loss"), ("metrics.v*", "metrics.*s")]
)
def test_overlaps_is_true_for_two_patterns_that_can_match_the_same_name(pair):
    assert overlaps(*pair)


@pytest.mark.parametrize("pair", [("metrics.val/*", "metrics.train/*"), ("metrics.*/loss", "metrics.*/accuracy")])
def test_overlaps_is_false_for_two_patterns_that_match_nothing_in_common(pair):
    assert not overlaps(*pair)


def test_nearest_offers_a_close_spelling():
    assert nearest("grad", ["loss", "grads"]) == " (did you mean 'grads'?)"


def test_nearest_offers_nothing_for_another_word():
    assert nearest("weather", ["loss", "grads"]) == ""


def test_arrange_without_entries_is_empty():
    assert arrange([]) == []


def test_arrange_puts_writers_before_updaters_before_readers():
    entries = [
        Entry("a", reads=("grads",)),
        Entry("b", updates=("grads",)),
        Entry("c", writes=("grads",)),
    ]
    assert names(entries) == ["c", "b", "a"]


def test_arrange_says_why_an_entry_stands_where_it_does():
    entries = [Entry("a", reads=("grads",)), Entry("b", updates=("grads",)), Entry("c", writes=("grads",))]
    assert reasons(entries) == {
        "c": (),
        "b": ("'c' writes 'grads', 'b' updates 'grads'",),
        "a": ("'b' updates 'grads', 'a' reads 'grads'", "'c' writes 'grads', 'a' reads 'grads'"),
    }


def test_arrange_puts_a_writer_of_the_whole_before_a_reader_of_a_part():
    assert names([Entry("a", reads=("optimizer.lr",)), Entry("b", writes=("optimizer",))]) == ["b", "a"]


def test_arrange_puts_a_writer_of_a_part_before_a_reader_of_the_whole():
    assert names([Entry("a", reads=("optimizer",)), Entry("b", writes=("optimizer.lr",))]) == ["b", "a"]


def test_arrange_puts_the_writer_of_a_pattern_before_the_reader_of_a_match():
    assert names([Entry("a", reads=("metrics.val/loss",)), Entry("b", writes=("metrics.*/loss",))]) == ["b", "a"]


def test_arrange_puts_the_writer_of_a_pattern_before_the_reader_of_another_pattern():
    assert names([Entry("a", reads=("metrics.val/*",)), Entry("b", writes=("metrics.*/loss",))]) == ["b", "a"]


def test_arrange_leaves_readers_of_the_same_state_to_their_names():
    assert names([Entry("b", reads=("grads",)), Entry("a", reads=("grads",))]) == ["a", "b"]
    assert reasons([Entry("b", reads=("grads",)), Entry("a", reads=("grads",))]) == {"a": (), "b": ()}


def test_arrange_takes_an_updater_that_also_reads_for_an_updater():
    entries = [
        Entry("a", reads=("grads",), updates=("grads",)),
        Entry("b", writes=("grads",)),
        Entry("c", reads=("grads",)),
    ]
    assert names(entries) == ["b", "a", "c"]


def test_arrange_puts_readers_of_everything_last():
    entries = [Entry("a", reads=("*",)), Entry("y"), Entry("z", reads=("grads",))]
    assert names(entries) == ["y", "z", "a"]
    assert reasons(entries)["a"] == ("'a' reads everything",)


@pytest.mark.parametrize("other", ["b", "z"])
def test_a_writer_of_everything_clashes_with_no_writer_of_one_state(other):
    entries = [Entry("m", writes=("*",)), Entry(other, writes=("optimizer.lr",))]
    assert names(entries) == ["m", other]


def test_arrange_does_not_order_readers_of_everything_among_themselves():
    entries = [Entry("b", reads=("*",), writes=("grads",)), Entry("a", reads=("*",)), Entry("z")]
    assert names(entries) == ["z", "a", "b"]
    assert reasons(entries)["b"] == ("'b' reads everything",)


def test_arrange_puts_a_reader_of_everything_first_if_it_says_so():
    assert names([Entry("a", reads=("*",), before=("z",)), Entry("z", writes=("grads",))]) == ["a", "z"]


def test_arrange_puts_a_plugin_before_the_readers_of_its_own_state():
    entries = [Entry("a", reads=("throttle.late",)), Entry("throttle")]
    assert names(entries) == ["throttle", "a"]
    assert reasons(entries)["a"] == ("'throttle' writes 'throttle', 'a' reads 'throttle.late'",)


def test_arrange_knows_own_state_by_what_a_plugin_provides():
    assert names([Entry("a", reads=("clip.norm",)), Entry("my_clip", provides="clip")]) == ["my_clip", "a"]


@pytest.mark.parametrize("word", ["z", "clip"])
def test_arrange_puts_an_entry_after_what_it_names(word):
    assert names([Entry("a", after=(word,)), Entry("z", provides="clip")]) == ["z", "a"]


@pytest.mark.parametrize("word", ["a", "clip"])
def test_arrange_puts_an_entry_before_what_it_names(word):
    assert names([Entry("a", provides="clip"), Entry("z", before=(word,))]) == ["z", "a"]


def test_arrange_orders_a_word_for_every_plugin_that_provides_it():
    entries = [Entry("b", provides="clip"), Entry("a", after=("clip",)), Entry("c", provides="clip")]
    assert names(entries) == ["b", "c", "a"]


def test_arrange_does_not_order_a_plugin_against_itself():
    entries = [Entry("a", provides="clip", after=("clip",)), Entry("b", provides="clip")]
    assert names(entries) == ["b", "a"]


def test_arrange_ignores_names_of_absent_plugins():
    assert names([Entry("b", before=("absent",)), Entry("a", after=("gone",))]) == ["a", "b"]


def test_arrange_lets_a_declaration_replace_the_derived_order():
    entries = [Entry("a", writes=("grads",)), Entry("b", reads=("grads",), before=("a",))]
    assert names(entries) == ["b", "a"]
    assert reasons(entries) == {"b": (), "a": ("'b' says before 'a'",)}


def test_arrange_lets_a_chain_replace_the_derived_order():
    entries = [Entry("a", writes=("grads",)), Entry("b", reads=("grads",))]
    assert names(entries, [("b", "a")]) == ["b", "a"]
    assert reasons(entries, [("b", "a")]) == {"b": (), "a": ("the order given to the learner",)}


def test_arrange_lets_a_chain_replace_what_a_plugin_declares():
    entries = [Entry("a", before=("b",)), Entry("b", after=("a",))]
    assert names(entries, [("b", "a")]) == ["b", "a"]
    assert reasons(entries, [("b", "a")])["a"] == ("the order given to the learner",)


def test_arrange_lets_two_chains_together_replace_what_a_plugin_declares():
    entries = [Entry("a", before=("c",)), Entry("b"), Entry("c")]
    assert names(entries, [("c", "b"), ("b", "a")]) == ["c", "b", "a"]


def test_arrange_replaces_only_the_pair_that_an_explicit_order_names():
    entries = [
        Entry("a", writes=("grads",)),
        Entry("b", reads=("grads",), before=("a",)),
        Entry("c", reads=("grads",)),
    ]
    assert names(entries) == ["b", "a", "c"]


def test_arrange_takes_the_words_of_a_chain_by_what_plugins_provide():
    entries = [Entry("a", provides="clip"), Entry("b", provides="noise")]
    assert names(entries, [("noise", "clip")]) == ["b", "a"]


def test_arrange_orders_the_ends_of_a_chain_whose_middle_is_absent():
    assert names([Entry("a"), Entry("b")], [("b", "absent", "a")]) == ["b", "a"]


@pytest.mark.parametrize("verb", ["update", "write"])
def test_arrange_refuses_two_changes_of_the_same_state(verb):
    entries = [Entry("b", **{f"{verb}s": ("grads",)}), Entry("a", **{f"{verb}s": ("grads",)})]
    with pytest.raises(OrderError) as caught:
        names(entries)
    assert str(caught.value) == (
        f"update_begin: plugins 'a' and 'b' both {verb} 'grads', and nothing says which comes first. "
        'Give the learner order=["a", "b"] (or the reverse), or declare before=("b",) or after=("b",) in \'a\''
    )


def test_arrange_names_the_narrower_of_two_states_that_meet():
    with pytest.raises(OrderError, match=r"both update 'optimizer\.lr', and nothing"):
        names([Entry("a", updates=("optimizer",)), Entry("b", updates=("optimizer.lr",))])


def test_arrange_refuses_two_updaters_that_are_ordered_by_access_alone():
    with pytest.raises(OrderError, match="both update 'grads'"):
        names([Entry("a", updates=("grads",), writes=("loss",)), Entry("b", updates=("grads",), reads=("loss",))])


@pytest.mark.parametrize(
    "settled",
    [
        {"before": ("b",)},
        {"after": ("b",)},
        {"before": ("noise",)},
    ],
)
def test_arrange_takes_two_updaters_with_a_declaration_of_either(settled):
    first = ["b", "a"] if "after" in settled else ["a", "b"]
    entries = [Entry("a", updates=("grads",), **settled), Entry("b", provides="noise", updates=("grads",))]
    assert names(entries) == first


def test_arrange_takes_two_updaters_with_a_chain_of_the_user():
    assert names([Entry("a", updates=("grads",)), Entry("b", updates=("grads",))], [("b", "a")]) == ["b", "a"]


def test_arrange_settles_two_updaters_through_a_third_plugin():
    entries = [
        Entry("a", updates=("grads",)),
        Entry("b", after=("c",), before=("a",)),
        Entry("c", updates=("grads",)),
    ]
    assert names(entries) == ["c", "b", "a"]


def test_arrange_settles_two_updaters_through_a_chain_and_a_declaration():
    entries = [Entry("a", updates=("grads",)), Entry("b", before=("a",)), Entry("c", updates=("grads",))]
    assert names(entries, [("c", "b")]) == ["c", "b", "a"]


def test_arrange_needs_no_order_for_a_writer_and_an_updater():
    assert names([Entry("a", updates=("grads",)), Entry("b", writes=("grads",))]) == ["b", "a"]


def test_arrange_refuses_two_declarations_against_each_other():
    with pytest.raises(OrderError) as caught:
        names([Entry("a", before=("b",)), Entry("b", before=("a",))])
    assert str(caught.value) == (
        "update_begin: the order of the plugins is a cycle, 'a' -> 'b' -> 'a': "
        "'a' says before 'b'; 'b' says before 'a'. "
        'Remove one of these declarations, or give the learner order=["b", "a"] to turn one round'
    )


def test_arrange_prints_the_path_of_a_longer_cycle():
    entries = [
        Entry("a", writes=("loss",), reads=("outputs",)),
        Entry("b", reads=("loss",), before=("c",)),
        Entry("c", writes=("outputs",)),
        Entry("d", reads=("outputs",)),
    ]
    with pytest.raises(OrderError) as caught:
        names(entries)
    assert str(caught.value) == (
        "update_begin: the order of the plugins is a cycle, 'a' -> 'b' -> 'c' -> 'a': "
        "'a' writes 'loss', 'b' reads 'loss'; 'b' says before 'c'; 'c' writes 'outputs', 'a' reads 'outputs'. "
        'Remove one of these declarations, or give the learner order=["b", "a"] to turn one round'
    )


def test_arrange_takes_the_chain_that_the_message_of_a_cycle_proposes():
    entries = [Entry("a", before=("b",)), Entry("b", before=("c",)), Entry("c", before=("a",))]
    with pytest.raises(OrderError) as caught:
        names(entries)
    chain = re.search(r'order=\["(\w)", "(\w)"\]', str(caught.value)).groups()
    placed = names(entries, [chain])
    assert placed.index(chain[0]) < placed.index(chain[1])


def test_arrange_refuses_chains_that_contradict_each_other():
    with pytest.raises(OrderError) as caught:
        names([Entry("a"), Entry("b")], [("a", "b"), ("b", "a")])
    assert str(caught.value) == (
        "update_begin: the order of the plugins is a cycle, 'a' -> 'b' -> 'a': "
        "the order given to the learner; the order given to the learner. Remove one of them from order=[...]"
    )


def test_arrange_proposes_no_chain_against_a_chain_of_the_user():
    entries = [Entry("a"), Entry("b", before=("c",)), Entry("c", before=("a",))]
    with pytest.raises(OrderError, match=r"'a' -> 'b' -> 'c' -> 'a': .* order=\[\"c\", \"b\"\] to turn one round"):
        names(entries, [("a", "b")])


# Against a judgement that is written from the rules and tries every permutation

STATES = ("grads", "loss", "optimizer", "optimizer.lr", "optimizer.momentum", "metrics.val/loss", "metrics.*/loss")
READABLE = (*STATES, "a.count", "b", "clip.norm", "*")
WORDS = ("a", "b", "c", "d", "e", "clip", "noise", "absent")


def some(values, most):
    return st.lists(st.sampled_from(values), max_size=most, unique=True).map(tuple)


@st.composite
def plugin_lists(draw):
    labels = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=5, unique=True))
    return [
        Entry(
            label,
            provides=draw(st.sampled_from(("", "", "clip", "noise"))),
            reads=draw(some(READABLE, 2)),
            updates=draw(some(STATES, 1)),
            writes=draw(some(STATES, 1)),
            before=draw(some(WORDS, 1)),
            after=draw(some(WORDS, 1)),
        )
        for label in labels
    ]


chain_lists = st.lists(st.lists(st.sampled_from(WORDS), min_size=2, max_size=3, unique=True), max_size=2)


def meet(one, other):
    a, b = one.split("."), other.split(".")
    return all(fnmatchcase(x, y) or fnmatchcase(y, x) for x, y in zip(a, b, strict=False))


def connected(edges, start, goal, seen=()):
    nexts = [b for a, b in edges if a == start and b not in seen]
    return goal in nexts or any(connected(edges, b, goal, (*seen, b)) for b in nexts)


class Judgement:
    """What the rules say of a list of plugins: its conflicts, the pairs it orders, the order if there is one."""

    def __init__(self, entries, chains):
        self.entries = {entry.plugin: entry for entry in entries}
        pairs = list(combinations(sorted(self.entries), 2))
        called = {w: [e.plugin for e in entries if w in (e.plugin, e.provides)] for w in WORDS}
        user = set()
        for first, second in (pair for chain in chains for pair in combinations(chain, 2)):
            user |= {(a, b) for a in called[first] for b in called[second] if a != b}
        free = {p for a, b in pairs if not (connected(user, a, b) or connected(user, b, a)) for p in ((a, b), (b, a))}
        says = {(e.plugin, b) for e in entries for w in e.before for b in called[w]}
        says |= {(a, e.plugin) for e in entries for w in e.after for a in called[w]}
        explicit = user | (says & free)
        self.conflicts = set()
        self.edges = set(explicit)
        for a, b in pairs:
            if connected(explicit, a, b) or connected(explicit, b, a):
                continue
            if self.clash(a, b):
                self.conflicts.add((a, b))
            self.edges |= {(x, y) for x, y in ((a, b), (b, a)) if self.derived(x, y)}
        self.order = next((list(p) for p in permutations(sorted(self.entries)) if self.valid(p)), None)

    def clash(self, a, b):
        one, other = self.entries[a], self.entries[b]
        both = ((one.updates, other.updates), (one.writes, other.writes))
        return any(meet(s, t) for mine, theirs in both for s in mine for t in theirs)

    def derived(self, a, b):
        first, second = self.entries[a], self.entries[b]
        if "*" in second.reads and "*" not in first.reads:
            return True
        made = [*first.writes, first.plugin, *([first.provides] if first.provides else [])]
        changed = [*second.updates, *second.writes]
        looks = [r for r in second.reads if r != "*" and not any(r == s or r.startswith(s + ".") for s in changed)]
        return (
            any(meet(s, t) for s in made for t in second.updates)
            or any(meet(s, t) for s in made for t in looks)
            or any(meet(s, t) for s in first.updates for t in looks)
        )

    def valid(self, order):
        return all(order.index(a) < order.index(b) for a, b in self.edges)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(plugin_lists(), chain_lists)
def test_arrange_agrees_with_a_search_of_all_permutations(entries, chains):
    judgement = Judgement(entries, chains)
    try:
        found = names(entries, chains)
    except OrderError as error:
        message = str(error)
        if ambiguous := re.match(r"update_begin: plugins '(\w)' and '(\w)' both", message):
            assert ambiguous.groups() in judgement.conflicts
        else:
            assert not judgement.conflicts
            path = re.findall(r"'(\w)'", re.search(r"is a cycle, (.*?): ", message).group(1))
            assert len(path) > 2
            assert path[0] == path[-1]
            assert set(pairwise(path)) <= judgement.edges
            assert judgement.order is None
    else:
        assert not judgement.conflicts
        assert found == judgement.order


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(plugin_lists(), chain_lists, st.randoms(use_true_random=False))
def test_arrange_says_the_same_for_every_order_of_the_list(entries, chains, rng):
    def outcome(given):
        try:
            return arrange(given, chains, "update_begin")
        except OrderError as error:
            return str(error)

    shuffled = list(entries)
    rng.shuffle(shuffled)
    assert outcome(shuffled) == outcome(entries)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(plugin_lists(), chain_lists)
def test_arrange_accepts_every_list_once_the_user_orders_all_of_it(entries, chains):
    everyone = tuple(sorted((entry.plugin for entry in entries), reverse=True))
    assert names(entries, [everyone]) == list(everyone)


# A learner's plan


class Sync:
    @hookimpl(writes=("grads",))
    def update_begin(self, step):
        pass


class Unscale:
    @hookimpl(writes=("grads",), after=("sync",))
    def update_begin(self, step):
        pass

    @hookimpl
    def backward_begin(self, step):
        pass


class Clip:
    provides = "clip"

    @hookimpl(updates=("grads",))
    def update_begin(self, step):
        pass


class Noise:
    @hookimpl(updates=("grads",), after=("clip",))
    def update_begin(self, step):
        pass


class Norm:
    @hookimpl(reads=("grads",))
    def update_begin(self, step):
        pass

    @hookimpl(writes=("metrics.*/norm",))
    def epoch_end(self, learner):
        pass


class Log:
    @hookimpl(reads=("metrics",))
    def epoch_end(self, learner):
        pass


class Save:
    @hookimpl(reads=("*",))
    def epoch_end(self, learner):
        pass

    @hookimpl(reads=("*",))
    def update_begin(self, step):
        pass


SEVEN = (Sync(), Unscale(), Clip(), Noise(), Norm(), Log(), Save())


@pytest.fixture(scope="module")
def one_plan():
    def explain(plugins):
        learner = Learner(nn.Linear(4, 3), nn.CrossEntropyLoss(), standard=False, plugins=plugins)
        return learner.explain()

    torch.manual_seed(0)
    plan = explain(SEVEN)
    order = [row.plugin for row in plan.rows if (row.phase, row.hook) == ("train", "update_begin")]
    assert order == ["sync", "unscale", "clip", "noise", "norm", "save"]
    return lambda plugins: explain(plugins) == plan


def test_learner_has_one_plan_for_sampled_orders_of_seven_plugins(one_plan):
    rng = random.Random(0)
    assert all(one_plan(rng.sample(SEVEN, 7)) for _ in range(60))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_learner_has_one_plan_for_all_orders_of_seven_plugins(one_plan):
    assert sum(one_plan(order) for order in permutations(SEVEN)) == 5040
