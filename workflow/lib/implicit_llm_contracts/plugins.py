"""What an experiment can name: the built-in tasks, kinds of evaluation, groups and figures, and those of its plugins.

A plugin is a Python file that an experiment names. It has a literal `PLUGIN = {...}` at its top level, the fields of
`Plugin` below. The workflow plans with that literal alone and does not import the file. The jobs that use the plugin
import it: it then registers the families, methods, stopping rules and groups that it declares, and has a function for
each task, kind of evaluation and figure: `make_<task>`, `evaluate_<kind>`, `draw_<figure>`.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
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
from implicit_llm_contracts.errors import ConfigError, InvalidValue

LITERAL = "PLUGIN"
PLUGINS = "plugins"  # the key of a job's config: the plugins that it imports
SETTING_TYPES = {str, int, float, bool}


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
        return EvaluationKind(config, self.data, (), name, "", self.metrics, {}, dict.fromkeys(self.settings, ""))


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

    def __post_init__(self) -> None:
        """Raises: NameTaken for a name that is built in; InvalidValue for settings that fix no types."""
        for name, task in self.tasks.items():
            settings_class(name, task.settings, [])
        for name, evaluation in self.evaluations.items():
            evaluation.kind(name)
        for table, names in (*self.registered, (TASKS, self.tasks), (EVALUATION_KINDS, self.evaluations)):
            for name in names:
                table.refuse_builtin(name)

    @property
    def registered(self) -> tuple[tuple[Registry[Any], Mapping[str, Any]], ...]:
        """What the file registers when it is imported: each table, with what is known of the names before that."""
        named = ((FAMILIES, self.families), (METHODS, self.methods), (STOPS, self.stops))
        return (*((table, dict.fromkeys(names)) for table, names in named), (GROUPS, self.groups))

    @property
    def names(self) -> tuple[str, ...]:
        """Names that occur in the config of a job that uses the plugin."""
        return (*self.families, *self.methods, *self.stops, *self.groups, *self.tasks, *self.evaluations)

    @property
    def functions(self) -> dict[tuple[str, str], str]:
        """The functions that the file has, by the stage that calls them and the task, kind of evaluation or figure."""
        verbs = {"data": "make", "evaluate": "evaluate", "report": "draw"}
        tables = zip(verbs.items(), (self.tasks, self.evaluations, self.figures), strict=True)
        return {(stage, name): f"{verb}_{name.replace('-', '_')}" for (stage, verb), names in tables for name in names}


def settings_class(name: str, defaults: Mapping[str, Any], others: list[Any], bases: tuple[type, ...] = ()) -> type:
    """A frozen dataclass of the settings, after the fields `others`, for `fill`. Raises: InvalidValue."""
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
    except TypeError as error:  # a key that is no name, or is taken
        raise InvalidValue(f"{name}.settings: {error}; rename the key") from error


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


def plugin_paths(config: Mapping[str, Any]) -> list[Path]:
    """Absolute paths of the plugins of a job, which its config names from the working directory."""
    return [Path(plugin).resolve() for plugin in config.get(PLUGINS, ())]


def load_plugin(path: Path) -> ModuleType:
    """Import the plugin of a job, once, and see that it registers what it declares. Raises: ConfigError."""
    plugin, known = read_plugin(path), sys.modules.get(path.stem)
    if known is not None and Path(known.__file__ or "").resolve() == path.resolve():
        return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if known is not None or importlib.util.find_spec(path.stem) is not None or spec is None or spec.loader is None:
        raise ConfigError(f"{path}: a module is called {path.stem!r} already; rename the file")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for missing in _missing(plugin, module):
        raise ConfigError(f"{path}: {LITERAL} declares {missing}, which the file does not have; add it")
    return module


def _missing(plugin: Plugin, module: ModuleType) -> Iterator[str]:
    for table, names in plugin.registered:
        for name, wanted in names.items():
            if table.get(name) is None or wanted not in (None, getattr(table[name], "order", None)):
                yield f"{name!r}" if wanted is None else f"the {table.what} {name!r} of {wanted} elements"
    yield from (f"the function {name}" for name in plugin.functions.values() if not hasattr(module, name))


@dataclass(frozen=True)
class Kinds:
    """Tasks and kinds of evaluation, with those of `plugins` (by path), and the groups and figures of these.

    An experiment has one, which is passed to whatever reads, plans and runs it. A job has one of its own plugins.
    """

    plugins: Mapping[str, Plugin]
    tasks: Mapping[str, TaskKind]
    evaluations: Mapping[str, EvaluationKind]
    figures: Mapping[str, OwnFigure]  # those of plugins; the report has a registry of its own

    @classmethod
    def read(cls, paths: Iterable[Path], where: str) -> Kinds:
        """The kinds of an experiment with these plugins, which are not imported.

        Raises: ConfigError, for two plugins that add one name it starts with `where`.
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
        """Values of an experiment, in which names that the plugins declare pass the checks of tables without them."""
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
        """The plugin whose function a stage calls for a task, kind or figure; None for a built-in one."""
        return next((Path(path) for path, plugin in self.plugins.items() if (stage, name) in plugin.functions), None)

    def function(self, stage: str, name: str) -> Callable[..., Any] | None:
        """That function, for which the plugin is imported; None for a built-in task, kind or figure."""
        owner = self.owner(stage, name)
        return None if owner is None else getattr(load_plugin(owner), read_plugin(owner).functions[stage, name])


BUILTIN = Kinds.read((), "")
