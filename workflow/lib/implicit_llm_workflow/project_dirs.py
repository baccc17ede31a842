"""Where the project's files other than its code lie: Snakefile, rules, configurations, report templates, profiles."""

from __future__ import annotations

from pathlib import Path

_PACKAGE_DIR = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE_DIR.parents[2]

# Of a checkout its own, so that an edit takes effect; an installed package carries copies.
PROJECT_DIR = _CHECKOUT if (_CHECKOUT / "workflow" / "lib").is_dir() else _PACKAGE_DIR / "project"
CONFIG_DIR = PROJECT_DIR / "workflow" / "config"
SCHEMA_DIR = PROJECT_DIR / "workflow" / "schemas"
REPORT_DIR = PROJECT_DIR / "workflow" / "report"
ENVIRONMENTS_DIR = PROJECT_DIR / "envs"
