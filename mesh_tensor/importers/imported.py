"""ImportedModule: what the frontends give, and how names of elsewhere become names of a module."""

from __future__ import annotations

import keyword
from dataclasses import dataclass, field

import torch
from tvm import ir

from mesh_tensor.annotations.names import Fresh

from .call_form import CallForm


@dataclass(frozen=True, eq=False)
class ImportedModule:
    """A module that was made elsewhere: `mod` takes its weights as parameters, after its inputs; `params` are the
    weights, by parameter name; `names` is from names that values had before to the module's. `state`: weights that a
    call writes; their new values are the function's last results. `buffers`: weights that no training changes.
    `form`: what the model takes and gives."""

    mod: ir.IRModule
    params: dict[str, torch.Tensor]
    names: dict[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    form: CallForm | None = None


def identifiers(names: list[str], taken: list[str]) -> dict[str, str]:
    """Each name as an identifier that no other one and none of `taken` has: "a.b" is a_b; `p_` stands in front of a
    name that begins with a digit."""
    fresh = Fresh(taken)
    return {name: fresh.name(_identifier(name)) for name in names}


def _identifier(name: str) -> str:
    made = "".join(char if char.isalnum() and char.isascii() else "_" for char in name)
    return f"p_{made}" if not made or made[0].isdigit() or keyword.iskeyword(made) else made
