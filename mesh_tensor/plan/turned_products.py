"""Products of which only the transpose is used are made transposed: that is what the gradients of a layer's weight are,
which lies (out, in) where the product is (in, out); nothing is copied for it then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tvm import ir, relax

_EINSUM, _TRANSPOSE = "relax.einsum", "relax.permute_dims"


def turned_products(bindings: Sequence[relax.VarBinding], results: relax.Expr) -> list[relax.VarBinding]:
    """The bindings, in which a permute_dims of an einsum that nothing else takes is that einsum in another order."""
    uses = Counter(var for binding in bindings for var in relax.analysis.free_vars(binding.value))
    uses.update(relax.analysis.free_vars(results))
    made = {binding.var: binding for binding in bindings}
    gone: set[relax.Var] = set()
    kept = []
    for binding in bindings:
        value = binding.value
        source = made.get(value.args[0]) if _is_call(value, _TRANSPOSE) else None
        if source is not None and _is_call(source.value, _EINSUM) and uses[source.var] == 1:
            gone.add(source.var)
            value = _turned(source.value, value)
        kept.append(relax.VarBinding(binding.var, value) if value is not binding.value else binding)
    return [binding for binding in kept if binding.var not in gone]


def _turned(product: relax.Call, transpose: relax.Call) -> relax.Call:
    """The einsum whose result has its dims in the order that a transpose gives them."""
    left, _, right = str(product.attrs.subscripts).replace(" ", "").partition("->")
    axes = transpose.attrs.axes
    order = [int(axis) % len(right) for axis in axes] if axes else range(len(right))[::-1]
    subscripts = f"{left}->{''.join(right[dim] for dim in order)}"
    made = relax.op.einsum(product.args[0], subscripts)
    relax.expr._update_struct_info(made, transpose.struct_info)
    return made


def _is_call(expr: relax.Expr, name: str) -> bool:
    return isinstance(expr, relax.Call) and isinstance(expr.op, ir.Op) and expr.op.name == name
