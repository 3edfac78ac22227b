"""Public names are imported when they are first used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mesh_tensor as mt

STUB = Path(mt.__file__).with_suffix(".pyi")


def stated_names():
    lists = [node.value for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.Assign)]
    return ast.literal_eval(lists[0])


@pytest.fixture(scope="module")
def fresh():
    """Of a process of its own: what one name of the package imports; then, where everything is imported, which modules
    hold tensors."""
    code = (
        "import pkgutil, importlib, sys, mesh_tensor\n"
        "mesh_tensor.Mesh\n"
        "print(*[name for name in sys.modules if name.startswith('mesh_tensor.')])\n"
        "import torch\n"
        "found = [name for _, name, _ in pkgutil.walk_packages(mesh_tensor.__path__, 'mesh_tensor.')]\n"
        "for name in found: name.endswith('.worker') or importlib.import_module(name)\n"
        "print(*[name for name in found\n"
        "        if any(isinstance(held, torch.Tensor) for held in vars(sys.modules.get(name, torch.fft)).values())])\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return [line.split() for line in said.splitlines()]


def test_every_public_name():
    assert sorted(stated_names()) == mt.__all__
    for name in mt.__all__:
        assert getattr(mt, name) is not None
    assert set(mt.__all__) <= set(dir(mt))


def test_a_public_name_is_no_package_of_ours():
    """`import mesh_tensor.<package>` would put the package where the name was."""
    packages = {path.parent.name for path in Path(mt.__file__).parent.glob("*/__init__.py")}
    assert packages & set(mt.__all__) == {"lowering"}


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'mesh_tensor' has no attribute 'compil'"):
        mt.compil  # noqa: B018


def test_nothing_is_imported_before_it_is_used(fresh):
    assert fresh[0]
    assert not [name for name in fresh[0] if not name.startswith("mesh_tensor.base")]


def test_no_module_makes_tensors_when_it_is_imported(fresh):
    """What torch was told elsewhere at the time of first use would get into them."""
    assert fresh[1] == []
