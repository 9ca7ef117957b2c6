"""Mutants: one small fault at a time in a copy of the core, and which tests find it.

Draws faults by a seed (`draw`), writes each into a copy of `src`, and runs the tests of
the core with it: first the files named after the mutated module, then the others. A
fault that no test finds is printed with its file and line. `python -m bench.mutants
--seed 1 --num 60` runs what `make test` runs, `--all` the slow tests too, `--tests DIR`
the tests of another checkout, to compare two suites on the same faults.

Examples are those of continuous integration, so that a second run finds the same. Limits
are seconds of CPU: a fault that makes a loop endless is found by them, on a machine that
is busy as well. Docstrings, annotations, messages of errors and `__repr__` are left alone:
no test is asked to guard them.
"""

from __future__ import annotations

import ast
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("stemkv") / "core"

# Seconds of CPU: of the files named after a module, and of all of them. Several times
# what they take without a fault.
FILE_LIMIT_S = 120
SUITE_LIMIT_S = 900
MEMORY_LIMIT_BYTES = 6 << 30

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OTHER_OPERATOR: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}
UNTESTED = {"__repr__", "__str__", "describe"}

# What to run first for a module whose own file of tests has another name.
FILES_OF = {
    "account": ["test_ledger.py"],
    "base": ["test_fair.py", "eviction/test_conformance.py"],
    "dfs": ["test_orders.py"],
    "entry": ["test_ledger.py"],
    "events": ["test_scheduler.py"],
    "gdsf": ["eviction/test_gdsf.py", "eviction/test_conformance.py"],
    "keys": ["test_orders.py"],
    "leaves": ["eviction/test_lru.py", "eviction/test_conformance.py"],
    "lfu_da": ["eviction/test_gdsf.py", "eviction/test_conformance.py"],
    "lookahead": ["test_hints.py", "test_retention.py"],
    "lpm": ["test_orders.py"],
    "plan": ["test_scheduler.py"],
    "queue": ["test_orders.py", "test_fair.py"],
    "ranked": ["test_orders.py"],
    "ranking": ["test_orders.py"],
    "residual": ["test_orders.py"],
    "service": ["test_fair.py", "test_sessions.py"],
    "share": ["test_ledger.py"],
    "table": ["test_cache.py"],
    "waits": ["test_ledger.py"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One fault: some bytes of a module replaced by others."""

    module: Path  # from `src`
    kind: str
    line: int
    start: int  # bytes of the source
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (" ".join(t.split())[:60] for t in (self.before, self.after))
        return f"{self.module}:{self.line}: {self.kind}: {before} -> {after}"

    def write(self, src: Path) -> None:
        """Put the fault into a copy of the sources."""
        path = src / self.module
        source = path.read_bytes()
        path.write_bytes(
            source[: self.start] + self.after.encode() + source[self.end :]
        )


def mutants_of(module: Path) -> Iterator[Mutant]:
    """Yield all faults of one module, which is named from `src`."""
    source = (ROOT / "src" / module).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _tested(ast.parse(source)):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            node = node.test
            changes = _negations(node)
        else:
            changes = _changes(node)
        for kind, after in changes:
            assert isinstance(node, ast.expr | ast.stmt)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            yield Mutant(
                module=module,
                kind=kind,
                line=node.lineno,
                start=start,
                end=end,
                before=source[start:end].decode(),
                after=after,
            )


def _tested(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs and decides; not annotations, messages or names of types."""
    yield node
    skipped: set[str] = set()
    match node:
        case ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return
        case ast.FunctionDef(name=name) if name in UNTESTED:
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return
        case ast.FunctionDef():
            skipped = {"returns", "decorator_list"}
        case ast.ClassDef():
            skipped = {"bases", "keywords", "decorator_list"}
        case ast.arg() | ast.AnnAssign():
            skipped = {"annotation"}
        case ast.Assert():
            skipped = {"msg"}
    for name, value in ast.iter_fields(node):
        if name in skipped:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _tested(child)


def _negations(test: ast.expr) -> Iterator[tuple[str, str]]:
    """Yield the opposite of a condition; of comparisons and `not`, `_changes` does."""
    if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.NamedExpr):
        yield "negated", f"(not ({ast.unparse(test)}))"


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield kinds of fault at a node, and what would stand there."""
    changed: ast.AST
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            changed = ast.Compare(left, [FLIPPED[type(op)]()], [right])
            yield "comparison", f"({ast.unparse(changed)})"
        case ast.BoolOp(op=junction, values=values):
            other = ast.Or() if isinstance(junction, ast.And) else ast.And()
            yield "and/or", f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negated", f"({ast.unparse(operand)})"
        case ast.BinOp(left=left, op=operator, right=right):
            if type(operator) in OTHER_OPERATOR:
                changed = ast.BinOp(left, OTHER_OPERATOR[type(operator)](), right)
                yield "operator", f"({ast.unparse(changed)})"
        case ast.Constant(value=bool() as truth):
            yield "constant", str(not truth)
        case ast.Constant(value=int() | float() as number):
            yield "constant", f"({number} + 1)"
            yield "constant", f"({number} - 1)"
        case ast.Call(func=ast.Name(id=name)) if name in OTHER_NAME:
            changed = ast.Call(ast.Name(OTHER_NAME[name]), node.args, node.keywords)
            yield "call", ast.unparse(changed)
        case ast.Call(func=func, args=[first, second, *rest]):
            if ast.dump(first) != ast.dump(second):
                changed = ast.Call(func, [second, first, *rest], node.keywords)
                yield "arguments", ast.unparse(changed)
        case ast.Expr(value=ast.Constant() | ast.Yield() | ast.YieldFrom()):
            return
        case ast.Expr() | ast.Delete() | ast.Break():
            yield "statement", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", "pass"
        case ast.AugAssign(target=target, op=operator, value=value):
            yield "statement", "pass"
            if type(operator) in OTHER_OPERATOR:
                changed = ast.AugAssign(target, OTHER_OPERATOR[type(operator)](), value)
                yield "operator", ast.unparse(changed)
        case ast.Continue():
            yield "statement", "break"
        case ast.Return(value=ast.expr() as value):
            if ast.unparse(value) != "None":
                yield "return", "return None"


def draw(seed: int, num: int) -> list[Mutant]:
    """Draw faults without repetition: a kind first, so that no kind is rare."""
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted((ROOT / "src" / PACKAGE).rglob("*.py")):
        for mutant in mutants_of(path.relative_to(ROOT / "src")):
            by_kind[mutant.kind].append(mutant)
    rng = random.Random(seed)
    drawn: list[Mutant] = []
    while len(drawn) < num and by_kind:
        kind = rng.choice(sorted(by_kind))
        each = by_kind[kind]
        drawn.append(each.pop(rng.randrange(len(each))))
        if not each:
            del by_kind[kind]
    return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """The tests of the core as they stand in a checkout."""

    root: Path
    with_slow: bool

    def find(self, mutant: Mutant) -> str | None:
        """Return what found the fault, a test or a limit; None if nothing did."""
        with tempfile.TemporaryDirectory() as folder:
            src = Path(folder) / "src"
            shutil.copytree(
                ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__")
            )
            mutant.write(src)
            first = self._first(mutant.module)
            if first:
                found = self._run(src, first, limit_s=FILE_LIMIT_S)
                if found is not None:
                    return found
            left = [
                path
                for path in sorted((self.root / "tests" / "core").rglob("test_*.py"))
                if path not in first
            ]
            return self._run(src, left, limit_s=SUITE_LIMIT_S)

    def _first(self, module: Path) -> list[Path]:
        stem = module.stem
        names = [
            f"test_{stem}.py",
            f"eviction/test_{stem}.py",
            f"test_{stem}_machine.py",
        ]
        paths = [
            self.root / "tests" / "core" / n for n in [*FILES_OF.get(stem, []), *names]
        ]
        return [path for path in dict.fromkeys(paths) if path.exists()]

    def _run(self, src: Path, files: Sequence[Path], *, limit_s: int) -> str | None:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES,) * 2)

        words = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no"]
        words += ["-p", "no:cacheprovider", "-p", "no:xdist"]
        words += [] if self.with_slow else ["-m", "not slow"]
        done = subprocess.run(
            [*words, *map(str, files)],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": f"{src}:{self.root}", "CI": "true"},
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=limit,
        )
        if done.returncode == 0:
            return None
        if done.returncode < 0:
            return f"limit of {limit_s} s"
        lines = [
            line
            for line in done.stdout.splitlines()
            if line[:6] in ("FAILED", "ERROR ")
        ]
        if not lines:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        return lines[0].split(" ")[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, run, print one line for each fault, and write them if asked to."""
    parser = ArgumentParser(description="faults in the core, and which tests find them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num", type=int, default=60)
    parser.add_argument("--skip", type=int, default=0, help="of those drawn, the first")
    parser.add_argument("--only", type=Path, help="those nobody found in this JSON")
    parser.add_argument("--all", action="store_true", help="with the slow tests")
    parser.add_argument("--tests", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--json", type=Path, help="write what was found")
    parser.add_argument("--list", action="store_true", help="print the faults only")
    options = parser.parse_args(argv)

    mutants = draw(options.seed, options.num)[options.skip :]
    if options.only is not None:
        found = json.loads(options.only.read_text())
        mutants = [mutant for mutant in mutants if found[str(mutant)] is None]
    if options.list:
        print(*mutants, sep="\n")
        return 0
    suite = Suite(root=options.tests.resolve(), with_slow=options.all)
    results: dict[str, str | None] = {}
    for mutant in mutants:
        results[str(mutant)] = by = suite.find(mutant)
        print(f"{'FOUND ' if by else 'MISSED'} {mutant}  [{by}]", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1))
    missed = sum(by is None for by in results.values())
    print(f"{len(results) - missed} of {len(results)} found, {missed} missed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
