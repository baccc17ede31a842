"""Turn an example with cells (`# %%`) into a notebook, with what its cells print.

    python examples/notebook.py examples/train_word_problem.py

Runs the cells, one after another, and writes the notebook beside the file.
"""

import argparse
import ast
import contextlib
import io
import json
import re
from pathlib import Path


def cells(source):
    """The module's docstring as text, then a heading and the code of each cell."""
    yield "markdown", ast.get_docstring(ast.parse(source))
    for title, code in re.findall(r"^# %% ?(.*)\n((?:(?!# %%).*\n?)*)", source, re.MULTILINE):
        if title:
            yield "markdown", f"## {title}"
        yield "code", code.strip()


def notebook(source, is_run):
    """The notebook as it is saved; `is_run` runs the cells for their output."""
    names, made = {"__name__": "__main__"}, []
    for number, (kind, text) in enumerate(cells(source)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        if kind == "code":
            printed = io.StringIO()
            if is_run:
                with contextlib.redirect_stdout(printed):
                    exec(text, names)
            lines = printed.getvalue().splitlines(keepends=True)
            output = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
            cell |= {"execution_count": None, "outputs": output}
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def main(path):
    made = notebook(path.read_text(encoding="utf-8"), is_run=True)
    path.with_suffix(".ipynb").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", type=Path, help="Python file with cells")
    main(parser.parse_args().example)
