"""Whatever users call says the way out of what it refuses."""

import ast
from pathlib import Path

import pytest

import mesh_tensor.api

FILES = sorted(Path(mesh_tensor.api.__file__).parent.rglob("*.py"))


def refusals(source):
    """The calls of refuse in a source that have words of their own."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "refuse"]
    return [call for call in named if not ast.unparse(call.args[0]).startswith("words_of(")]


@pytest.mark.parametrize("package", ["", "pipeline"])
def test_refusals_have_a_fix(package):
    files = [file for file in FILES if file.parent.name == (package or "api")]
    found = {file.name: refusals(file.read_text()) for file in files}
    assert sum(map(len, found.values())) > 20
    without = [
        f"{name}:{call.lineno}"
        for name, calls in found.items()
        for call in calls
        if not any(keyword.arg == "fix" for keyword in call.keywords)
    ]
    assert not without
