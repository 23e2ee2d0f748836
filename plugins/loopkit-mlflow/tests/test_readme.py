"""The README's program, against a real server."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_program_prints_what_the_readme_says(server, tmp_path, monkeypatch, capsys):
    text = README.read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (output,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert program.count("http://127.0.0.1:5000") == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(program.replace("http://127.0.0.1:5000", server), str(README), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()[-3:]
    numbers = re.compile(r"0\.\d+")
    assert [numbers.sub("0", line) for line in printed] == [numbers.sub("0", line) for line in output.splitlines()]
    pairs = zip(numbers.findall("\n".join(printed)), numbers.findall(output), strict=True)
    assert all(abs(float(here) - float(there)) < 0.03 for here, there in pairs)  # other processors round otherwise
