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
