"""What can be told of the page without a browser."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from support import Writer

from loopkit_monitor import views
from loopkit_monitor.page import MODULES, STATIC, embed
from loopkit_monitor.store import Store

SCRIPTS = {name: (STATIC / name).read_text() for name in MODULES}


class Elements(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag):
        self.found.append(("", {}, ""))

    def handle_data(self, data):
        if self.found:
            tag, attrs, text = self.found[-1]
            self.found[-1] = (tag, attrs, text + data)


def elements(page):
    parser = Elements()
    parser.feed(page.decode())
    parser.close()
    return parser.found


@pytest.fixture
def data(tmp_path):
    writer = Writer(tmp_path / "a" / "log.jsonl")
    writer.begin(hyperparameters={"note": "</script><script>alert(1)</script><!--"})
    writer.values(3)
    store = Store(tmp_path)
    store.poll()
    return {"runs": views.runs(store), "details": {"a": views.run(store, "a")}, "series": {}}


def test_own_scripts_are_small():
    assert set(SCRIPTS) == {path.name for path in STATIC.glob("*.js")}
    assert sum(map(len, SCRIPTS.values())) < 190_000


def test_page_takes_nothing_from_elsewhere():
    asked = re.findall(r'(?:href|src)="([^"]*)"', (STATIC / "index.html").read_text())
    assert asked == ["data:,", "static/app.css", "static/app.js"]
    for name, script in SCRIPTS.items():
        assert set(re.findall(r"https?://[^\"'` ]*", script)) <= {"http://www.w3.org/2000/svg"}, name


def test_page_makes_no_markup_of_data():
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\b|new Function"
    for name, script in SCRIPTS.items():
        assert not re.search(forbidden, script), name


def test_modules_import_from_those_before_and_share_no_name():
    declared = {}
    for place, (name, script) in enumerate(SCRIPTS.items()):
        for imported in re.findall(r'from "\./([a-z]+\.js)"', script):
            assert MODULES.index(imported) < place
        assert not re.search(r"^import .* as ", script, re.MULTILINE)
        for each in re.findall(r"^(?:export )?(?:async )?(?:const|let|function|class) (\w+)", script, re.MULTILINE):
            assert declared.setdefault(each, name) == name, each
        for line in re.findall(r"^(?:export )?(?:const|let) .*", script, re.MULTILINE):
            for each in re.findall(r"(?<=, )([A-Z]+) = ", line):
                assert declared.setdefault(each, name) == name, each


def test_embed_has_data_and_the_hashes_of_its_scripts(data):
    found = elements(embed(data))
    policy = next(attrs["content"] for tag, attrs, _ in found if attrs.get("http-equiv"))
    scripts = [(attrs, text) for tag, attrs, text in found if tag == "script"]
    assert [attrs.get("type") for attrs, _ in scripts] == ["application/json", "module"]
    assert json.loads(scripts[0][1]) == json.loads(views.encode(data))
    assert "<" not in scripts[0][1]
    for text in [text for _, text in scripts[1:]] + [text for tag, _, text in found if tag == "style"]:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"^(import|export (const|function|class))", scripts[1][1], re.MULTILINE)
