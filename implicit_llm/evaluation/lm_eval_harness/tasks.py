"""The harness's tasks by name, its own and those of a folder, ready to be asked."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager

from implicit_llm_contracts.config.evaluation import LmEvalConfig
from implicit_llm_contracts.errors import UserError
from implicit_llm_contracts.hints import nearest
from implicit_llm_contracts.runs.places import TASK_FOLDERS, file_digests, find_task_folder


class TaskError(UserError):
    """A task is not known, or its files or its data are not what they should be."""


def load_tasks(config: LmEvalConfig) -> dict[str, Any]:
    """The tasks in the order of `config.tasks`, seeded as the harness's command line seeds them.

    Raises: TaskError; for data that is not in the cache of `datasets` it names the command that fetches it.
    """
    folder = None if config.task_path is None else task_folder(config.task_path)
    if folder is not None:
        check_files(folder, config.task_files)
    manager = _manager(folder, config.tasks)
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    tasks = {name: _load(manager, name) for name in config.tasks}
    for task in tasks.values():
        if task.get_config("num_fewshot") != 0:  # 0 is how a task forbids examples
            task.set_config(key="num_fewshot", value=config.num_fewshot)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return tasks


def task_folder(name: str) -> Path:
    """A folder of tasks by its path, or by its name below workflow/config/lm_eval. Raises: TaskError."""
    folder = find_task_folder(name)
    if folder is None:
        raise TaskError(
            f"task_path: neither {name} nor {TASK_FOLDERS / name} is a folder; give one with YAML files of tasks"
        )
    return folder


def check_files(folder: Path, digests: Mapping[str, str] | None) -> None:
    """Compare the files below `folder` with their digests, if there are any. Raises: TaskError."""
    if digests is None:
        return
    found = file_digests(folder)
    for name in sorted(found.keys() | digests.keys()):
        if found.get(name) != digests.get(name):
            what = "is missing" if name not in found else "is new" if name not in digests else "changed"
            raise TaskError(f"{folder / name}: {what} after the workflow was planned; run the workflow again")


def _manager(folder: Path | None, names: tuple[str, ...]) -> TaskManager:
    """Looking through the harness's own 14,000 tasks takes seconds, so it is left out where the folder has all."""
    if folder is not None:
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        if set(names) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=None if folder is None else str(folder))
    for name in names:
        if name in manager.all_subtasks:
            continue
        if name in manager.all_tasks:
            raise TaskError(f"tasks: {name} stands for several tasks; name those that are wanted")
        hint = nearest(name, manager.all_subtasks, "`implicit-llm evaluate harness ls tasks` lists them")
        raise TaskError(f"tasks: the harness has no task {name}; {hint}")
    return manager


def _load(manager: TaskManager, name: str) -> Any:
    try:
        return manager.load([name])["tasks"][name]
    except (OSError, ValueError) as error:  # all that `datasets` and the hub raise is one of these
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise TaskError(
            f"task {name}: its data cannot be read ({reason}); where there is a network, run `implicit-llm prefetch "
            "EXPERIMENT` with the same HF_HOME"
        ) from error
