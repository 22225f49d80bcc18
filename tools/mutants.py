"""Draws deliberate mistakes in the package's modules, for `mutation.py`."""

import ast
import collections
import dataclasses
import difflib
import functools
import hashlib
import itertools
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mistake: the text of a file from `start` to `end` is replaced by `text`.

    Attributes:
      module: path in the repository.
      operator: name of the kind of mistake.
      definition: function or class around it, "" at the level of the module.
      line, last: lines of the statement it is in, without the body that it may have.
      source: a hash of the module.
    """

    module: str
    operator: str
    definition: str
    line: int
    last: int
    start: int
    end: int
    text: str
    source: str

    @property
    def key(self) -> str:
        """The name in the results; another one once the module changes."""
        return f"{self.module}:{self.source}:{self.start}-{self.end}:{self.text}"

    def applied(self, source: str) -> str:
        """The module with the mistake."""
        return source[: self.start] + self.text + source[self.end :]

    def diff(self, source: str) -> str:
        """Unified diff of the mistake, with one line of context."""
        before, after = source.splitlines(), self.applied(source).splitlines()
        lines = difflib.unified_diff(before, after, self.module, self.operator, "", "", 1, "")
        return "\n".join(lines)


def digest(source: str) -> str:
    """A hash of a module."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


class Places:
    """Where things are in a module: offsets, statements, definitions, annotations."""

    def __init__(self, source: str):
        self.tree = ast.parse(source)
        lines = source.splitlines(keepends=True)
        self._starts = [0, *itertools.accumulate(len(line) for line in lines)]
        self._source_lines = lines
        self._statements: list[tuple[int, int, int, int]] = []
        self._definitions: list[tuple[int, int, str]] = []
        self._silent: list[tuple[int, int]] = []
        self._visit(self.tree, ())

    def offset(self, line: int, column: int) -> int:
        """The character at a line, and at a column that `ast` counts in bytes."""
        text = self._source_lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(text)

    def character(self, line: int, column: int) -> int:
        """The character at a line and a column that Cosmic Ray counts in characters."""
        return self._starts[line - 1] + column

    def span(self, node: Any) -> tuple[int, int]:
        """First character of a node, and the one behind it."""
        start = self.offset(node.lineno, node.col_offset)
        return start, self.offset(node.end_lineno, node.end_col_offset)

    def statement(self, at: int) -> tuple[int, int]:
        """Lines of the innermost statement around a character."""
        inside = [
            (end - start, lines) for start, end, *lines in self._statements if start <= at < end
        ]
        return tuple(min(inside)[1]) if inside else (1, 1)

    def definition(self, at: int) -> str:
        """Dotted name of the innermost function or class around a character."""
        inside = [
            (end - start, name) for start, end, name in self._definitions if start <= at < end
        ]
        return min(inside)[1] if inside else ""

    def silent(self, at: int) -> bool:
        """Whether nothing runs there: annotations and strings on their own."""
        return any(start <= at < end for start, end in self._silent)

    def _visit(self, node: ast.AST, names: tuple[str, ...]) -> None:
        # Decorators are of what they decorate, but stand before it.
        decorators = getattr(node, "decorator_list", [])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = (*names, node.name)
            for part in (node, *decorators):
                self._definitions.append((*self.span(part), ".".join(names)))
        if isinstance(node, ast.stmt):
            last = node.end_lineno or node.lineno
            body = getattr(node, "body", None)
            if isinstance(body, list) and body:
                last = max(node.lineno, body[0].lineno - 1)
            first = min([node.lineno, *(part.lineno for part in decorators)])
            for part in (node, *decorators):
                self._statements.append((*self.span(part), first, last))
        for field, child in ast.iter_fields(node):
            for item in child if isinstance(child, list) else [child]:
                if not isinstance(item, ast.AST):
                    continue
                text = isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
                if field in ("annotation", "returns") or text:
                    self._silent.append(self.span(item))
                self._visit(item, names)


def modules(config: dict[str, Any]) -> list[str]:
    """The files of `module-path`, as paths in the repository."""
    out: list[str] = []
    for name in config["module-path"]:
        path = ROOT / name
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        out += [str(file.relative_to(ROOT)) for file in files]
    return out


_CHECKS = re.compile(r"isinstance$|(.*\.)?(_checks\.|check_|message$)")

# Makes one mistake: its operator, the characters that it replaces and by what; None if it cannot.
Change = Callable[[], tuple[str, int, int, str] | None]


def _cosmic_ray_changes(
    source: str, places: Places, exclude: re.Pattern[str]
) -> Iterator[tuple[str, int, Change]]:
    """Kind, place and change of the mistakes that Cosmic Ray makes."""
    import cosmic_ray.plugins as plugins
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code

    def change(name: str, occurrence: int) -> tuple[str, int, int, str] | None:
        mutated = mutate_code(source, plugins.get_operator(name)(), occurrence)
        if mutated is None or mutated == source:
            return None
        start = len(os.path.commonprefix([source, mutated]))
        room = min(len(source), len(mutated)) - start
        behind = len(os.path.commonprefix([source[::-1], mutated[::-1]])[:room])
        return name, start, len(source) - behind, mutated[start : len(mutated) - behind]

    nodes = list(ast_nodes(get_ast(source)))
    for name in plugins.operator_names():
        if exclude.fullmatch(name):
            continue
        operator = plugins.get_operator(name)()
        positions = [at for node in nodes for at, _ in operator.mutation_positions(node)]
        for occurrence, (line, column) in enumerate(positions):
            at = places.character(line, column)
            yield name.split("_")[0], at, functools.partial(change, name, occurrence)


def _call_changes(source: str, places: Places) -> Iterator[tuple[str, int, Change]]:
    """Two arguments of a call in the wrong order, or one of those by name left out.

    Constants and the arguments of checks would only raise a TypeError; each call is one place.
    """
    for node in ast.walk(places.tree):
        if not isinstance(node, ast.Call) or _CHECKS.match(ast.unparse(node.func)):
            continue
        at, _ = places.span(node)
        for pair in itertools.pairwise(node.args):
            if any(isinstance(one, ast.Starred | ast.Constant | ast.JoinedStr) for one in pair):
                continue
            (start, middle), (other, end) = map(places.span, pair)
            if source[start:middle] != source[other:end]:
                swapped = source[other:end] + source[middle:other] + source[start:middle]
                yield (
                    "call",
                    at,
                    functools.partial(tuple, ("call/SwapArguments", start, end, swapped)),
                )
        for keyword in node.keywords:
            if keyword.arg is None:
                continue
            start, end = places.span(keyword)
            comma = re.compile(r"\s*,").match(source, end)
            end = comma.end() if comma else end
            yield "call", at, functools.partial(tuple, ("call/DropKeyword", start, end, ""))


def changes_of(source: str, config: dict[str, Any]) -> list[list[Change]]:
    """The mistakes in a module, those of one kind in one place together."""
    places = Places(source)
    exclude = re.compile("|".join(config["filters"]["operators-filter"]["exclude-operators"]))
    by_place: dict[tuple[str, int], list[Change]] = collections.defaultdict(list)
    found = (_cosmic_ray_changes(source, places, exclude), _call_changes(source, places))
    for kind, at, change in itertools.chain(*found):
        if not places.silent(at):
            by_place[kind, at].append(change)
    return list(by_place.values())


class _Meaning(ast.NodeTransformer):
    """Takes out of a program what no test can notice.

    That `zip` is told to be strict, which is for lists of other lengths than ours; and the order of
    the arguments of `max` and `min`.
    """

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if name == "zip":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
        elif name in ("max", "min"):
            node.args.sort(key=ast.dump)
        return node


@functools.cache
def _meaning(source: str) -> str:
    return ast.dump(_Meaning().visit(ast.parse(source)))


def made(module: str, source: str, change: Change) -> Mutant | None:
    """The mistake that a change makes, None if that is no program or means the same."""
    places, change_made = Places(source), change()
    if change_made is None:
        return None
    operator, start, end, text = change_made
    line, last = places.statement(start)
    inside = places.definition(start)
    mutant = Mutant(module, operator, inside, line, last, start, end, text, digest(source))
    try:
        same = _meaning(mutant.applied(source)) == _meaning(source)
    except SyntaxError:
        return None
    return None if same else mutant


def draw(config: dict[str, Any], sample: int, seed: int) -> tuple[list[Mutant], int, int]:
    """Draws mistakes of one kind each in one place each.

    Returns:
      The mistakes in random order, the number of places there are, that of modules.
    """
    rng = random.Random(seed)
    sources = {module: (ROOT / module).read_text() for module in modules(config)}
    places = [
        (m, changes) for m, source in sources.items() for changes in changes_of(source, config)
    ]
    rng.shuffle(places)
    found = (made(module, sources[module], rng.choice(changes)) for module, changes in places)
    chosen = list(itertools.islice((mutant for mutant in found if mutant), sample))
    return chosen, len(places), len(sources)
