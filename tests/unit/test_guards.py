"""Rules that hold for the package as a whole, and that no single module would notice breaking."""

from __future__ import annotations

import ast
import copy
import doctest
import importlib
import inspect
import pickle
import re
import types
import zipfile
from importlib import resources
from pathlib import Path

import pytest

import dcp_reshard
from dcp_reshard import errors

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "dcp_reshard").glob("*.py"))
MODULES = [f"dcp_reshard.{p.stem}" for p in SOURCES if p.stem not in ("__init__", "__main__")]
ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.ReshardError)
]


def public_names(module: types.ModuleType) -> set[str]:
    """Names without an underscore, but for modules and what `from __future__` leaves behind."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__class__", None).__name__ != "_Feature"
    }


def test_package_exports_what_it_says() -> None:
    """The public names of the package are those of `__all__`, each once, and in order."""
    assert sorted(public_names(dcp_reshard)) == sorted(dcp_reshard.__all__)
    assert len(set(dcp_reshard.__all__)) == len(dcp_reshard.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_module_exports_what_it_defines(name: str) -> None:
    """`__all__` of a module has every public class and function it defines, and nothing unknown."""
    module = importlib.import_module(name)
    defined = {
        key
        for key in public_names(module)
        if inspect.isclass(value := getattr(module, key)) or inspect.isfunction(value)
        if value.__module__ == name
    }
    assert defined - set(module.__all__) == set()
    assert set(module.__all__) - set(vars(module)) == set()


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    """Every `Example:` prints what it says."""
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_module_says_what_it_is_for(path: Path) -> None:
    """Every module has a docstring."""
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("clone", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy])
def test_errors_survive_pickling(cls: type[errors.ReshardError], clone: object) -> None:
    """A rank's error arrives at the others with its type, message and context."""
    error = cls("tensor `w`: it's short", fqn="w", file="__0_0.distcp", start=3, end=9)
    assert callable(clone)
    other = clone(error)
    assert type(other) is cls
    assert str(other) == str(error) == "tensor `w`: it's short"
    assert vars(other) == vars(error)
    assert (other.fqn, other.file, other.start, other.end) == ("w", "__0_0.distcp", 3, 9)


def test_error_tree_is_complete() -> None:
    """Every error is exported by its module and by the package, and drawn in the docstring."""
    names = {cls.__name__ for cls in ERRORS}
    assert names == set(errors.__all__)
    assert names <= set(dcp_reshard.__all__)
    assert names <= set(re.findall(r"\w+", errors.__doc__ or ""))


def test_type_information_ships() -> None:
    """The marker for type checkers lies in the installed package."""
    assert resources.files("dcp_reshard").joinpath("py.typed").is_file()


def test_wheel_has_the_package_and_nothing_else(tmp_path: Path) -> None:
    """A built wheel holds the modules, the marker and the license; no tests, no scripts."""
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="scripts/install has hatchling")
    [built] = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        names = {name for name in archive.namelist() if not name.endswith(".pyc")}
    package = {f"dcp_reshard/{path.name}" for path in [*SOURCES, ROOT / "dcp_reshard/py.typed"]}
    assert {name for name in names if ".dist-info/" not in name} == package
    assert any(name.endswith("licenses/LICENSE") for name in names)


def private_torch_names(source: str) -> list[str]:
    """Private names of torch that a module imports, or reaches by attribute from a torch name."""
    found: list[str] = []
    torch_names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    torch_names.add(alias.asname or "torch")
                    found += [alias.name] if "._" in alias.name else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                torch_names.add(alias.asname or alias.name)
                name = f"{node.module}.{alias.name}"
                found += [name] if "._" in name else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in torch_names:
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if not path.stem.startswith("_torch")],
    ids=lambda path: path.stem,
)
def test_only_adapters_use_private_torch(path: Path) -> None:
    """What may change with any torch release is named in `_torch` and `_torch_fsdp1` alone."""
    assert private_torch_names(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._utils", ["torch._utils"]),
        ("from torch.distributed._shard import api", ["torch.distributed._shard.api"]),
        ("from torch.distributed.tensor import _dtensor_spec", None),
        ("import torch.distributed as dist\ndist._x.y()", ["dist._x"]),
        ("import torch\ntorch.distributed.tensor.DTensor.__create_chunk_list__", []),
        ("from torch.distributed.tensor import DTensor\nself._mine = DTensor", []),
    ],
)
def test_private_torch_names_are_found(source: str, found: list[str] | None) -> None:
    """The guard above sees imports of private modules and names, and attributes of torch names."""
    names = private_torch_names(source)
    assert names == found if found is not None else len(names) == 1


def test_every_module_is_in_the_map() -> None:
    """`docs/modules.md` has each module in one line, with the first line of its docstring."""
    rows = re.findall(
        r"^\| `(\w+)` \| (.+) \|$", (ROOT / "docs/modules.md").read_text(), re.MULTILINE
    )
    said = {
        path.stem: " ".join(
            (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split()
        )
        for path in SOURCES
        if path.stem != "__init__"
    }
    assert dict(rows) == said


def test_readme_python_blocks_compile() -> None:
    """Python in the README is Python."""
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README.md")
    for block in re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE):
        compile(block, "README.md", "exec")
