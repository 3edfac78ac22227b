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

from .call_form import form_of
from .imported import ImportedModule, refuse_differences
from .torch_dropout import counted
from .torch_import import import_torch
from .torch_program import operators


def from_torch(program: torch.export.ExportedProgram, *, check: bool = True, buffers: bool = False) -> ImportedModule:
    """The Relax module of what `torch.export.export` gave.

    Its function `main` takes the inputs in torch's order (nested ones flattened), under torch's names for them, then
    the parameters: "blocks.0.fc.weight" is called `blocks_0_fc_weight` (an identifier; `p_` stands in front of a name
    that begins with a digit). `annotate_module` knows them by both names; it also takes the name of a submodule that is
    called once, "blocks.0.fc", for the tensor that it gives. Buffers are constants, but for those that the program
    writes: they come after the parameters, and their new values are the last results. What goes in or out and is no
    tensor is left out, but `distribute_module` of what this gives knows of it. A single result is no tuple.
    `scaled_dot_product_attention`, `layer_norm`, `rms_norm`, `gelu` and others that Relax has stay one operator each.
    A program in which dropout is at work takes a whole number as its last input, `dropout_seed`: what is dropped
    follows from it and from where it stands in the whole tensor, so it is the same on any mesh.

    Args:
        program: what `torch.export.export` gave.
        check: run both on the program's example inputs, and refuse a module whose results are not torch's: TVM's
            importer leaves out some options of some operators.
        buffers: those that the model's `state_dict()` has are parameters, too: they can be laid out by name, replaced,
            and are in the `state_dict()` of a run. No training changes them.

    Raises:
        MeshTensorError: an operator that can't be imported, random or of another result type than in torch, named with
            the torch module it is in; a program that writes its inputs, or takes numbers that are not constant; results
            that differ.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        refuse(f"a {type(program).__name__} is no exported program", fix="pass torch.export.export(model, inputs)")
    program = counted(program)
    module = replace(import_torch(program, buffers), form=form_of(program))
    if check and program.example_inputs is not None:
        _check(module, program)
    return module


def _check(module: ImportedModule, program: torch.export.ExportedProgram) -> None:
    args, kwargs = program.example_inputs
    given = _tensors((args, kwargs))
    with torch.no_grad(), _unwritten(program, module):
        first = {name: module.params[name].clone() for name in module.state}
        expected = [result.clone() for result in _tensors(program.module()(*args, **kwargs))]
        expected += [module.params[name].clone() for name in module.state]
    with torch.no_grad():
        results = run_sequential(module.mod, [*given, *{**module.params, **first}.values()])
    refuse_differences(
        results,
        expected,
        "torch",
        "the imported program, on its example inputs",
        "write the model with other operators",
        {tensor.dtype for node in operators(program) for tensor in _tensors(node.meta.get("val"))},
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
