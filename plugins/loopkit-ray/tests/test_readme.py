"""What can be said of the README without Ray."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def python_blocks():
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_shows_a_whole_script():
    script, *more = python_blocks()
    for block in (script, *more):
        compile(block, str(README), "exec")
    assert ".fit()" in script
    assert more
