"""Find folders with tasks of lm-eval. An experiment can name one, whose files are part of its evaluations' identity."""

from pathlib import Path

from implicit_llm_contracts.runs.manifest import sha256_of
from implicit_llm_contracts.runs.places import PROJECT_DIR

TASK_FOLDERS = PROJECT_DIR / "workflow/config/lm_eval"
IGNORED = "__pycache__"


def find_task_folder(name: str) -> Path | None:
    """Find a folder by its path, or by its name below workflow/config/lm_eval; return None if neither is a folder."""
    return next((folder for folder in (Path(name), TASK_FOLDERS / name) if folder.is_dir()), None)


def file_digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file below `folder`, by its path relative to the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and IGNORED not in path.parts)
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in files}
