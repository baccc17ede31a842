"""Read the plugins of an experiment, and collect the built-in tasks and kinds of evaluation with those of the plugins.

A plugin is a Python file that an experiment names. It has a literal `PLUGIN = {...}` at its top level, with the fields
of `Plugin` below. The workflow plans with this literal alone and does not import the file. The jobs that use the plugin
import the file, which registers the families, methods, stopping rules and groups of the literal. The file also has a
function for each task, kind of evaluation and figure: `make_<task>`, `evaluate_<kind>`, `draw_<figure>`.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from implicit_llm_contracts.config.evaluation import ModeConfig, SweepConfig
from implicit_llm_contracts.config.evaluation_kinds import EVALUATION_KINDS, EvaluationKind
from implicit_llm_contracts.config.fill import AsGiven, fill
from implicit_llm_contracts.config.flops import FAMILIES
from implicit_llm_contracts.config.registry import Declared, Registry
from implicit_llm_contracts.config.solver import METHODS, STOPS
from implicit_llm_contracts.config.tasks import TASKS, TaskKind
from implicit_llm_contracts.config.word_problem import GROUPS
from implicit_llm_contracts.errors import ConfigError, InvalidValue, UserError

LITERAL = "PLUGIN"
PLUGINS = "plugins"  # the key of a job's config that lists the plugins to import
SETTING_TYPES = {str, int, float, bool}


@dataclass(frozen=True)
class OwnTask(TaskKind):
    """A plugin's task. `settings`: the defaults of a data set's keys, which also determine their types."""

    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OwnEvaluation:
    """A plugin's kind of evaluation.

    `data`: the tasks whose models it can evaluate. `settings`: defaults by key. `metrics`: the numbers in a record of
    its metrics.json that the report shows. `has_modes`: whether its settings have the keys `modes` and `sweep`.
    """

    data: tuple[str, ...]
    metrics: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    has_modes: bool = True

    def kind(self, name: str) -> EvaluationKind:
        """Return this kind as an entry of EVALUATION_KINDS. Raises: InvalidValue for wrong settings."""
        modes = [("modes", tuple[ModeConfig, ...]), ("sweep", SweepConfig | None, None)] if self.has_modes else []
        config = settings_class(name, self.settings, [("kind", str), *modes], (AsGiven,))
        return EvaluationKind(config, self.data, (), name, "", self.metrics, {}, dict.fromkeys(self.settings, ""))


@dataclass(frozen=True)
class OwnFigure:
    """A plugin's figure. `needs`: a result that the experiment must plan, in the format of registry.yaml."""

    caption: str
    needs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plugin:
    """The declarations of a plugin. `groups`: the order of each group. `files`: other files that the plugin reads."""

    families: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    groups: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, OwnTask] = field(default_factory=dict)
    evaluations: Mapping[str, OwnEvaluation] = field(default_factory=dict)
    figures: Mapping[str, OwnFigure] = field(default_factory=dict)
    files: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check names and settings. Raises: NameTaken for a built-in name; InvalidValue for a wrong key or default."""
        for name, task in self.tasks.items():
            settings_class(name, task.settings, [])
        for name, evaluation in self.evaluations.items():
            evaluation.kind(name)
        for table, names in (*self.registered, (TASKS, self.tasks), (EVALUATION_KINDS, self.evaluations)):
            for name in names:
                table.refuse_builtin(name)

    @property
    def registered(self) -> tuple[tuple[Registry[Any], Mapping[str, Any]], ...]:
        """The tables in which the import of the file registers names, each with these names.

        A name maps to the declared order of a group, and to None in the other tables.
        """
        named = ((FAMILIES, self.families), (METHODS, self.methods), (STOPS, self.stops))
        return (*((table, dict.fromkeys(names)) for table, names in named), (GROUPS, self.groups))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the plugin that can occur in the config of a job, which are all except those of figures."""
        return (*self.families, *self.methods, *self.stops, *self.groups, *self.tasks, *self.evaluations)

    @property
    def functions(self) -> dict[tuple[str, str], str]:
        """The names of the file's functions, by the stage that calls the function and the task, kind or figure."""
        verbs = {"data": "make", "evaluate": "evaluate", "report": "draw"}
        tables = zip(verbs.items(), (self.tasks, self.evaluations, self.figures), strict=True)
        return {(stage, name): f"{verb}_{name.replace('-', '_')}" for (stage, verb), names in tables for name in names}


def settings_class(name: str, defaults: Mapping[str, Any], others: list[Any], bases: tuple[type, ...] = ()) -> type:
    """Return a frozen dataclass for `fill` with the fields `others` and those of `defaults`. Raises: InvalidValue."""
    own = []
    for key, value in defaults.items():
        is_list = isinstance(value, list)
        types = {type(entry) for entry in (value if is_list else [value])}
        if len(types) != 1 or not types <= SETTING_TYPES:
            raise InvalidValue(
                f"{name}.settings.{key}: {value!r} is no default that fixes the type of a key; write a text, a number, "
                "true or false, or a list with at least one of them, all of one type"
            )
        kind: Any = tuple.__class_getitem__((*types, ...)) if is_list else types.pop()
        own.append((key, kind, field(default=tuple(value) if is_list else value)))
    try:
        return make_dataclass(name, sorted([*others, *own], key=len), bases=bases, frozen=True)
    except TypeError as error:  # the key is no identifier, or is used already
        raise InvalidValue(f"{name}.settings: {error}; rename the key") from error


def read_plugin(path: Path) -> Plugin:
    """Read the literal of a plugin without importing the file. Raises: ConfigError, also if a file of it is missing."""
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: the plugin cannot be read ({error.strerror}); correct its path") from error
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: is not valid Python ({error.msg}); correct it") from error
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == LITERAL:
            try:
                plugin = fill(Plugin, ast.literal_eval(statement.value), f"{path}: {LITERAL}")
            except ValueError as error:
                raise ConfigError(f"{path}: {LITERAL} is not a literal; write names and numbers only") from error
            if absent := [name for name in plugin.files if not (path.parent / name).is_file()]:
                raise ConfigError(f"{path}: {LITERAL}['files'] names {absent[0]}, which is not beside it; correct it")
            return plugin
    raise ConfigError(f"{path}: has no {LITERAL} = {{...}} at its top level, which says what it adds; add it")


def plugin_paths(config: Mapping[str, Any]) -> list[Path]:
    """Return the absolute paths of a job's plugins, which its config names relative to the working directory."""
    return [Path(plugin).resolve() for plugin in config.get(PLUGINS, ())]


def load_plugin(path: Path) -> ModuleType:
    """Import a job's plugin, check that it has what it declares, and return its module.

    A later call returns the same module without another check. Raises: ConfigError, also for any error that the file
    itself raises on import.
    """
    plugin, known = read_plugin(path), sys.modules.get(path.stem)
    if known is not None and Path(known.__file__ or "").resolve() == path.resolve():
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if known is not None or importlib.util.find_spec(path.stem) is not None or spec is None or spec.loader is None:
        raise ConfigError(f"{path}: a module is called {path.stem!r} already; rename the file")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ConfigError(f"{path}{_failure_on_import(path, error)}") from error
        for missing in _missing(plugin, module):
            raise ConfigError(f"{path}: {LITERAL} declares {missing}, which the file does not have; add it")
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _failure_on_import(path: Path, error: Exception) -> str:
    """Return the line of the plugin at which its import failed, the error and a remedy."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = f":{lines[-1]}" if lines else ""
    if isinstance(error, ModuleNotFoundError):
        return f"{line}: there is no module {error.name!r}; install it, or move its code into the plugin"
    reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return f"{line}: cannot be imported ({reason}); correct it"


def _missing(plugin: Plugin, module: ModuleType) -> Iterator[str]:
    for table, names in plugin.registered:
        for name, wanted in names.items():
            if table.get(name) is None or wanted not in (None, getattr(table[name], "order", None)):
                yield f"{name!r}" if wanted is None else f"the {table.what} {name!r} of {wanted} elements"
    yield from (f"the function {name}" for name in plugin.functions.values() if not hasattr(module, name))


@dataclass(frozen=True)
class Kinds:
    """The built-in tasks and kinds of evaluation with those of `plugins` (by path), and the figures of the plugins.

    Each experiment has one instance, which is passed to the code that reads, plans and runs it. The instance of a job
    has the plugins of this job.
    """

    plugins: Mapping[str, Plugin]
    tasks: Mapping[str, TaskKind]
    evaluations: Mapping[str, EvaluationKind]
    figures: Mapping[str, OwnFigure]  # of the plugins; the report registers its own

    @classmethod
    def read(cls, paths: Iterable[Path], where: str) -> Kinds:
        """Return the kinds of an experiment with these plugins, without importing them.

        Raises: ConfigError, also if two plugins add the same name; the message then starts with `where`.
        """
        plugins: dict[str, Plugin] = {}
        figures: dict[str, OwnFigure] = {}
        tasks, evaluations = Registry(TASKS.what, TASKS), Registry(EVALUATION_KINDS.what, EVALUATION_KINDS)
        for path in paths:
            plugin = read_plugin(path)
            for other, its in plugins.items():
                for twice in {*its.names, *its.figures} & {*plugin.names, *plugin.figures}:
                    raise ConfigError(f"{where}: {other} and {path} both add {twice!r}; rename one")
            plugins[path.as_posix()] = plugin
            tasks |= plugin.tasks
            evaluations |= {name: evaluation.kind(name) for name, evaluation in plugin.evaluations.items()}
            figures |= plugin.figures
        return cls(plugins, tasks, evaluations, figures)

    def marked(self, value: Any) -> Any:
        """Return an experiment's values with plugin names as `Declared`, which the checks of the tables accept."""
        if isinstance(value, Mapping):
            return {key: self.marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(item) for item in value]
        return self._declared.get(value, value) if isinstance(value, str) else value

    @cached_property
    def _declared(self) -> dict[str, Declared]:
        tables = [(table.what, names) for plugin in self.plugins.values() for table, names in plugin.registered]
        return {
            name: Declared(name, {what: others[name] for what, others in tables if name in others})
            for _, names in tables
            for name in names
        }

    def owner(self, stage: str, name: str) -> Path | None:
        """Return the path of the plugin whose task, kind or figure `name` runs in `stage`; None for a built-in name."""
        return next((Path(path) for path, plugin in self.plugins.items() if (stage, name) in plugin.functions), None)

    def function(self, stage: str, name: str) -> Callable[..., Any] | None:
        """Import the plugin of a task, kind or figure, and return the plugin's function for it.

        Return None for a built-in name. Raises: any error of `load_plugin`.
        """
        owner = self.owner(stage, name)
        return None if owner is None else getattr(load_plugin(owner), read_plugin(owner).functions[stage, name])


BUILTIN = Kinds.read((), "")
