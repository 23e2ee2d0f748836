"""The documentation site. `python docs/serve.py` builds it and shows it; links in the pages are those on disk."""

import html
import sys
import tomllib
from pathlib import Path
from types import MemberDescriptorType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.autodoc import INSTANCEATTR

from loopkit.base.version import __version__

sys.path.insert(0, str(Path(__file__).parent))
import api_pages

project = "loopkit"
author = "the loopkit authors"
copyright = author
version = release = __version__
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**.md", "plugins/*/README.md"]
exclude_patterns = ["docs/examples"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
templates_path = ["_templates"]

myst_heading_anchors = 4
"""Headings that a page can link to, down to ``####``."""
suppress_warnings = ["ref.python"]
"""A class that two public modules list may be linked in either."""
default_role = "py:obj"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"loopkit {version}"
html_additional_pages = {"index": "to_readme.html"}
html_copy_source = False
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_js_files = ["search.js"]
html_css_files = ["site.css"]


SHORTEST, LONGEST = 25, 160
"""Characters of a page's description."""

WORDS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("search.toml").read_text())
"""Words that a search finds a page by, besides those of its text."""


def complete(app: Sphinx, page: str, source: list[str]) -> None:
    """Add to a page what it would show as code if it were read as a file: words, the list of pages, the reference."""
    if page in WORDS:
        entries = "".join(f"   ! single: {word}\n" for word in WORDS[page])
        title, text = source[0].split("\n", 1)
        source[0] = f"{title}\n\n```{{eval-rst}}\n.. index::\n{entries}```\n{text}"
    if page == root_doc:
        source[0] += Path(__file__).with_name("contents.txt").read_text()
    if page == "docs/api":
        source[0] = api_pages.index(source[0])


def write_api(app: Sphinx) -> None:
    """Write a page for each public name, before Sphinx looks for pages."""
    if "docs/api.md" not in app.config.exclude_patterns:
        api_pages.write()


def own_document(app: Sphinx, doctree: nodes.document) -> None:
    """Let all nodes of a page be of its document.

    MyST leaves those of ``eval-rst`` with an inner document, which holds the environment: 3 MB on the disk a page.
    """
    for node in doctree.findall():
        node.document = doctree


def describe(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Give a page the description that search engines show: its first paragraph of some length."""
    paragraphs = doctree.findall(nodes.paragraph) if doctree else iter(())
    texts = (" ".join(each.astext().split()) for each in paragraphs)
    text = next((text for text in texts if len(text) > SHORTEST and not text.startswith("API reference /")), "")
    if text:
        shown = text if len(text) <= LONGEST else text[:LONGEST].rpartition(" ")[0] + " ..."
        context["metatags"] += f'<meta name="description" content="{html.escape(shown)}">'


def keep_colons(app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]) -> None:
    """Begin an attribute's docstring with an empty line: what stands before a colon in the first one is no type."""
    if what == "attribute":
        lines.insert(0, "")


def skip_instance_attributes(app: Sphinx, what: str, name: str, of: Any, skip: bool, options: object) -> bool | None:
    """Show the methods and properties of a class, as ``loopkit api`` does."""
    return True if of is INSTANCEATTR or isinstance(of, MemberDescriptorType) else None


def setup(app: Sphinx) -> None:
    """Tell Sphinx of them."""
    app.connect("builder-inited", write_api)
    app.connect("source-read", complete)
    app.connect("doctree-read", own_document)
    app.connect("html-page-context", describe)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
    app.connect("autodoc-skip-member", skip_instance_attributes)
