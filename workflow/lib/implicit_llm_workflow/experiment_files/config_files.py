"""Where the files of an experiment lie: models/, tasks/ and curricula/ beside it, or else those of the project."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.experiment_files.yaml_files import read_yaml
from implicit_llm_workflow.project_dirs import CONFIG_DIR

DEFAULT_EXPERIMENT = "paper"
OWN_CONFIG_DIR = Path("workflow") / "config"
_FOLDERS = (OWN_CONFIG_DIR, CONFIG_DIR)


class ConfigFiles:
    """Reads the files that one experiment refers to; `source` names the experiment file in messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = str(path)
        self._cache: dict[Path, dict[str, Any]] = {}

    def read(self, folder: str, name: str, where: str) -> tuple[Mapping[str, Any], str]:
        """Values and path of <folder>/<name>.yaml. Raises: ConfigError that starts with `where` if there is none."""
        folders = [self.path.resolve().parent / folder, CONFIG_DIR / folder]
        found = next((path for item in folders if (path := item / f"{name}.yaml").is_file()), None)
        if found is None:
            names = {path.stem for item in folders for path in item.glob("*.yaml")}
            raise ConfigError(f"{where}: there is no {folder}/{name}.yaml; {nearest(name, names)}")
        path = shown_path(found)
        if path not in self._cache:
            self._cache[path] = read_yaml(path)
        return self._cache[path], str(path)


def experiment_path(name_or_path: str) -> Path:
    """The file of an experiment, given by path or by its name in workflow/config/, here or of the project.

    Raises: ConfigError.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    for named in (folder / f"{name_or_path}.yaml" for folder in _FOLDERS):
        if named.is_file():
            return shown_path(named)
    raise ConfigError(f"{name_or_path}: no such config file; {nearest(path.stem, experiment_names())}")


def experiment_names() -> set[str]:
    """Of the files in workflow/config/, here and of the project."""
    return {path.stem for folder in _FOLDERS for path in folder.glob("*.yaml")}


def shown_path(path: Path) -> Path:
    """Relative to the working directory where that is shorter to read."""
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path
