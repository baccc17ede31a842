"""Modules of the library without what importing the whole library costs: torch and transformers, seconds a job."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from implicit_llm_workflow.errors import ConfigError, UserError

LIBRARY = "implicit_llm"


class LibraryFileMissing(UserError):
    """The installed library lacks a file that the driver needs."""


def package_dir(package: str = LIBRARY) -> Path:
    """The folder of a top-level package, found without running it. Raises: ConfigError when it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"package {package} is not installed; run `make setup`")
    return Path(next(iter(spec.submodule_search_locations)))


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


def leave_out_models() -> None:
    """From now on `import implicit_llm.x` runs the module x and not implicit_llm/__init__.py, which imports the models.

    For processes that need no model, such as jobs that make data: their start takes a second and not ten.
    """
    if LIBRARY not in sys.modules:
        package = ModuleType(LIBRARY)
        package.__path__ = [str(package_dir())]
        package.__spec__ = importlib.machinery.ModuleSpec(LIBRARY, None, is_package=True)
        package.__spec__.submodule_search_locations = package.__path__
        sys.modules[LIBRARY] = package
