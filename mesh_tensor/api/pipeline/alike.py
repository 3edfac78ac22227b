"""Stages that are alike are laid out once: what the others run is the same plans, by their own names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax

from mesh_tensor.annotations.annotation import from_attr
from mesh_tensor.annotations.module_annotations import HINTS_ATTR
from mesh_tensor.annotations.names import relax_function, variables
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.pipelining.fragments import FUNCTION, Stage, gradient_name

from ..fragments import Fragment, StageFragments


@dataclass(frozen=True)
class _Known:
    """A stage that is laid out, and what that depends on: by position where names differ from stage to stage."""

    func: relax.Function
    others: Mapping[str, Any]
    facts: tuple[Any, ...]
    made: StageFragments


class AlikeStages:
    """The stages that are laid out so far."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Known]] = {}

    def made(
        self,
        stage: Stage,
        mesh: Mesh,
        layouts: Mapping[str, Any],
        wrt: Sequence[str],
        kinds: Collection[str],
        make: Callable[[], StageFragments],
    ) -> StageFragments:
        """The fragments of a stage: those of one like it under this one's names, or what `make` gives."""
        func, others, facts = _read(stage, mesh, layouts, wrt, kinds)
        alike = self._known.setdefault(ir.structural_hash(func), [])
        for known in alike:
            if known.facts == facts and _equal(func, known.func) and _all_equal(others, known.others):
                return _renamed(known.made, stage, mesh)
        alike.append(_Known(func, others, facts, make()))
        return alike[-1].made


def _equal(one: Any, other: Any) -> bool:
    return one.same_as(other) or ir.structural_equal(one, other)


def _all_equal(functions: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return functions.keys() == others.keys() and all(_equal(func, others[name]) for name, func in functions.items())


def _read(
    stage: Stage, mesh: Mesh, layouts: Mapping[str, Any], wrt: Sequence[str], kinds: Collection[str]
) -> tuple[relax.Function, dict[str, Any], tuple[Any, ...]]:
    """A stage's function without its attributes; the functions that it may call; and all else that says how it is laid
    out, of its values by their positions."""
    func = relax_function(stage.module, FUNCTION)
    at = {var.name_hint: position for position, var in enumerate(variables(func))}
    hints = from_attr((func.attrs or {}).get(HINTS_ATTR, {}))
    stated = sorted((at.get(name, name), repr(layout)) for name, layout in layouts.items()) if layouts else []
    hinted = sorted((str(at.get(name, name)), repr(hint)) for name, hint in hints.items())
    others = {var.name_hint: other for var, other in stage.module.functions_items() if var.name_hint != FUNCTION}
    aside = tuple(stage.gives.index(name) for name in stage.only_state)
    facts = (mesh, repr(stated), repr(hinted), tuple(at[name] for name in wrt), tuple(sorted(kinds)), aside)
    bare = relax.Function(func.params, func.body, func.ret_struct_info, func.is_pure)
    return bare, others, facts


def _renamed(made: StageFragments, stage: Stage, mesh: Mesh) -> StageFragments:
    """The fragments of a stage as those of another one that is like it. What they leave for each other keeps its
    name."""
    olds = (*made.stage.params, *made.stage.takes, *made.stage.gives)
    news = (*stage.params, *stage.takes, *stage.gives)
    names = dict(zip(olds, news, strict=True))
    names |= {gradient_name(old): gradient_name(new) for old, new in names.items()}

    def renamed(fragment: Fragment) -> Fragment:
        takes, gives = (tuple(names.get(n, n) for n in ports) for ports in (fragment.takes, fragment.gives))
        return replace(fragment, module=fragment.module.twin(), takes=takes, gives=gives)

    fragments = {kind: renamed(fragment) for kind, fragment in made.fragments.items()}
    layouts = {names.get(name, name): layout for name, layout in made.layouts.items()}
    return StageFragments(stage, mesh, fragments, layouts)
