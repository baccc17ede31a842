"""What an evaluation by the lm-eval harness is told: the tasks of a suite, and the files of tasks in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.errors import ConfigError
from implicit_llm_workflow.experiment_files.yaml_files import read_yaml
from implicit_llm_workflow.project_dirs import CONFIG_DIR, REPORT, package_dir

TASK_FOLDERS = CONFIG_DIR / "lm_eval"
SUITES_FILE = package_dir(REPORT) / "downstream.yaml"
IGNORED = "__pycache__"


def lm_eval_settings(settings: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The settings of the experiment file with `tasks` as a list, and the digests of the files below `task_path`.

    Raises: ConfigError that starts with `at`, file and key of the evaluation.
    """
    if "tasks" not in settings:
        raise ConfigError(
            f"{at}.tasks: is missing; give the name of a suite ({', '.join(_suites())}) or a list of tasks"
        )
    tasks = settings["tasks"]
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    is_suite = isinstance(tasks, str) or (len(names) == 1 and names[0] in _suites())
    completed = {**settings, "tasks": _tasks_of(names[0], at) if is_suite else names}
    if "task_path" in settings:
        completed["task_files"] = _digests(_folder(settings["task_path"], at))
    return completed


def _tasks_of(suite: str, at: str) -> list[str]:
    suites = _suites()
    if suite not in suites:
        raise ConfigError(f"{at}.tasks: no suite {suite!r} in {SUITES_FILE.name}; {nearest(suite, suites)}")
    return list(dict.fromkeys(column["task"] for column in suites[suite]["columns"]))


def _suites() -> dict[str, Mapping[str, Any]]:
    return {suite["name"]: suite for suite in read_yaml(SUITES_FILE)["suites"]}


def _folder(name: str, at: str) -> Path:
    """As the job finds it: by path, or by its name in workflow/config/lm_eval/."""
    for folder in (Path(name), TASK_FOLDERS / name):
        if folder.is_dir():
            return folder
    names = [path.name for path in TASK_FOLDERS.iterdir() if path.is_dir()]
    raise ConfigError(f"{at}.task_path: there is no folder {name!r}; {nearest(name, names)}")


def _digests(folder: Path) -> dict[str, str]:
    """sha256 of the files below a folder, so that other content makes another identity."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and IGNORED not in path.parts)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
