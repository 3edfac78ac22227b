"""What to write in place of torch's operators that are not imported."""

from __future__ import annotations

from collections.abc import Sequence

import torch

NAMESPACES = ("aten", "prims", "transformers", "mesh_tensor_import")
FIX = "write this part of the model with other operators, or export it in eval mode if it is for training only"
_CUSTOM = (
    "say what an operator of your own is made of: program.run_decompositions({torch.ops.lib.op.default: function}),"
    " with a function of torch's operators"
)
_RANDOM = "export the model in eval mode, or draw the numbers outside of it, and give them to it as an input"
_SPARSE = "keep the tensor dense"

# By operator, or namespace.
_WAYS_OUT = {
    # an exported program knows groups by number, and one device's sizes
    "_c10d_functional": "export the model of whole tensors, without collectives, and state how tensors lie: the"
    " collectives follow; or say which axes groups are, by mt.from_torch_rank, which takes all_reduce,"
    " all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single; or write them by hand with"
    " mt.manual_computation and mt.comm",
    "_to_sparse": _SPARSE,
    "_to_sparse_csr": _SPARSE,
    "auto_functionalized": "write an operator that gives its results instead of writing its operands, and " + _CUSTOM,
    "flex_attention": "write score_mod and mask_mod with operators that torch.vmap knows, or use"
    " scaled_dot_product_attention with a mask",
    "foreach_map": "call the function on each tensor",
    "out_dtype": "cast the operands to the result's dtype first",
    "scan": "give scan a body of operators that write nothing",
    "while_loop": "give while_loop a condition and a body of operators that write nothing, on tensors",
}
_WAYS_OUT["auto_functionalized_v2"] = _WAYS_OUT["auto_functionalized"]


_OF_DATA = {
    "repeat_interleave": "say how long it is: repeat_interleave(counts, output_size=...)",
    "nonzero": "take as many places as there may be: torch.nonzero_static(mask, size=...)",
    "_unique2": "number what may come ahead, and count it with one_hot(x, n).sum(0)",
    "unique_consecutive": "number what may come ahead, and count it with one_hot(x, n).sum(0)",
    "bincount": "count with torch.nn.functional.one_hot(x, n).sum(0)",
    "_local_scalar_dense": "keep numbers that are read by .item() or .tolist() in tensors where they say sizes or"
    " branches, or give them as constants",
    "sort": "sort all of x, with those that are not chosen filled: x.masked_fill(~mask, inf).sort()",
    "topk": "take the largest of all of x, with those that are not chosen filled: x.masked_fill(~mask, -inf).topk(k)",
}
_OF_MASKS = "use torch.where(mask, x, 0) instead of x[mask]"
_OPEN = "masks of open sizes choose nothing: export the program with known sizes"


def ways_out_of_data(nodes: Sequence[torch.fx.Node], users: Sequence[torch.fx.Node], is_open: bool) -> str:
    """What may be done about sizes and numbers that data say, and those that use them. `is_open`: whether the program
    has open sizes."""
    names = [_operator(node) for node in (*nodes, *users)]
    found = [_OF_DATA[name] for name in names if name in _OF_DATA]
    if any(_operator(node) in ("index", "masked_select") for node in nodes):
        found.append(_OF_MASKS)
    if is_open:
        found.append(_OPEN)
    return "; ".join(dict.fromkeys(found)) or f"{_OF_MASKS}, and tensors instead of numbers"


def _operator(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", "")).partition(".")[0]


def ways_out(unknown: Sequence[torch.fx.Node], random: Sequence[torch.fx.Node]) -> str:
    """What may be done about operators that are not known, and random ones."""
    found = [_way_out(node) for node in unknown] + [_RANDOM for _ in random]
    return "; ".join(dict.fromkeys(way for way in found if way)) or FIX


def namespace(node: torch.fx.Node) -> str:
    """The library of an operator."""
    return getattr(node.target, "namespace", "aten")


def _way_out(node: torch.fx.Node) -> str:
    for key in (getattr(node.target, "__name__", ""), str(node.target), namespace(node)):
        if (known := _WAYS_OUT.get(key.split(".")[0])) is not None:
            return known
    own = isinstance(node.target, torch._ops.OpOverload) and namespace(node) not in NAMESPACES
    return _CUSTOM if own else ""
