"""Write the tutorials' scripts, notebooks and picture from their pages: ``python docs/make_tutorials.py``.

A notebook's cells are the page's paragraphs and code; it is executed, so that it shows what the code prints.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
PAGES = sorted(DOCS.glob("tutorial*.md"))
CODE = re.compile(r"^```python\n(.*?)^```$\n?|^<!-- output.*?-->\n```text\n.*?^```$\n?", re.MULTILINE | re.DOTALL)


def script(page: Path) -> str:
    """The page's code as one program."""
    first = page.read_text().partition("\n")[0].removeprefix("# ")
    code = "\n".join(match[1] for match in CODE.finditer(page.read_text()) if match[1])
    return f'"""{first}. The text is docs/{page.name}."""\n\n{code}'


def notebook(page: Path) -> NotebookNode:
    """The page as a notebook that has not run."""
    text = re.sub(r"\n!\[[^\n]*\n", "\n", page.read_text())
    cells: list[NotebookNode] = []
    at = 0
    for match in [*CODE.finditer(text), None]:
        words = text[at : match.start() if match else len(text)].strip()
        if words:
            cells.append(new_markdown_cell(words))
        if match and match[1]:
            cells.append(new_code_cell(match[1].rstrip()))
        at = match.end() if match else at
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"
    made = new_notebook(cells=cells)
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return made


def execute(made: NotebookNode, folder: Path) -> None:
    """Run a notebook's cells in a folder; raises what a cell raises."""
    NotebookClient(made, timeout=120, coalesce_streams=True, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in made.cells:
        cell.metadata.pop("execution", None)  # the times, which differ each time
        if "outputs" in cell:  # what goes to stderr names folders
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]


def main() -> None:
    """Write them all."""
    for page in PAGES:
        name = page.stem.replace("-", "_")
        (EXAMPLES / f"{name}.py").write_text(script(page))
        made = notebook(page)
        with tempfile.TemporaryDirectory() as folder:
            execute(made, Path(folder))
            if page.stem == "tutorial":
                shutil.copy(Path(folder, "wine.png"), DOCS / "images" / "tutorial.png")
        nbformat.write(made, EXAMPLES / f"{name}.ipynb")


if __name__ == "__main__":
    main()
