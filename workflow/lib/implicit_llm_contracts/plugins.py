"""Plugins: Python files that an experiment names, which add to what it can name.

A plugin has a literal `PLUGIN = {...}` at its top level, the fields of `Plugin` below. The workflow plans with that
literal alone and does not import the file. The jobs that use the plugin import it: it then registers the families,
methods, stopping rules and groups that it declares, and has a function for each task, kind of evaluation and figure:
`make_<task>`, `evaluate_<kind>`, `draw_<figure>`.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from implicit_llm_contracts.config.evaluation import ModeConfig, SweepConfig
from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS, EvaluationKind
from implicit_llm_contracts.config.fill import AsGiven, fill
from implicit_llm_contracts.config.flops import FAMILIES
from implicit_llm_contracts.config.registry import NameTaken, Registry
from implicit_llm_contracts.config.solver import METHODS, STOPS
from implicit_llm_contracts.config.tasks import (
    TASKS,
    TaskKind,
)
from implicit_llm_contracts.config.word_problem import (
    BUILTIN_GROUP,
    GROUP_ORDERS,
)
from implicit_llm_contracts.errors import ConfigError

LITERAL = "PLUGIN"
KEY = "plugins"  # of a job's config: the plugins that it imports
SETTING_TYPES = {str, int, float, bool}
_VERBS = {"data": "make", "evaluate": "evaluate"}
_OWNERS: dict[tuple[str, str], Path] = {}  # by stage and kind of job
FIGURES: dict[str, tuple[OwnFigure, Callable[[Any], Any]]] = {}  # of the plugins that this job has loaded


@dataclass(frozen=True)
class OwnTask(TaskKind):
    """A task. `settings` of a data set: defaults by key, whose types are those of the keys."""

    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnEvaluation:
    """A kind of evaluation. `data`: the tasks whose models it is for. `settings`: defaults by key.

    `metrics`: numbers of a record of its metrics.json that the report takes.
    """

    data: tuple[str, ...]
    metrics: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_modes: bool = True

    def kind(self, name: str) -> EvaluationKind:
        """The entry of the table of kinds."""
        modes = [("modes", tuple[ModeConfig, ...]), ("sweep", SweepConfig | None, None)] if self.has_modes else []
        config = settings_class(name, self.settings, [("kind", str), *modes], (AsGiven,))
        words = dict.fromkeys(self.settings, "")
        return EvaluationKind(config, self.data, (), name, "", self.metrics, {}, settings=words)


@dataclass(frozen=True)
class OwnFigure:
    """A figure of the report. `needs`: the results that it is made of, as in the report's registry.yaml."""

    caption: str
    needs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plugin:
    """What a plugin adds, by name. `groups`: with their numbers of elements. `files`: others that it reads."""

    families: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    groups: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, OwnTask] = field(default_factory=dict)
    evaluations: Mapping[str, OwnEvaluation] = field(default_factory=dict)
    figures: Mapping[str, OwnFigure] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    @property
    def registered(self) -> list[tuple[Registry[Any], str]]:
        """What the file registers when it is imported, by name, each with its table."""
        tables = ((FAMILIES, self.families), (METHODS, self.methods), (STOPS, self.stops))
        return [(table, name) for table, names in tables for name in names]

    @property
    def names(self) -> tuple[str, ...]:
        """Names that occur in the config of a job that uses the plugin."""
        return (*self.families, *self.methods, *self.stops, *self.groups, *self.tasks, *self.evaluations)


def settings_class(name: str, defaults: Mapping[str, Any], others: list[Any], bases: tuple[type, ...] = ()) -> type:
    """A frozen dataclass of the settings, after the fields `others`, for `fill`. Raises: ConfigError."""
    own = []
    for key, value in defaults.items():
        is_list = isinstance(value, list)
        types = {type(entry) for entry in (value if is_list else [value])}
        if len(types) != 1 or not types <= SETTING_TYPES:
            raise ConfigError(
                f"{name}.settings.{key}: {value!r} is no default that fixes the type of a key; write a text, a number, "
                "true or false, or a list with at least one of them, all of one type"
            )
        (entry_type,) = types
        kind: Any = tuple.__class_getitem__((entry_type, ...)) if is_list else entry_type
        own.append((key, kind, field(default=tuple(value) if is_list else value)))
    try:
        return make_dataclass(name, sorted([*others, *own], key=len), bases=bases, frozen=True)
    except TypeError as error:  # a key that is no name, or is taken
        raise ConfigError(f"{name}.settings: {error}; rename the key") from error


def read_plugin(path: Path) -> Plugin:
    """The literal of a plugin, which is not imported. Raises: ConfigError."""
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: the plugin cannot be read ({error.strerror}); correct its path") from error
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: is not valid Python ({error.msg}); correct it") from error
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == LITERAL:
            try:
                return fill(Plugin, ast.literal_eval(statement.value), f"{path}: {LITERAL}")
            except ValueError as error:
                raise ConfigError(f"{path}: {LITERAL} is not a literal; write names and numbers only") from error
    raise ConfigError(f"{path}: has no {LITERAL} = {{...}} at its top level, which says what it adds; add it")


def declare_plugin(path: Path) -> Plugin:
    """Let experiments name what the plugin adds. Raises: ConfigError, also for a name that is built in."""
    plugin = read_plugin(path)
    try:
        for name, task in plugin.tasks.items():
            settings_class(name, task.settings, [])
        for table, name in plugin.registered:
            table.add(name, table.get(name))
        for name, task in plugin.tasks.items():
            TASKS.add(name, task)
        for name, evaluation in plugin.evaluations.items():
            EVALUATION_KINDS.add(name, evaluation.kind(name))
        for name, order in plugin.groups.items():
            if BUILTIN_GROUP.fullmatch(name):
                raise NameTaken(f"group {name!r} is built in; choose another name")
            GROUP_ORDERS[name] = order
    except (NameTaken, ConfigError) as error:
        raise ConfigError(f"{path}: {LITERAL}: {error}") from error
    _OWNERS.update({("data", name): path for name in plugin.tasks})
    _OWNERS.update({("evaluate", name): path for name in plugin.evaluations})
    return plugin


def load_plugin(path: Path) -> ModuleType:
    """Import the plugin of a job, once, and see that it registers what it declares. Raises: ConfigError."""
    plugin, known = declare_plugin(path), sys.modules.get(path.stem)
    if known is not None and Path(known.__file__ or "").resolve() == path.resolve():
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if known is not None or importlib.util.find_spec(path.stem) is not None or spec is None or spec.loader is None:
        raise ConfigError(f"{path}: a module is called {path.stem!r} already; rename the file")
    for name in plugin.groups:
        del GROUP_ORDERS[name]
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for missing in _missing(plugin, module):
        raise ConfigError(f"{path}: {LITERAL} declares {missing}, which the file does not have; add it")
    FIGURES.update({name: (figure, getattr(module, _draw(name))) for name, figure in plugin.figures.items()})
    return module


def _missing(plugin: Plugin, module: ModuleType) -> Iterator[str]:
    yield from (f"{name!r}" for table, name in plugin.registered if table[name] is None)
    yield from (
        f"the group {name!r} of {order} elements"
        for name, order in plugin.groups.items()
        if GROUP_ORDERS.get(name) != order
    )
    functions = [f"make_{name}" for name in plugin.tasks] + [f"evaluate_{name}" for name in plugin.evaluations]
    functions += [_draw(name) for name in plugin.figures]
    yield from (f"the function {name}" for name in functions if not hasattr(module, name))


def _draw(figure: str) -> str:
    return f"draw_{figure.replace('-', '_')}"


def owner_of(stage: str, kind: str) -> Path | None:
    """The plugin that has the function of a kind of job, None for a built-in kind."""
    return _OWNERS.get((stage, kind))


def job_function(stage: str, kind: str) -> str:
    """The function in a plugin that is the body of a job of this kind."""
    return f"{_VERBS[stage]}_{kind}"
