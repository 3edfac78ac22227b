"""from_torch: an exported torch program as a Relax module that computes the same."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from mesh_tensor.runtime.sequential import run_sequential

from .imported import ImportedModule
from .imported_results import refuse_differences
from .torch_import import import_torch


def from_torch(program: torch.export.ExportedProgram, *, check: bool = True) -> ImportedModule:
    """The Relax module of what `torch.export.export` gave.

    Its function `main` takes the inputs in torch's order (nested ones flattened), under torch's names for them, then
    the parameters: "blocks.0.fc.weight" is called `blocks_0_fc_weight` (an identifier; `p_` stands in front of a name
    that begins with a digit). `annotate_module` knows them by both names; it also takes the name of a submodule that is
    called once, "blocks.0.fc", for the tensor that it gives. Buffers are constants. A single result is no tuple.
    `scaled_dot_product_attention`, `layer_norm`, `rms_norm`, `gelu` and others that Relax has stay one operator each.

    Args:
        program: what `torch.export.export` gave.
        check: run both on the program's example inputs, and refuse a module whose results are not torch's: TVM's
            importer leaves out some options of some operators.

    Raises:
        MeshTensorError: an operator that can't be imported, random or of another result type than in torch, named with
            the torch module it is in; a program that writes its buffers, or takes inputs that are no tensors; results
            that differ.
    """
    module = import_torch(program)
    if check and program.example_inputs is not None:
        _check(module, program)
    return module


def _check(module: ImportedModule, program: torch.export.ExportedProgram) -> None:
    args, kwargs = program.example_inputs
    with torch.no_grad():
        expected = pytree.tree_leaves(program.module()(*args, **kwargs))
        results = run_sequential(module.mod, [*pytree.tree_leaves((args, kwargs)), *module.params.values()])
    refuse_differences(
        results,
        expected,
        "torch",
        "the imported program, on its example inputs",
        "write the model with other operators",
    )
