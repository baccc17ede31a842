"""Paths of the project's files, and a check that the current checkout is the installed one."""

from __future__ import annotations

from pathlib import Path

from implicit_llm_contracts.runs.errors import UserError
from implicit_llm_workflow.library_module import LIBRARY, package_dir

_PACKAGE_DIR = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE_DIR.parents[2]
_PACKAGE_IN_CHECKOUT = Path("workflow", "lib", _PACKAGE_DIR.name)

# Of a checkout its own, so that an edit takes effect; an installed package carries copies.
PROJECT_DIR = _CHECKOUT if (_CHECKOUT / "workflow" / "lib").is_dir() else _PACKAGE_DIR / "project"
CONFIG_DIR = PROJECT_DIR / "workflow" / "config"
SCHEMA_DIR = PROJECT_DIR / "workflow" / "schemas"
ENVIRONMENTS_DIR = PROJECT_DIR / "envs"
SNAKEFILE = "Snakefile"


class ForeignPackage(UserError):
    """The code that would run is not that of the checkout in use."""


def nearest_with(name: str | Path, folder: Path) -> Path | None:
    """The folder itself, or the nearest one above it, that contains `name`."""
    return next((item for item in (folder, *folder.parents) if (item / name).exists()), None)


def require_own_package(folder: Path) -> None:
    """Check that a checkout runs its own code, not that of another checkout whose environment is active.

    folder: in the checkout, if it is in one. Raises: ForeignPackage.
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
                f"here would have no effect; type `cd {checkout} && make setup && . .venv/bin/activate`"
            )
