import json
import math
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopkit_monitor import lines as lines_module
from loopkit_monitor.lines import Points, latest, parse


def scalar(name, value, phase="train", epoch=0, step=1, update=1, time=1763800000.123):
    """A line as JsonLines writes it."""
    shown = repr(value) if isinstance(value, float) and math.isfinite(value) else json.dumps(str(value))
    return (
        f'{{"name": {json.dumps(name)}, "value": {shown}, "phase": {json.dumps(phase)}, "epoch": {epoch}, '
        f'"step": {step}, "update": {update}, "time": {time:.3f}}}\n'
    )


def by_json(text):
    """What `json` reads, as `parse` gives it."""
    found = {}
    for line in text.splitlines():
        said = json.loads(line)
        found.setdefault(said["name"], []).append((said["step"], float(said["value"]), said["time"]))
    return found


def rows(points: Points):
    return list(zip(points.step.tolist(), points.value.tolist(), points.time.tolist(), strict=True))


def same(got, want):
    assert list(got) == list(want)
    for name, points in got.items():
        assert np.array_equal(np.array(rows(points)), np.array(want[name]), equal_nan=True), name


def test_regular_lines_are_read_as_json_reads_them():
    order = random.Random(0)
    lines = []
    for step in range(1, 3000):
        lines.append(scalar("train/loss", order.gauss(0, 1), step=step, update=step // 2, time=1763800000 + step / 7))
        lines.append(scalar("lr", 0.001 * step, step=step))
        if step % 100 == 0:
            lines.append(
                scalar("val/loss", float(np.float32(order.random())), phase="val", epoch=step // 100, step=step)
            )
    text = "".join(lines)
    made = parse(text.encode())
    same(made.points, by_json(text))
    assert (made.foreign, made.others, made.step, made.epoch) == (0, [], 2999, 0)
    assert made.points["val/loss"].phase == "val"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(), min_size=1, max_size=40))
def test_values_are_the_same_to_the_last_bit(values):
    text = "".join(scalar("x", value) for value in values)
    got = parse(text.encode()).points["x"].value.tolist()
    assert [struct.pack("d", v) for v in got if v == v] == [struct.pack("d", v) for v in values if v == v]
    assert [math.isnan(v) for v in got] == [math.isnan(v) for v in values]


def test_lines_of_the_usual_form_are_not_left_to_json(monkeypatch):
    names = [f"layers.{index}.attention.weight/grad_norm" for index in range(10, 90)]
    order = random.Random(0)
    text = "".join(
        scalar(name, order.uniform(-1, 1) * 10.0 ** -order.randrange(9), step=step, epoch=step // 10)
        for step in range(1, 40)
        for name in names
    )
    want = by_json(text)
    monkeypatch.setattr(lines_module, "parse_line", pytest.fail)
    same(parse(text.encode()).points, want)


def test_values_with_a_power_are_read_as_json_reads_them():
    order = random.Random(0)
    values = [order.choice((1, -1)) * order.random() * 10.0 ** -order.randrange(4, 20) for _ in range(5000)]
    values += [float(f"{order.randrange(1, 999)}e-{power:02d}") for power in range(5, 40)]
    text = "".join(scalar("lr", value) for value in values)
    assert parse(text.encode()).points["lr"].value.tolist() == values
    odd = ["0e-05", "00e-05", "-e-05", "1.e-05", ".5e-05", "1.5e-0", "1.5e-x5", "1.5ee-05", "e-05", "1-e-05", "1 e-05"]
    text = "".join(scalar("lr", 0.25).replace("0.25", said) for said in odd * 2)
    made = parse(text.encode() + scalar("lr", 1.0).encode())
    assert (made.points["lr"].value.tolist(), made.foreign) == ([0.0, 1.5, 0.0, 1.5, 1.0], 18)


@pytest.mark.parametrize("gap", range(3))
def test_lines_near_each_other_and_the_ends_are_found(gap):
    text = "\n" * gap + "{}\n" * gap + scalar("x", 1.0) + "\n" * gap + scalar("lr", 2.0) + "1\n" * gap
    made = parse(text.encode())
    assert {name: each.value.tolist() for name, each in made.points.items()} == {"x": [1.0], "lr": [2.0]}
    assert made.foreign == 2 * gap


def test_values_near_the_middle_of_two_floats_are_rounded_right():
    order = random.Random(0)
    values = []
    while len(values) < 50_000:
        mantissa, power = order.randrange(10 ** order.randrange(14, 19)), order.randrange(0, 22)
        text = f"{mantissa:0{power + 1}d}"
        values.append(f"{text[: len(text) - power]}.{text[len(text) - power :]}" if power else text)
    text = "".join(scalar("x", 0.5).replace("0.5", value, 1) for value in values)
    assert parse(text.encode()).points["x"].value.tolist() == [float(value) for value in values]


@pytest.mark.parametrize(
    "value",
    ["00.5", ".5", "5.", "-", "1_0", "1.2.3", "--1", "0x10", "1e", "+1", "", "NaN", "Infinity", '"no"', "true", "null"],
)
def test_what_is_no_number_of_json_is_left_out(value):
    made = parse(scalar("x", 0.25).replace("0.25", value).encode() + scalar("x", 2.0).encode())
    assert made.points["x"].value.tolist() == [2.0]
    assert made.foreign == 1


@pytest.mark.parametrize("field", ["epoch", "step", "update", "time"])
@pytest.mark.parametrize("said", [":", "01", "-1", "1.5", '"1"', "", "1?", "9" * 23, "[1]"])
def test_places_that_are_no_numbers_never_pass_for_others(field, said):
    lines = [scalar("x", 1.0, epoch=1, step=11, update=11), scalar("x", 2.0, epoch=1, step=11, update=11)]
    before = json.loads(lines[1])[field]
    shown = f"{before:.3f}" if field == "time" else str(before)
    lines[1] = lines[1].replace(f'"{field}": {shown}', f'"{field}": {said}')
    got = parse("".join(lines).encode()).points["x"].value.tolist()
    allowed = field == "update" or (field == "time" and said in ("1.5", "-1", "9" * 23))
    try:
        json.loads(lines[1])
    except ValueError:
        allowed = False
    assert got == ([1.0, 2.0] if allowed else [1.0])


def test_names_are_data():
    names = ["é", "a\nb", 'q"', "x" * 10_000, ', "phase": "val', '", "value": 3, "x": "', "", "\ud800", "a/b c", "\\"]
    text = "".join(scalar(name, float(index)) for index, name in enumerate(names) for _ in range(3))
    made = parse(text.encode())
    assert {name: each.value.tolist() for name, each in made.points.items()} == {
        name: [float(index)] * 3 for index, name in enumerate(names)
    }


def test_points_of_a_name_keep_their_order_whatever_their_form():
    text = "".join(
        scalar("x", float(i), step=i) if i % 3 else json.dumps({"step": i, "name": "x", "value": i, "time": 1}) + "\n"
        for i in range(1, 200)
    )
    assert parse(text.encode()).points["x"].step.tolist() == list(range(1, 200))


@pytest.mark.parametrize("seed", range(20))
def test_garbage_is_counted_and_hurts_nothing(seed):
    order = random.Random(seed)
    lines = [scalar("x", 1.0 + i, step=i).encode() for i in range(300)]
    for _ in range(60):
        index = order.randrange(len(lines))
        line = bytearray(lines[index][:-1])
        for _ in range(order.randrange(1, 4)):
            line[order.randrange(len(line))] = order.choice([0, 34, 48, 58, 92, 123, 125, 255, order.randrange(256)])
        lines[index] = bytes(line).replace(b"\n", b"") + b"\n"
    want, first = [], {}
    for line in lines:
        try:
            said = json.loads(line, parse_constant=lambda constant: 1 / 0)
            kind = said.get("kind", "value")
            ok = kind == "value" and type(said["value"]) in (int, float) and type(said.get("time", 0)) in (int, float)
            ok = ok and all(type(said.get(key, 0)) is int and said.get(key, 0) >= 0 for key in ("step", "epoch"))
            ok = ok and isinstance(said.get("phase", ""), str)
            if ok:
                name, phase = said["name"], said.get("phase", "")
                curve = name if not phase or first.setdefault(name, phase) == phase else f"{phase}/{name}"
                want.append((curve, said.get("step", 0), said["value"]))
        except (ValueError, KeyError, AttributeError, ZeroDivisionError):
            continue
    made = parse(b"".join(lines))
    got = [(name, step, value) for name, each in made.points.items() for step, value, _ in rows(each)]
    assert sorted(got) == sorted(want)


def test_other_kinds_say_where_they_are():
    data = b'{"kind": "run"}\n{"name": "n", "kind": "text", "text": "hi"}\n[1]\n{"kind": 3}\n\n{"kind": "end"}\n'
    made = parse(data)
    assert [said["kind"] for _, _, said in made.others] == ["run", "text", "end"]
    assert [json.loads(data[start : start + length]) for start, length, _ in made.others] == [
        said for _, _, said in made.others
    ]
    assert made.foreign == 2


def test_other_kinds_come_in_the_order_of_the_log():
    lines = []
    for step in range(40):
        phase = "val" if step % 3 else "train"
        lines.append(scalar("loss", 0.5, step=step, phase=phase))
        lines.append(
            scalar("note", 0.5, step=step, phase=phase).replace('"value": 0.5', '"kind": "text", "text": "hi"')
        )
    made = parse("".join(lines).encode())
    assert [said["step"] for _, _, said in made.others] == list(range(40))


def test_what_is_nested_too_deeply_is_left_out():
    made = parse(b'{"name": "t", "kind": "text", "text": ' + b"[" * 60 + b"]" * 60 + b"}\n" + b"[" * 100_000 + b"\n")
    assert (made.others, made.foreign) == ([], 2)


def test_more_names_than_are_kept_are_counted():
    text = "".join(scalar(f"name {index}", 1.0) for index in range(30))
    made = parse(text.encode(), most_names=10)
    assert (len(made.points), made.foreign) == (10, 20)


def test_phases_that_log_one_name_have_a_curve_each():
    order = random.Random(0)
    lines, want = [scalar("acc", 1.0)], {"acc": [1]}
    for step in range(2, 400):
        phase = order.choice(["train", "val", "", "odd\n"])
        line = scalar("acc", float(step), step=step, phase=phase)
        lines.append(line if step % 7 else line.replace('": ', '":'))
        curve = "acc" if phase in ("train", "") else f"{phase}/acc"
        want.setdefault(curve, []).append(step)
    made = parse("".join(lines).encode())
    assert {name: each.value.tolist() for name, each in made.points.items()} == want
    assert {name: each.phase for name, each in made.points.items()} == {
        "acc": "train",
        "val/acc": "val",
        "odd\n/acc": "odd\n",
    }
    assert (made.step, made.foreign) == (399, 0)


def test_the_phase_of_a_curve_is_that_of_the_lines_before():
    data = "".join(scalar("acc", 0.5, phase=phase) for phase in ("val", "", "train")).encode()
    assert list(parse(data).points) == ["acc", "train/acc"]
    assert list(parse(data, phases={"acc": "train"}).points) == ["val/acc", "acc"]
    outside = parse(scalar("acc", 0.5, phase="").encode(), phases={"acc": "train"})
    assert outside.points["acc"].phase == "train"


@pytest.mark.parametrize(
    "name", ["train/loss", "val/loss", "odd/loss", "resources/cpu", "run/throughput/steps_per_second", "lr", "lr/0"]
)
def test_names_that_say_whose_they_are_stay(name):
    data = "".join(scalar(name, 0.5, phase=phase) for phase in ("odd", "train", "")).encode()
    assert {name: len(each.step) for name, each in parse(data).points.items()} == {name: 3}


def test_latest_is_what_parse_says_last():
    names = ["a", "é", 'q", "v', "a\\", "b/c", "", "x" * 300]
    phases = {name: ("train", "val")[index % 2] for index, name in enumerate(names)}
    order = random.Random(0)
    lines = []
    for step in range(400):
        name = order.choice(names)
        line = scalar(name, order.choice([1.5, 2e-7, math.inf]), step=step, phase=phases[name])
        choice = order.randrange(10)
        if choice == 0:
            line = json.dumps({"name": name, "kind": "text", "text": "t", "step": step, "time": step}) + "\n"
        elif choice == 1:
            line = json.dumps({"phase": phases[name], "name": name, "value": step, "time": step}) + "\n"
        elif choice == 2:
            line = line[: order.randrange(len(line) - 1)] + "\n"
        elif choice == 3:
            line = json.dumps({"kind": order.choice(["run", "end"]), "time": step}) + "\n"
        lines.append(line)
    data = "".join(lines).encode()
    whole, made = parse(data), latest(data)
    assert {name: rows(each)[-1:] for name, each in whole.points.items()} == {
        name: rows(each)[-1:] for name, each in made.points.items()
    }
    assert (made.step, made.epoch, made.time) == (whole.step, whole.epoch, whole.time)
    fits = [[each for each in found.others if each[2]["kind"] in ("run", "end")] for found in (whole, made)]
    assert fits[0] == fits[1]
    assert {said.get("name"): said for _, _, said in whole.others} == {
        said.get("name"): said for _, _, said in made.others
    }
