"""Who may import whom, by a walk over the source: rooms, libraries, the environment, what stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "metrale"

GROUND = frozenset({"core", "config", "errors"})  # open to every room

# Room -> the rooms that it may import besides itself and the ground floor.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "core": frozenset(),
    "config": frozenset(),
    "errors": frozenset(),
    "kernels": frozenset(),
    "reference": frozenset({"kernels"}),
    "native": frozenset({"kernels", "reference"}),
    "distributed": frozenset(),
    "grammar": frozenset(),
    "telemetry": frozenset(),
    "state": frozenset({"kernels"}),
    "sampling": frozenset({"kernels"}),
    "model": frozenset({"kernels", "state", "distributed"}),
    "drafters": frozenset({"kernels", "state", "model", "sampling"}),
    # step.py and scheduler.py alone: the collaborators' protocols, and the rows that a step is made of
    "scheduler": frozenset({"drafters", "model", "sampling", "state", "telemetry"}),
    "engine": frozenset(
        {
            "kernels",
            "reference",
            "native",
            "distributed",
            "grammar",
            "telemetry",
            "state",
            "sampling",
            "model",
            "drafters",
            "scheduler",
        }
    ),
    "cli": frozenset({"engine", "sampling"}),
    "": frozenset({"engine", "sampling"}),  # metrale/__init__.py: the public names, loaded at first use
}

# Room -> the third-party libraries that it may import. A room that is not named may import any.
LIBRARIES: dict[str, frozenset[str]] = {
    "core": frozenset(),
    "config": frozenset(),
    "errors": frozenset(),
    "kernels": frozenset({"torch", "triton"}),
    "reference": frozenset({"torch"}),
    "cli": frozenset({"rich", "typer"}),
    "": frozenset(),
}

# The scheduler's modules that act. All others decide: pure functions over `core` alone.
ACTING = frozenset({"metrale.scheduler", "metrale.scheduler.step", "metrale.scheduler.scheduler"})


class Import(NamedTuple):
    """One import statement that runs: where it stands and what it names, dotted."""

    module: str
    line: int
    target: str


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The second part of a dotted name; every `metrale.cli_*` belongs to `cli`."""
    parts = module.split(".")
    room = parts[1] if len(parts) > 1 else ""
    return "cli" if room.startswith("cli") else room


class ImportWalk(ast.NodeVisitor):
    """Collects every import that can run; those under TYPE_CHECKING never do."""

    def __init__(self, module: str, is_package: bool) -> None:
        self.module = module
        self.is_package = is_package
        self.imports: list[Import] = []

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.imports += [Import(self.module, node.lineno, alias.name) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parents = self.module.split(".")
            keep = len(parents) - node.level + self.is_package
            base = ".".join([*parents[:keep], *([base] if base else [])])
        # `from metrale import core` names a room by its alias; the base alone would hide it
        names = [f"{base}.{alias.name}" for alias in node.names] if base == "metrale" else [base]
        self.imports += [Import(self.module, node.lineno, name) for name in names]


def walk_imports(path: Path) -> list[Import]:
    walk = ImportWalk(module_name(path), path.name == "__init__.py")
    walk.visit(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))
    return walk.imports


SOURCES = sorted(PACKAGE.rglob("*.py"))
IMPORTS = [found for path in SOURCES for found in walk_imports(path)]
LOADED_AT_USE = {"LLM": "engine", "SamplingParams": "sampling", "StructuredOutputsParams": "sampling"}


def own_room(target: str) -> str:
    """The room behind an import of ours; a public name stands for the room that it is loaded from."""
    room = room_of(target)
    return LOADED_AT_USE.get(room, room)


def fails(imports: list[Import], reason: str) -> str:
    return "\n".join(f"{i.module}:{i.line} imports {i.target}: {reason}" for i in imports)


def test_every_room_is_in_the_table() -> None:
    assert {room_of(module_name(path)) for path in SOURCES} <= set(MAY_IMPORT)


def test_rooms_import_one_way() -> None:
    def is_wrong(found: Import) -> bool:
        if found.target.split(".")[0] != "metrale":
            return False
        room, target = room_of(found.module), own_room(found.target)
        return target not in {room, *GROUND, *MAY_IMPORT[room], "__version__"}

    wrong = [found for found in IMPORTS if is_wrong(found)]
    assert not wrong, fails(wrong, "not in the table of rooms")


def test_rooms_keep_to_their_libraries() -> None:
    def is_wrong(found: Import) -> bool:
        library = found.target.split(".")[0]
        allowed = LIBRARIES.get(room_of(found.module))
        return allowed is not None and library not in {"metrale", *sys.stdlib_module_names, *allowed}

    wrong = [found for found in IMPORTS if is_wrong(found)]
    assert not wrong, fails(wrong, "a library that this room does not take")


def test_pure_policies_import_core_alone() -> None:
    def is_wrong(found: Import) -> bool:
        if room_of(found.module) != "scheduler" or found.module in ACTING:
            return False
        library = found.target.split(".")[0]
        if library == "metrale":
            return own_room(found.target) not in {*GROUND, "scheduler"}
        return library not in sys.stdlib_module_names

    wrong = [found for found in IMPORTS if is_wrong(found)]
    assert not wrong, fails(wrong, "a policy decides from core alone")


def test_the_environment_is_read_in_config_alone() -> None:
    readers: list[str] = []
    for path in SOURCES:
        if module_name(path) == "metrale.config":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_attribute = isinstance(node, ast.Attribute) and node.attr in {
                "environ",
                "getenv",
                "environb",
                "putenv",
            }
            is_imported = isinstance(node, ast.ImportFrom) and any(
                alias.name in {"environ", "getenv"} for alias in node.names
            )
            if is_attribute or is_imported:
                readers.append(f"{module_name(path)}:{node.lineno}")
    assert not readers, f"read the environment in metrale/config.py: {readers}"


def run_python(code: str) -> None:
    """Runs code in a fresh interpreter, where nothing has been imported yet."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module", ["metrale", "metrale.cli", "metrale.config", "metrale.core", "metrale.errors"]
)
def test_light_modules_leave_torch_unloaded(module: str) -> None:
    heavy = {"torch", "numpy", "triton", "transformers", "xgrammar"}
    run_python(f"import sys, {module}; loaded = {heavy} & set(sys.modules); assert not loaded, loaded")


def test_packages_are_lazy() -> None:
    # the reference's table of operators is torch through and through
    names = (module_name(path) for path in SOURCES if path.name == "__init__.py")
    packages = [name for name in names if name != "metrale.reference"]
    run_python(
        f"import sys, importlib\nfor name in {packages}:\n    importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules"
    )


def test_reference_imports_without_triton() -> None:
    modules = [module_name(path) for path in SOURCES if room_of(module_name(path)) == "reference"]
    run_python(
        "import sys, importlib\nsys.modules['triton'] = None\n"
        f"for name in {modules}:\n    importlib.import_module(name)"
    )


def test_public_names_resolve() -> None:
    run_python(
        "import metrale\nfor name in metrale.__all__:\n    getattr(metrale, name)\n"
        "assert {'LLM', 'SamplingParams', 'StructuredOutputsParams'} <= set(metrale.__all__)"
    )
