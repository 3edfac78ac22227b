"""from_torch: an exported torch program as a Relax module that computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mesh_tensor.base.errors import refuse
from mesh_tensor.runtime.sequential import run_sequential
from mesh_tensor.targets.dtypes import as_floats

from .imported import ImportedModule, form_of, refuse_differences
from .torch_autocast import under_autocast
from .torch_dropout import counted
from .torch_exact import results_in_float64
from .torch_import import import_torch
from .torch_program import dtypes_inside, results_of


def from_torch(program: torch.export.ExportedProgram, *, check: bool = True, buffers: bool = False) -> ImportedModule:
    """Import a program of `torch.export.export` as a Relax module with its weights.

    The module's function `main` takes the inputs in torch's order and under torch's names (nested inputs flattened),
    then the parameters. A parameter's name is made an identifier: "blocks.0.fc.weight" becomes `blocks_0_fc_weight`
    (with the prefix `p_` if it began with a digit). `annotate_module` takes both names; it also takes the name of a
    submodule, "blocks.0.fc", for its output ("fc@0", "fc@1", ... if it is called several times).

    Buffers are constants, except those that the program updates: these follow the parameters, and their new values are
    the last results. Complex tensors become float tensors with a last dim of 2, also in `params`, whose tensors share
    the model's memory. Inputs and results that are no tensors are left out of `main`, and `distribute_module` restores
    them. A single result is no tuple. `scaled_dot_product_attention`, `layer_norm`, `rms_norm`, `gelu` and other
    operators that Relax has are kept as one operator.

    A program with active dropout has a further last input, the integer `dropout_seed` (passed by name if the program
    has inputs by name, or nested ones). What is dropped depends on the seed and the position in the global tensor, so
    it is the same on any mesh.

    Args:
        program: the ExportedProgram.
        check: run both on the program's example inputs, and refuse a module whose results differ from torch's. (TVM's
            importer ignores some options of some operators.)
        buffers: make the buffers in the model's `state_dict()` parameters, too: they can be sharded by name, replaced,
            and are in the `state_dict()` of a run. Training doesn't change them.

    Raises:
        MeshTensorError: an operator that can't be imported, random or of another result type than in torch, named with
            the torch module it is in; a program that writes its inputs, or takes numbers that are not constant; results
            that differ.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        refuse(f"a {type(program).__name__} is no exported program", fix="pass torch.export.export(model, inputs)")
    program = under_autocast(counted(program))
    module = replace(import_torch(program, buffers), form=form_of(program))
    if check and program.example_inputs is not None:
        _check(module, program)
    return module


def _check(module: ImportedModule, program: torch.export.ExportedProgram) -> None:
    args, kwargs = program.example_inputs
    given = _tensors((args, kwargs))
    with torch.no_grad(), _unwritten(program, module):
        first = {name: module.params[name].clone() for name in module.state}
        expected = [as_floats(result).clone() for result in _tensors(results_of(program, args, kwargs))]
        expected += [module.params[name].clone() for name in module.state]
    with torch.no_grad():
        results = run_sequential(module.mod, [*map(as_floats, given), *{**module.params, **first}.values()])
    refuse_differences(
        results,
        expected,
        "torch",
        exact=lambda: [] if module.state else [*map(as_floats, results_in_float64(program, given))],
        where="the imported program, on its example inputs",
        fix="write the model with other operators",
        computed_in=dtypes_inside(program),
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextmanager
def _unwritten(program: torch.export.ExportedProgram, module: ImportedModule) -> Iterator[None]:
    """Buffers that the program writes are as they were afterwards."""
    kept = {name: module.params[name].clone() for name in module.state}
    try:
        yield
    finally:
        for name, value in kept.items():
            module.params[name].copy_(value)
