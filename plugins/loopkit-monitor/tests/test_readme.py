"""The README's example runs, and prints what it says."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_prints_what_the_readme_says(tmp_path, monkeypatch, capsys):
    text = README.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (said,) = re.findall(r"^<!-- output, numbers differ -->\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    numbers = re.compile(r"\d\.\d{3}")
    printed = capsys.readouterr().out
    shown = "".join(line + "\n" for line in printed.splitlines() if not line.startswith("epoch "))
    assert numbers.sub("N", shown) == numbers.sub("N", said)
    assert float(numbers.search(shown)[0]) > 0.9
