"""A module without its annotations, and these by the names of what they are for: to be stated for another mesh."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh

from .module_annotations import HINTS_ATTR, Annotation, read_module_annotations
from .names import reachable, variables

_OP = "relax.dist.annotate_sharding"


@dataclass(frozen=True)
class Unannotated:
    """`module` without annotations; `stated` are those it had, for `mesh`, by (function, value)."""

    module: ir.IRModule
    mesh: Mesh
    stated: dict[tuple[str, str], Annotation]


def without_annotations(mod: ir.IRModule, function: str) -> Unannotated:
    """A module that `annotate_module` has annotated, as it was before.

    Raises:
        MeshTensorError: some annotation is none of `annotate_sharding`'s.
    """
    read = read_module_annotations(mod, function)
    made, seen = read.module.clone(), set()
    stated: dict[tuple[str, str], Annotation] = {}
    for name, func in reachable(read.module, function).items():
        remover = _Remover(read.module)
        plain = remover.removed(func)
        made.update_func(made.get_global_var(name), plain)
        seen |= {(name, annotation) for annotation in remover.sources}
        for annotation, source in remover.sources.items():
            stated.setdefault((name, source), read.annotations[name, annotation])
    if others := set(read.annotations) - seen:
        refuse(
            [f"{where}.{name} is annotated by its type, or redistributed" for where, name in sorted(others)],
            fix="annotate the module with mt.annotate_module, or use the mesh that it is annotated for",
        )
    return Unannotated(made, read.mesh, stated)


@relax.expr_functor.mutator
class _Remover(relax.PyExprMutator):
    """Has all uses of what an annotate_sharding call gives take what it is given."""

    def __init__(self, mod: ir.IRModule) -> None:
        super().__init__(mod)
        self.sources: dict[str, str] = {}
        self._first: dict[str, str] = {}

    def removed(self, func: relax.Function) -> relax.Function:
        """The function without them."""
        body = relax.BlockBuilder().normalize(self.visit_expr(func.body))
        made = relax.Function(func.params, body, func.ret_struct_info, func.is_pure, func.attrs)
        names = {var.name_hint for var in variables(made)}
        lost = [source for source in self.sources.values() if source not in names]
        assert not lost, lost
        return made.without_attr(HINTS_ATTR) if HINTS_ATTR in (func.attrs or {}) else made

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Drop an annotation; anything else stays."""
        value = binding.value
        if not (isinstance(value, relax.Call) and isinstance(value.op, ir.Op) and value.op.name == _OP):
            super().visit_var_binding_(binding)
            return
        source, name = value.args[0], binding.var.name_hint
        if not isinstance(source, relax.Var):
            refuse(f"{name!r} annotates what has no name", fix="annotate the module with mt.annotate_module")
        self._first[name] = self.sources[name] = self._first.get(source.name_hint, source.name_hint)
        self.set_var_remap(binding.var.vid, self.visit_expr(source))
