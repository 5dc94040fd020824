"""The folders, what each may import, and what gets installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from edgeq.folders import OTHER_FOLDERS, search_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


ROOT = Path(__file__).parent.parent
FOLDERS = ("edgeq", *OTHER_FOLDERS)
MAY_IMPORT = {
    "edgeq": {"edgeq"},
    "targets": {"edgeq", "targets"},
    "runtime": {"edgeq", "targets", "runtime"},
    "converters": {"edgeq", "converters"},
    "tools": {"edgeq", "targets", "runtime", "converters", "tools"},
}
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if path.name != "model_generated.py"]


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, dotted module) of every import in a file, those inside functions too."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            # `from edgeq import targets` names a folder just as `import edgeq.targets` does.
            found += ((node.lineno, f"{node.module}.{name.name}") for name in node.names)
    return tuple(found)


def folder_of(module: str) -> str | None:
    """The top-level folder that a dotted name lies in; None: not ours."""
    first, _, rest = module.partition(".")
    if first != "edgeq":
        return None
    second = rest.partition(".")[0]
    return second if second in FOLDERS else "edgeq"


def test_imports_follow_the_arrows() -> None:
    wrong = []
    for path in SOURCES:
        folder = path.relative_to(ROOT).parts[0]
        for line, module in imports(path):
            if module.partition(".")[0] in OTHER_FOLDERS:
                wrong.append(f"{path}:{line}: import edgeq.{module}, not {module}")
            if path in (ROOT / "edgeq" / "__main__.py", ROOT / "edgeq" / "__init__.py"):
                continue
            target = folder_of(module)
            if target is not None and target not in MAY_IMPORT[folder]:
                wrong.append(f"{path}:{line}: {folder} must not import {target}")
    assert not wrong


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module; the name of a package is that of its __init__."""
    found = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts if parts[0] == "edgeq" else ("edgeq", *parts))
        found[name.removesuffix(".__init__")] = path
    return found


def import_graph() -> dict[str, set[str]]:
    """Module -> the modules it imports, in functions and for types too; not the packages around what it imports."""
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        graph[name] = set()
        for _, imported in imports(path):
            # `from module import something` is an import of the module, `from package import module` of that module.
            module = imported if imported in known else imported.rpartition(".")[0]
            graph[name] |= {module} & set(known) - {name}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of more than one module that all reach each other."""

    def reached(start: str) -> set[str]:
        found, waiting = set[str](), [start]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    reach = {name: reached(name) for name in graph}
    components = {tuple(sorted({name} | {other for other in reach[name] if name in reach[other]})) for name in graph}
    return sorted(list(component) for component in components if len(component) > 1)


def test_a_cycle_is_found_and_nothing_else() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}) == [["b", "c"]]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for types count: what needs them in a circle cannot be read, or moved, one by one."""
    assert not cycles(import_graph())


CONVERTERS = (
    ("checkpoint",),
    ("families", "importers", "rounding"),
    ("rotation", "budget", "exporters"),
    ("calibration",),
    ("options",),
    ("method_options",),
    ("method",),
    ("methods",),
    ("planning",),
    ("probing",),
    ("running",),
    ("convert",),
    ("from_python",),
)
"""Rooms and loose modules of converters/ from the bottom up: what stands in one line imports nothing of a line below it, and
nothing of another room in its line."""


def test_rooms_of_the_converters_import_downward() -> None:
    floors = {room: floor for floor, rooms in enumerate(CONVERTERS) for room in rooms}

    def room_of(module: str) -> str | None:
        """None: not of the converters, or their package."""
        parts = module.split(".")[2:] if module.startswith("edgeq.converters.") else []
        # The options lie beside the plan that they lead to; everything is made for them.
        return None if not parts else parts[-1] if parts[-1] in ("options", "method_options") else parts[0]

    graph = import_graph()
    assert {room for name in graph if (room := room_of(name))} == set(floors)
    up = set[str]()
    for name, imported in graph.items():
        for other in imported:
            mine, theirs = room_of(name), room_of(other)
            if mine and theirs and mine != theirs and floors[mine] <= floors[theirs]:
                up.add(f"{name} -> {other}")
    assert not up


def test_only_converters_and_tools_know_torch() -> None:
    heavy = {"torch", "transformers", "safetensors", "huggingface_hub"}
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] in ("edgeq", "targets", "runtime"):
            assert not [m for _, m in imports(path) if m.partition(".")[0] in heavy], path


def test_every_file_stays_readable() -> None:
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text(encoding="utf-8").splitlines())) > 400}
    assert not long


def loaded(statement: str) -> set[str]:
    """Modules, packages too, in a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_runtime_loads_neither_torch_nor_transformers() -> None:
    # cuda-bindings 12 loads the empty package `cuda` into every interpreter.
    heavy = {"torch", "transformers", "safetensors", "tvm", "numba", "llvmlite", "cuda.bindings"}
    together = "import edgeq.runtime, edgeq.targets, edgeq.targets.cuda, edgeq.format.container, edgeq.tools.cli.main"
    assert not loaded(together) & heavy


def test_a_conversion_loads_torch_when_something_is_rounded_not_before() -> None:
    assert not loaded("import edgeq.converters.convert") & {"torch", "transformers", "safetensors", "huggingface_hub"}


def test_the_command_line_starts_without_numpy() -> None:
    assert not loaded("import edgeq.tools.cli.main") & {"numpy", "flatbuffers", "rich", "jinja2", "tokenizers"}


def test_the_folders_are_found_in_the_package_or_beside_it(tmp_path: Path) -> None:
    package = tmp_path / "edgeq"
    for folder in OTHER_FOLDERS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    assert search_path(str(package)) == [str(tmp_path)]
    assert search_path(str(tmp_path)) == []
    (tmp_path / "tools" / "__init__.py").unlink()
    with pytest.raises(ImportError, match=r"edgeq is not whole: .*pip install --editable \."):
        search_path(str(package))


MAX_FILES = 15
FULLER = {
    "targets/cuda/kernels": "kernels",
}
"""Rooms that may hold more files, and why."""


def test_no_room_is_overfull() -> None:
    """A newcomer reads the names of a folder before its files; more than fifteen names are a list, not a room."""
    files = [path.relative_to(ROOT) for path in (*SOURCES, *(ROOT / "tests").rglob("*.py")) if path.name != "__init__.py"]
    loose = Counter(path.parent.as_posix() for path in files)
    assert {room: n for room, n in loose.items() if n > MAX_FILES and room not in FULLER} == {}
    assert not [room for room in FULLER if loose[room] <= MAX_FILES], "a room that no longer needs its exception"


LABORATORY = ("tools", "lab")
"""What people who work on edgeq run: it is not installed."""


def test_no_command_imports_the_laboratory() -> None:
    for path in SOURCES:
        if path.relative_to(ROOT).parts[:2] != LABORATORY:
            assert not [module for _, module in imports(path) if module.startswith("edgeq.tools.lab")], path


INTERNALS = ("edgeq.targets.cpu.", "edgeq.targets.cuda.", "edgeq.targets.reference.")


def test_tools_ask_targets_by_the_contract() -> None:
    """A tool that imports what is inside a target shows nothing of the next target, and breaks when that one changes."""
    tools = [path for path in SOURCES if (parts := path.relative_to(ROOT).parts)[0] == "tools" and parts[:2] != LABORATORY]
    inside = dict[str, list[str]]()
    for path in tools:
        if found := [name for _, name in imports(path) if f"{name}.".startswith(INTERNALS)]:
            inside[path.relative_to(ROOT).as_posix()] = found
    assert inside == {}


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_the_package_list_is_the_folders_with_an_init() -> None:
    """A folder missing from the list still works in a checkout and is silently missing from the wheel."""
    found = {path.parent.relative_to(ROOT).parts for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")}
    names = {".".join(parts if parts[0] == "edgeq" else ("edgeq", *parts)) for parts in found if parts[:2] != LABORATORY}
    setuptools = project()["tool"]["setuptools"]  # type: ignore[index]
    assert set(setuptools["packages"]) == names
    assert {p.parent.relative_to(ROOT).parts for p in SOURCES} == found, "a folder with Python files lacks __init__.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    # Built from a copy: setuptools leaves build/ and an egg-info beside what it builds.
    copy = folder / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *FOLDERS):
        (copy / name).symlink_to(ROOT / name)
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (built,) = folder.glob("edgeq-*.whl")
    return built


def test_the_wheel_holds_every_module_but_the_laboratory_and_nothing_outside_edgeq(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"edgeq"}
    ours = {parts for path in SOURCES if (parts := path.relative_to(ROOT).parts)[:2] != LABORATORY}
    ours |= {("edgeq", "py.typed"), *(("edgeq", "format", "schema", name) for name in ("model.fbs", "model_generated.py"))}
    expected = {"/".join(parts if parts[0] == "edgeq" else ("edgeq", *parts)) for parts in ours}
    assert expected <= set(names), sorted(expected - set(names))
    assert not [name for name in names if name.startswith("edgeq/tools/lab")]
    # Python and data: nothing that was compiled, and no tag of a platform.
    suffixes = {Path(name).suffix for name in names if ".dist-info/" not in name}
    assert suffixes <= {".py", ".pyi", ".typed", ".fbs", ".html"}, suffixes
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.exhaustive
def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """With -S no editable install is seen: edgeq can only come from the unpacked wheel, what it needs from site-packages."""
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    packages = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    search = os.pathsep.join([str(installed), *packages])

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True)

    assert Path(run("-c", "import edgeq; print(edgeq.__file__)").stdout.strip()).is_relative_to(installed)
    assert "No module named 'edgeq.tools.lab'" in run("-m", "edgeq.tools.lab.quality", "--help").stderr
    shown = run("-m", "edgeq", "--help")
    assert shown.returncode == 0 and "convert" in shown.stdout, shown.stderr
    made = run("-m", "edgeq", "convert", str(ROOT / "models" / "tiny-llama"), "-o", "tiny.edgeq")
    assert made.returncode == 0, made.stderr
    facts = run("-m", "edgeq", "inspect", "tiny.edgeq", "--verify")
    assert facts.returncode == 0 and "every byte verified" in facts.stdout, facts.stderr
