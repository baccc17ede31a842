"""Reading the hand-written files behind the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from implicit_llm.report.config import ReportError


def read_yaml(path: Path) -> Any:
    """Plain values of a YAML file. Raises: ReportError naming file and line."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(
            f"{path}: cannot be read ({error.strerror}); the report needs the folder workflow/report"
        ) from error
    except yaml.YAMLError as error:
        first_line = " ".join(str(error).split())
        raise ReportError(f"{path}: is not valid YAML: {first_line}") from error
