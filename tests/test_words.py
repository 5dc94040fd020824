"""Names and docstrings keep to the words of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeq.folders import OTHER_FOLDERS

ROOT = Path(__file__).parent.parent
FOLDERS = ("edgeq", *OTHER_FOLDERS)
LIMIT_WORDS = r"MOST|LARGEST|LONGEST|DEEPEST|WIDEST|HIGHEST|GREATEST|LEAST|SMALLEST|SHORTEST|FEWEST|LOWEST|LIMIT"
MAX_POSITIONAL = 6
WHOLE_NAMES = {"MAX", "MIN", "LIMITS", "BESIDE", "ENOUGH", "AHEAD"}
NOT_MODULES = {"form", "reading", "guess", "wishes", "hears", "pairs", "anew", "told", "utils", "helpers", "manager", "engine"}
"""What CONTRIBUTING.md has another word for, and names that say nothing."""

Nodes = list[ast.AST]
Trees = dict[str, Nodes]


@pytest.fixture(scope="module")
def trees() -> Trees:
    """Path -> nodes of every file, its module first; the tests too."""
    # A million nodes, which all stay: the collector would look through them dozens of times.
    gc.disable()
    try:
        # The schema names what flatc generates.
        return {
            path.relative_to(ROOT).as_posix(): list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            for folder in (*FOLDERS, "tests")
            for path in sorted((ROOT / folder).rglob("*.py"))
            if path.name != "model_generated.py"
        }
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def product(trees: Trees) -> Trees:
    """Path -> nodes of every file but the tests."""
    return {path: nodes for path, nodes in trees.items() if not path.startswith("tests/")}


def docstrings(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of a module, and of the strings that explain a name after it."""
    for node in nodes:
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, each in zip([None, *body], body, strict=False):
            documents = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and before is None
            match each:
                case ast.Expr(ast.Constant(str(text))) if documents or isinstance(before, (ast.Assign, ast.AnnAssign)):
                    yield each.lineno, text


def constants(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """(line, name) of what a module assigns."""
    module = nodes[0]
    assert isinstance(module, ast.Module)
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            yield from ((node.lineno, each.id) for each in ast.walk(target) if isinstance(each, ast.Name))


def is_kernel(path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Numba or TVM compiles it, or it writes machine code: in the rooms of kernels, or without types."""
    if "kernels" in path.split("/") or path.startswith("targets/cpu/isa/"):
        return True
    arguments = [*node.args.posonlyargs, *node.args.args]
    compiled = any(ast.unparse(each).startswith(("njit", "intrinsic", "inline")) for each in node.decorator_list)
    return compiled or not any(each.annotation for each in arguments)


def test_at_most_six_arguments_are_given_by_place(product: Trees) -> None:
    long = []
    for path, nodes in product.items():
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_kernel(path, node):
                names = [each.arg for each in (*node.args.posonlyargs, *node.args.args) if each.arg not in ("self", "cls")]
                if len(names) > MAX_POSITIONAL:
                    long.append(f"{path}:{node.lineno}: {node.name}({', '.join(names)})")
    assert not long, "put `*` before those that are better named"


def test_no_docstring_begins_with_of(trees: Trees) -> None:
    texts = [(path, line, text) for path, nodes in trees.items() for line, text in docstrings(nodes)]
    assert len(texts) > 5000
    found = [f"{path}:{line}: {text:.60}" for path, line, text in texts if re.match(r"\s*Of\b", text)]
    assert not found, "begin with the noun that it is about"


def test_a_class_name_stands_for_one_thing(product: Trees) -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, nodes in product.items():
        if not path.startswith("tools/lab/"):
            for node in nodes:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path}:{node.lineno}")
    assert len(places) > 300
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_limits_begin_with_max_or_min(product: Trees) -> None:
    names = [(path, line, name) for path, nodes in product.items() for line, name in constants(nodes)]
    wrong = [f"{path}:{line}: {name}" for path, line, name in names if re.search(rf"(^|_)({LIMIT_WORDS})(_|$)", name)]
    whole = [
        f"{path}:{line}: {name}" for path, line, name in names if name in ("MAX", "MIN", "LIMITS", "BESIDE", "ENOUGH", "AHEAD")
    ]
    assert len([name for _, _, name in names if name.startswith(("MAX_", "MIN_"))]) > 100
    assert not wrong + whole, "MAX_ or MIN_, and then what it limits"


def test_modules_are_named_in_the_words_of_the_field(trees: Trees) -> None:
    assert not [path for path in trees if Path(path).stem in NOT_MODULES or Path(path).parent.name in NOT_MODULES]


VAGUE = {"found", "each", "held", "told"}
NAMED_IN_KERNELS = ("targets/cuda/kernels/", "targets/cuda/arguments/")
"""Names that are in the text of kernels compiled ahead, and in the records that are compared with it."""


def signatures(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """(line, name) of functions, of their parameters, and of the fields of classes."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
            yield from ((arg.lineno, arg.arg) for arg in ast.walk(node.args) if isinstance(arg, ast.arg))
        elif isinstance(node, ast.ClassDef):
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            yield from ((field.lineno, field.id) for field in fields if isinstance(field, ast.Name))


def test_parameters_functions_and_fields_say_what_they_are(product: Trees) -> None:
    """Locals may be as short as the lines in which they live; a signature is read without its body."""
    wrong = [
        f"{path}:{line}: {name}"
        for path, nodes in product.items()
        if not path.startswith(NAMED_IN_KERNELS)
        for line, name in signatures(nodes)
        if name.strip("_") in VAGUE
    ]
    assert not wrong, "name the thing: tokens, entry, lines, response_format"
