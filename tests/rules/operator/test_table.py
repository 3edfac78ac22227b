"""Which operators have a rule: docs/adding_an_op.md lists all of Relax, those with a rule and those without."""

import re
from pathlib import Path

from tvm import ir

from mesh_tensor.rules.operator import has_rule
from mesh_tensor.targets.torch_ops import has_torch_function

PAGE = Path(__file__).parents[3] / "docs" / "adding_an_op.md"


def _listed(heading):
    """The operators in the first column of the table under a heading."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return [name for cell in re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE) for name in cell.split()]


def _registered():
    return [name.removeprefix("relax.") for name in ir.Op.list_op_names() if name.startswith("relax.")]


def test_operators_with_a_rule_are_listed():
    assert sorted(_listed("Operators that have a rule")) == sorted(filter(has_rule, _registered()))


def test_operators_without_a_rule_are_listed():
    missing = [name for name in _registered() if not has_rule(name)]
    assert sorted(_listed("Operators that have none")) == sorted(missing)


def test_every_operator_with_a_rule_has_a_torch_function():
    assert [name for name in _registered() if has_rule(name) and not has_torch_function(name)] == []
