"""Define the paths of the project's files, and check the environment: the installed code, and the variables' names."""

import importlib.util
import os
import shlex
from pathlib import Path

from implicit_llm_contracts.errors import ConfigError, UserError
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.places import PROJECT_DIR

LIBRARY = "implicit_llm"
REPORT = "implicit_llm_report"
_PACKAGE_DIR = Path(__file__).resolve().parent
_PACKAGE_IN_CHECKOUT = Path("workflow", "lib", _PACKAGE_DIR.name)

CONFIG_DIR = PROJECT_DIR / "workflow/config"
ENVIRONMENTS_DIR = PROJECT_DIR / "envs"
SNAKEFILE = "Snakefile"
LOCAL_PROFILE = "profiles/local"
# The project's environment variables without the prefix IMPLICIT_LLM_; users set only those in the first line.
VARIABLES = (
    *("COMMIT", "DATA", "KERNELS", "LATENCY_WAIT_S", "PLUGIN"),
    *("FAULT", "FAULT_TRACE", "INVOCATION", "LAUNCH_FOLDER", "LAUNCH_NODE", "LAUNCH_WORLD_SIZE"),
)


class ForeignPackage(UserError):
    """The installed code would run, although the folder in use is in a checkout with code of its own."""

    failure_class = "env"


def package_dir(package: str = LIBRARY) -> Path:
    """Return the folder of a top-level package without importing it. Raises: ConfigError if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"package {package} is not installed; run `make setup`")
    return Path(next(iter(spec.submodule_search_locations)))


def trained_models() -> Path:
    """Return the folder of the library that has a subfolder for each trained model."""
    return package_dir() / "trained"


def nearest_with(name: str | Path, folder: Path) -> Path | None:
    """Return `folder` if it contains `name`, or else its nearest parent that does; None if no parent does."""
    return next((item for item in (folder, *folder.parents) if (item / name).exists()), None)


def require_known_variables() -> None:
    """Raise ConfigError if an environment variable has the project's prefix and an unknown name."""
    known = [f"IMPLICIT_LLM_{name}" for name in VARIABLES]
    for name in sorted(os.environ):
        if name.startswith("IMPLICIT_LLM_") and name not in known:
            hint = nearest(name, known, "unset it")
            raise ConfigError(f"{name}: is no environment variable of this project; {hint}")


def require_own_package(folder: Path) -> None:
    """Check that the installed code is that of the checkout which contains `folder`, not that of another checkout.

    Outside of a checkout there is nothing to check. Raises: ForeignPackage.
    """
    checkout = nearest_with(_PACKAGE_IN_CHECKOUT, folder.resolve())
    if checkout is None:
        return
    pairs = [(checkout / _PACKAGE_IN_CHECKOUT, _PACKAGE_DIR)]
    if (checkout / LIBRARY / "__init__.py").is_file():
        pairs.append((checkout / LIBRARY, package_dir().resolve()))
    for own, used in pairs:
        if own != used:
            raise ForeignPackage(
                f"{checkout}: the installed package {used.name} belongs to another tree, {used.parent}, so that edits "
                f"here would have no effect; type `cd {shlex.quote(str(checkout))} && make setup && "
                ". .venv/bin/activate`"
            )
