"""What tests have in place of TVM's parser gives what that gives."""

import ast
import inspect

import pytest
from tvm.script.parser.core import doc

from tests import parsed_once
from tests.plan import modules

NAMES = {"f": lambda *args, **more: (args, more), "x": [1, 2, 3], "n": 1, "s": "abc"}
EXPRESSIONS = [
    'f(x, n, 2, key=n, other="t")',
    "f(*x, n)",
    "f(n, **{})",
    "f()",
    "s.upper",
    "x[n]",
    "x[0:n]",
    "(x, n, 3, None)",
    "[x, *x, n]",
    "max",
    "...",
    "-n",
    "{n: s}",
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions_are_worth_the_same(text):
    node = doc.parse(text, mode="eval").body
    assert parsed_once.value_of(node, dict(NAMES)) == parsed_once._compiled_value(node, dict(NAMES))


@pytest.mark.parametrize(
    ("text", "error"), [("unknown", NameError), ("x[7]", IndexError), ("s.nothing", AttributeError), ("n()", TypeError)]
)
def test_expressions_without_a_value(text, error):
    node = doc.parse(text, mode="eval").body
    said = []
    for value in (parsed_once.value_of, parsed_once._compiled_value):
        with pytest.raises(error) as raised:
            value(node, dict(NAMES))
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_trees_are_the_same():
    tree = ast.parse(inspect.getsource(modules))
    ours, theirs = parsed_once.doc_tree(tree), parsed_once._registered_doc_tree(tree)
    assert ast.dump(doc.from_doc(ours), include_attributes=True) == ast.dump(
        doc.from_doc(theirs), include_attributes=True
    )
