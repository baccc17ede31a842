"""The source files of the project's packages and what each of them imports, read from disk without running them."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from implicit_llm_contracts.errors import UserError
from implicit_llm_workflow.file_digests import Remembered


class SourceError(UserError):
    """A source file of the project cannot be read or parsed."""


class Imported(NamedTuple):
    """One import statement's target: a dotted name, and the names taken from it (None for a plain `import`)."""

    module: str
    names: Sequence[str] | None


@dataclass(frozen=True)
class SourceModule:
    """One module of the project. `package` is what its relative imports start from."""

    module: str
    path: Path
    is_package: bool
    cache: Remembered = field(default_factory=lambda: Remembered(None), compare=False)

    @cached_property
    def content(self) -> bytes:
        """Raises: SourceError."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise SourceError(f"{self.path}: cannot be read ({error.strerror}); check the installation") from error

    @cached_property
    def tree(self) -> ast.Module:
        """Raises: SourceError that names file and line."""
        try:
            return ast.parse(self.content, filename=str(self.path))
        except SyntaxError as error:
            raise SourceError(f"{self.path}:{error.lineno}: is not valid Python ({error.msg}); correct it") from error

    @property
    def package(self) -> str:
        return self.module if self.is_package else self.module.rpartition(".")[0]

    @cached_property
    def imports(self) -> tuple[Imported, ...]:
        """Every import that can run, those inside functions included; not those for type checkers alone."""
        return tuple(Imported(*item) for item in self.find("imports", lambda: list(self._find_imports())))

    def find(self, what: str, look: Callable[[], Any]) -> Any:
        """What `look` finds in it, or found at an earlier time; it must be JSON. Raises: SourceError."""
        state = hashlib.sha256(_finders() + self.content).hexdigest()
        return self.cache.find(f"{self.module} {self.is_package} {what}", state, look)

    def _find_imports(self) -> Iterator[Imported]:
        for node in _running_nodes(self.tree):
            if isinstance(node, ast.Import):
                yield from (Imported(alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield Imported(self._absolute(node), tuple(alias.name for alias in node.names))
            elif isinstance(node, ast.Call) and _name_of(node.func) == "import_module":
                yield from self._named_by(node.args)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        packages = self.package.split(".")
        return ".".join([*packages[: len(packages) - node.level + 1], *([node.module] if node.module else [])])

    def _named_by(self, arguments: list[ast.expr]) -> Iterator[Imported]:
        """importlib.import_module("a.b") and import_module(".b", __package__)."""
        if arguments and isinstance(arguments[0], ast.Constant) and isinstance(arguments[0].value, str):
            name = arguments[0].value
            yield Imported(self.package + name if name.startswith(".") else name, None)


@functools.cache
def _finders() -> bytes:
    """The modules on which findings depend too."""
    return b"".join(Path(__file__).with_name(name).read_bytes() for name in ("code_digest.py", "project_sources.py"))


class Project:
    """The packages below `roots`: {"implicit_llm": its folder}. `cache`: what is known of their files."""

    plugins: tuple[str, ...] = ()  # modules that are single files

    def __init__(self, roots: dict[str, Path], cache: Remembered | None = None) -> None:
        self._roots = roots
        self.cache = cache or Remembered(None)
        self._found: dict[str, SourceModule | None] = {}

    def with_plugins(self, paths: Iterable[Path]) -> Project:
        """The same packages with these files, each a module of its own."""
        files = {path.stem: path.with_suffix("") for path in paths}
        found = Project(self._roots | files, self.cache)
        found.plugins = tuple(files)
        return found

    def source(self, module: str) -> SourceModule | None:
        """The module's source, None when it is no module of the project."""
        if module not in self._found:
            self._found[module] = self._find(module)
        return self._found[module]

    def _find(self, module: str) -> SourceModule | None:
        top, *rest = module.split(".")
        if top not in self._roots:
            return None
        base = self._roots[top].joinpath(*rest)
        for path, is_package in ((base / "__init__.py", True), (base.with_name(f"{base.name}.py"), False)):
            if path.is_file():
                return SourceModule(module, path, is_package, self.cache)
        return None


def _running_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _name_of(child.test) == "TYPE_CHECKING":
            for other in child.orelse:
                yield other
                yield from _running_nodes(other)
            continue
        yield child
        yield from _running_nodes(child)


def _name_of(node: ast.expr) -> str:
    """The last word of a name with or without dots."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
