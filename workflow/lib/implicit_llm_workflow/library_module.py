"""Single files of the library that the driver runs without the library."""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType

from implicit_llm_workflow.errors import UserError
from implicit_llm_workflow.library_configs import package_dir


class LibraryFileMissing(UserError):
    """The installed library lacks a file that the driver needs."""


@functools.cache
def load_library_module(path: str) -> ModuleType:
    """The module in a file of the library, such as "analysis/flops.py", which may import the standard library only.

    Not by `import implicit_llm.analysis.flops`: that runs implicit_llm/__init__.py, which imports torch and
    transformers, ten seconds that planning an experiment does not have. Raises: LibraryFileMissing.
    """
    file = package_dir() / path
    name = f"_implicit_llm_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise LibraryFileMissing(f"{file}: is not there; reinstall the project with `make setup`")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module they are defined in
    spec.loader.exec_module(module)
    return module
