import json
import math
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopkit_monitor import lines
from loopkit_monitor.lines import Points, parse


def line(values, phase="train", epoch=0, step=1, update=1, time=1763800000.123):
    """A line as JsonLines writes it."""
    shown = {name: value if math.isfinite(value) else str(value) for name, value in values.items()}
    place = {"phase": phase, "epoch": epoch, "step": step, "update": update, "time": round(time, 3)}
    return json.dumps({**place, "values": shown}) + "\n"


def by_json(text):
    """What `json` reads, as `parse` gives it."""
    found = {}
    for each in text.splitlines():
        said = json.loads(each)
        for name, value in said["values"].items():
            found.setdefault(name, []).append((said["step"], float(value), said["time"]))
    return found


def rows(points: Points):
    return list(zip(points.step.tolist(), points.value.tolist(), points.time.tolist(), strict=True))


def values(made):
    return {name: each.value.tolist() for name, each in made.points.items()}


def same(got, want):
    assert list(got) == list(want)
    for name, points in got.items():
        assert np.array_equal(np.array(rows(points)), np.array(want[name]), equal_nan=True), name


def test_lines_of_values_are_read_as_json_reads_them():
    order = random.Random(0)
    lines = []
    for step in range(1, 3000):
        logged = {"train/loss": order.gauss(0, 1), "lr": 10.0 ** -order.randrange(20)}
        if step % 10 == 0:
            logged["odd"] = order.choice([math.nan, math.inf, -math.inf])
        lines.append(line(logged, step=step, update=step // 2, time=1763800000 + step / 7))
        if step % 100 == 0:
            lines.append(line({"val/loss": float(np.float32(order.random()))}, "val", epoch=step // 100, step=step))
    text = "".join(lines)
    made = parse(text.encode(), {})
    same(made.points, by_json(text))
    assert (made.foreign, made.others, made.step, made.epoch) == (0, [], 2999, 0)
    assert made.time == made.points["lr"].time[-1]
    assert {name: each.phase for name, each in made.points.items()} == {
        "train/loss": "train",
        "lr": "train",
        "odd": "train",
        "val/loss": "val",
    }


@settings(max_examples=200, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.floats(), min_size=1), min_size=1, max_size=40))
def test_values_are_the_same_to_the_last_bit(logged):
    got = values(parse("".join(map(line, logged)).encode()))
    for name in got:
        want = [each[name] for each in logged if name in each]
        assert [struct.pack("d", v) for v in got[name] if v == v] == [struct.pack("d", v) for v in want if v == v]
        assert [math.isnan(v) for v in got[name]] == [math.isnan(v) for v in want]


def test_values_near_the_middle_of_two_floats_are_rounded_right():
    order = random.Random(0)
    shown = []
    for _ in range(50_000):
        mantissa, power = order.randrange(10 ** order.randrange(14, 25)), order.randrange(0, 22)
        text = f"{mantissa:0{power + 1}d}"
        shown.append(f"{text[: len(text) - power]}.{text[len(text) - power :]}" if power else str(mantissa))
    text = "".join(line({"x": 0.5}).replace("0.5", value, 1) for value in shown)
    assert values(parse(text.encode())) == {"x": [float(value) for value in shown]}


@pytest.mark.parametrize(
    "value",
    [
        *("00.5", ".5", "5.", "-", "1_0", "1.2.3", "--1", "0x10", "1e", "+1", "", "NaN", "Infinity", "-Infinity"),
        *('"no"', '"1"', "true", "null", "[1]", "{}", "1" + "0" * 400, "1" + "0" * 5000),
    ],
)
def test_a_line_with_what_is_no_number_is_left_out(value):
    bad = line({"x": 0.25, "y": 1.0}).replace("0.25", value)
    made = parse((bad + line({"x": 2.0})).encode())
    assert values(made) == {"x": [2.0]}
    assert made.foreign == 1


@pytest.mark.parametrize("field", ["phase", "epoch", "step", "update", "time"])
@pytest.mark.parametrize("said", [":", "01", "-1", "1.5", '"1"', "", "null", "9" * 23, "[1]", "9007199254740992"])
def test_places_that_are_none_never_pass_for_others(field, said):
    bad = json.loads(line({"x": 2.0}, epoch=1, step=11, update=11)) | {field: "HERE"}
    made = parse((line({"x": 1.0}) + json.dumps(bad).replace('"HERE"', said) + "\n").encode())
    allowed = {"phase": ['"1"'], "time": ["-1", "1.5", "9" * 23, "9007199254740992"]}.get(field, [])
    assert values(made) == {"x": [1.0, 2.0] if said in allowed else [1.0]}
    assert made.foreign == (said not in allowed)


@pytest.mark.parametrize("field", ["phase", "epoch", "step", "update", "time", "values"])
def test_a_line_without_all_of_its_place_is_left_out(field):
    said = json.loads(line({"x": 1.0}))
    del said[field]
    made = parse(json.dumps(said).encode() + b"\n")
    assert (made.points, made.foreign) == ({}, 1)


def test_a_line_of_no_values_says_how_far_the_run_is():
    made = parse(line({}, step=3).encode())
    assert (made.points, made.foreign, made.step) == ({}, 0, 3)


@pytest.mark.parametrize("gap", range(3))
def test_lines_near_each_other_and_the_ends_are_found(gap):
    text = "\n" * gap + "{}\n" * gap + line({"x": 1.0}) + "\n" * gap + line({"lr": 2.0}) + "1\n" * gap
    made = parse(text.encode())
    assert values(made) == {"x": [1.0], "lr": [2.0]}
    assert made.foreign == 2 * gap


def test_names_are_data():
    names = ["é", "a\nb", 'q"', "x" * 10_000, ', "phase": "val', '": 3, "x', "", "a/b c", "\\", "\0", "values", "kind"]
    logged = {name: float(index) for index, name in enumerate(names)}
    assert values(parse((line(logged) * 3).encode())) == {name: [value] * 3 for name, value in logged.items()}


def test_half_of_a_surrogate_pair_is_a_name_too():
    text = line({"\ud800": 1.0, "x": math.nan}) + line({"x": 2.0}, phase="\udfff") + line({"\ud800": 3.0}, step=-1)
    made = parse(text.encode())
    assert (values(made)["\ud800"], made.points["x"].phase, made.foreign) == ([1.0], "\udfff", 1)


def test_of_a_name_that_comes_twice_in_a_line_the_last_value_is_kept():
    made = parse(line({"x": 1.0, "y": 2.0}).replace('"y"', '"x"').encode())
    assert values(made) == {"x": [2.0]}


def test_bytes_that_are_no_text_are_counted():
    made = parse(line({"x": 1.0}).encode().replace(b"x", b"\xff") + line({"x": 1.0}).encode())
    assert (values(made), made.foreign) == ({"x": [1.0]}, 1)


@pytest.mark.parametrize("seed", range(20))
def test_garbage_is_counted_and_hurts_nothing(seed):
    order = random.Random(seed)
    lines = [line({"x": 1.0 + i, "y": 0.5}, step=i).encode() for i in range(300)]
    for _ in range(60):
        index = order.randrange(len(lines))
        torn = bytearray(lines[index][:-1])
        for _ in range(order.randrange(1, 4)):
            torn[order.randrange(len(torn))] = order.choice([0, 34, 48, 58, 92, 123, 125, 255, order.randrange(256)])
        lines[index] = bytes(torn).replace(b"\n", b"") + b"\n"
    made = parse(b"".join(lines))
    want, foreign = [], 0
    for each in lines:
        try:
            said = json.loads(each, parse_constant=lambda constant: 1 / 0)
            numbers = [*said["values"].values(), said["time"]]
            ok = all(type(number) in (int, float) for number in numbers) and isinstance(said["phase"], str)
            counts = [said["step"], said["epoch"], said["update"]]
            ok = ok and all(type(count) is int and 0 <= count < 2**53 for count in counts)
        except (ValueError, KeyError, AttributeError, TypeError, ZeroDivisionError):
            ok = False
        if ok:
            want += [(name, said["step"], value) for name, value in said["values"].items()]
        foreign += not ok
    got = [(name, step, value) for name, each in made.points.items() for step, value, _ in rows(each)]
    assert sorted(got) == sorted(want)
    assert made.foreign == foreign


def test_other_kinds_say_where_they_are():
    data = b'{"kind": "run"}\n{"name": "n", "kind": "text", "text": "hi"}\n[1]\n{"kind": 3}\n\n{"kind": "end"}\n'
    made = parse(data)
    assert [said["kind"] for _, _, said in made.others] == ["run", "text", "end"]
    assert [json.loads(data[start : start + length]) for start, length, _ in made.others] == [
        said for _, _, said in made.others
    ]
    assert made.foreign == 2


def test_other_kinds_come_in_the_order_of_the_log_and_their_values_are_no_curves():
    lines = []
    for step in range(40):
        phase = "val" if step % 3 else "train"
        lines.append(line({"loss": 0.5}, phase, step=step))
        about = {"name": "run/hyperparameters", "kind": "hyperparameters", "values": {"lr": 0.1}, "step": step}
        lines.append(json.dumps(about) + "\n")
    made = parse("".join(lines).encode())
    assert [said["step"] for _, _, said in made.others] == list(range(40))
    assert list(made.points) == ["loss"]


def test_what_is_nested_too_deeply_is_left_out():
    made = parse(
        b'{"name": "t", "kind": "text", "text": ' + b"[" * 60 + b"]" * 60 + b"}\n" + b"[" * 100_000 + b"\n"
        b'{"values": ' + b'{"a": ' * 100_000 + b"\n"
    )
    assert (made.others, made.points, made.foreign) == ([], {}, 3)


def test_more_names_than_are_kept_are_counted():
    logged = {f"name {index}": 1.0 for index in range(20)}
    made = parse((line(logged) + line({"another": 1.0}) + line(logged)).encode(), most_names=15)
    assert list(made.points) == list(logged)[:15]
    assert {len(each.step) for each in made.points.values()} == {2}
    assert made.foreign == 11


def test_phases_that_log_one_name_have_a_curve_each():
    order = random.Random(0)
    lines, want = [line({"acc": 1.0})], {"acc": [1]}
    for step in range(2, 400):
        phase = order.choice(["train", "val", "", "odd\n"])
        lines.append(line({"lr": 0.1, "acc": float(step)} if step % 7 else {"acc": float(step)}, phase, step=step))
        curve = "acc" if phase in ("train", "") else f"{phase}/acc"
        want.setdefault(curve, []).append(step)
    made = parse("".join(lines).encode(), {})
    lr = made.points.pop("lr")
    assert lr.step.tolist() == [step for step in range(2, 400) if step % 7]
    assert values(made) == want
    assert {name: each.phase for name, each in made.points.items()} == {
        "acc": "train",
        "val/acc": "val",
        "odd\n/acc": "odd\n",
    }
    assert (made.step, made.foreign) == (399, 0)


def test_the_phase_of_a_curve_is_that_of_the_lines_before():
    data = "".join(line({"acc": 0.5}, phase) for phase in ("val", "", "train")).encode()
    assert list(parse(data, {}).points) == ["acc", "train/acc"]
    assert list(parse(data, {"acc": "train"}).points) == ["val/acc", "acc"]
    outside = parse(line({"acc": 0.5}, phase="").encode(), {"acc": "train"})
    assert outside.points["acc"].phase == "train"


def test_where_the_phases_of_curves_are_unknown_a_name_has_one():
    data = "".join(line({"acc": 0.5}, phase, step=step) for step, phase in enumerate(("val", "", "train"))).encode()
    assert {name: each.step.tolist() for name, each in parse(data).points.items()} == {"acc": [0, 1, 2]}


@pytest.mark.parametrize(
    "name", ["train/loss", "val/loss", "odd/loss", "resources/cpu", "run/throughput/steps_per_second", "lr", "lr/0"]
)
def test_names_that_say_whose_they_are_stay(name):
    data = "".join(line({name: 0.5}, phase) for phase in ("odd", "train", "")).encode()
    assert {name: len(each.step) for name, each in parse(data, {}).points.items()} == {name: 3}


PLACE = '"epoch":1,"step":7,"update":7,"time":1763800000.5'
ODD = {
    "names in another order": '{"phase":"train",@,"values":{"b":0.25,"a":2}}',
    "another name": '{"phase":"train",@,"values":{"a":0.25,"c":2}}',
    "one name twice": '{"phase":"train",@,"values":{"a":0.25,"a":2}}',
    "one name": '{"phase":"train",@,"values":{"a":0.25}}',
    "another phase": '{"phase":"val",@,"values":{"a":0.25,"b":2}}',
    "a text": '{"phase":"train",@,"values":{"a":"nan","b":2}}',
    "no number": '{"phase":"train",@,"values":{"a":true,"b":2}}',
    "half a step": '{"phase":"train","epoch":1,"step":7.5,"update":7,"time":1.5,"values":{"a":1,"b":2}}',
    "a step below 0": '{"phase":"train","epoch":1,"step":-7,"update":7,"time":1.5,"values":{"a":1,"b":2}}',
    "no time": '{"phase":"train","epoch":1,"step":7,"update":7,"values":{"a":1,"b":2,"time":3}}',
    "a kind": '{"phase":"train",@,"values":{"a":0.25,"b":2},"kind":null}',
    "more of it": '{"phase":"train",@,"values":{"a":0.25,"b":2}}}',
    "a table": '{"kind":"table","name":"t","rows":[["b"]],"columns":["a"],"epoch":1,"step":1}',
    "nothing": "",
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("times", [1, 30])
def test_records_of_lines_that_are_alike_read_what_single_lines_do(monkeypatch, odd, times):
    alike = [line({"a": step / 7, "b": -step}, step=step, epoch=step // 9) for step in range(30)]
    other = "".join(each + ODD[odd].replace("@", PLACE) + "\n" for each in alike[:times])
    text = "".join([*alike, other, *alike]).encode()
    made = parse(text, {})
    monkeypatch.setattr(lines, "FEW", 1 << 60)
    want = parse(text, {})
    same(made.points, {name: rows(each) for name, each in want.points.items()})
    assert [each.phase for each in made.points.values()] == [each.phase for each in want.points.values()]
    for field in ("others", "foreign", "step", "epoch", "time", "epochs", "ends"):
        assert getattr(made, field) == getattr(want, field), field


def test_lines_that_are_alike_are_read_as_records(monkeypatch):
    single = []
    read = lines.parse_values
    monkeypatch.setattr(lines, "parse_values", lambda each: single.append(each) or read(each))
    parse("".join(line({"a": step / 7, "b": -step}, step=step) for step in range(500)).encode(), {})
    assert len(single) == lines.FEW
