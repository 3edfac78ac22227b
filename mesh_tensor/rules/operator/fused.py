"""Operators that are several of Relax's at once, where torch has them as one: only steps call them.

fused.linear           x @ transpose(w), plus a bias over the last dim where there is one: (x, w) or (x, w, bias)
fused.matmul_add       x @ w + bias, of a matrix w and a bias over the last dim
fused.weight_gradient  transpose(a) @ b, where all dims of a and b but their last ones are one
"""

from .call import OpCall

LINEAR, MATMUL_ADD, WEIGHT_GRADIENT = "fused.linear", "fused.matmul_add", "fused.weight_gradient"


def is_weight_gradient(call: OpCall) -> bool:
    """Whether it is an einsum that contracts all dims but the last ones, as in "abm,abn->mn", of tensors of one
    dtype."""
    if call.name != "einsum" or len({tensor.dtype for tensor in (*call.inputs, *call.outputs)}) != 1:
        return False
    terms, _, result = call.attr("subscripts").replace(" ", "").partition("->")
    first, _, second = terms.partition(",")
    if "." in terms or len(first) < 2 or first[:-1] != second[:-1]:
        return False
    return result == first[-1] + second[-1] and len({*first, *second}) == len(first) + 1
