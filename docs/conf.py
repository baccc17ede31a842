"""Settings of the documentation site; `make docs` builds it."""

import re
import shutil
from pathlib import Path

import implicit_llm

HERE = Path(__file__).parent

project = "implicit-llm"
author = "The implicit-llm contributors"
copyright = author
version = release = implicit_llm.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["tables.css"]
html_title = f"implicit-llm {version}"
default_role = "code"
smartquotes = False  # they would change `--option` in running text
add_module_names = False

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them as they are written
autodoc_preserve_defaults = True

_SECTION = re.compile(r"^(Args|Raises|Returns|Source|Shapes|Source and shapes|Training|Evaluation|Gradient)([:.] )")
_FIELD = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (.*)$")


# Pages outside this folder that have a page of the site which includes them.
INCLUDED = {
    "../results/README.md": "reference/files.md",
    "../workflow/plugins/submitit/README.md": "reference/executor.md",
    "../workflow/plugins/submitit/docs/further.md": "reference/executor.md",
}


def setup(app: object) -> None:
    app.connect("source-read", lambda _, name, source: point_to_included_pages(source))
    app.connect("build-finished", lambda app, _: copy_images(Path(app.outdir)))
    app.connect("autodoc-process-docstring", lambda *arguments: to_rst(arguments[-1]))


def copy_images(site: Path) -> None:
    """Copy the images that pages name in HTML, which Sphinx does not see."""
    shutil.copytree(HERE / "images", site / "images", dirs_exist_ok=True)


def point_to_included_pages(source: list[str]) -> None:
    for path, page in INCLUDED.items():
        source[0] = source[0].replace(f"]({path}", f"]({page}")


def to_rst(lines: list[str]) -> None:
    """Turn a docstring of this project into reStructuredText, in place.

    Backticks are code, a line `name: text` describes an argument or field, and `Raises:` starts a paragraph.
    """
    out: list[str] = []
    in_field = False
    for line in lines:
        field = _FIELD.match(line)
        if not line.strip():
            in_field = False
            out.append("")
        elif section := _SECTION.match(line):
            in_field = False
            out += ["", f"**{section[1]}.** {_escape(line[section.end() :])}"]
        elif field:
            names = ", ".join(f"``{name}``" for name in field[1].split(", "))
            out += ["" if not in_field else None, f"- {names}: {_escape(field[2])}"]
            in_field = True
        else:
            out.append(("  " if in_field else "") + _escape(line.strip()))
    lines[:] = [line for line in out if line is not None]


def _escape(text: str) -> str:
    """Turn code in backticks into literals, and escape all characters elsewhere."""
    parts = re.split(r"`+([^`]+)`+", text)
    plain = [re.sub(r"([*|\\]|_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    code = [f"``{part}``" for part in parts[1::2]]
    return "".join(a + b for a, b in zip(plain, [*code, ""], strict=True))
