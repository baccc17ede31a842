"""Find the library and load its modules without importing torch and transformers, which takes seconds."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from implicit_llm_contracts.runs.errors import ConfigError

LIBRARY = "implicit_llm"
REPORT = "implicit_llm_report"


def package_dir(package: str = LIBRARY) -> Path:
    """The folder of a top-level package, found without running it. Raises: ConfigError when it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"package {package} is not installed; run `make setup`")
    return Path(next(iter(spec.submodule_search_locations)))


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
