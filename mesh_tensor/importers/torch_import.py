"""import_torch: an exported torch program as a Relax module, the types of every operator's results checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from tvm import relax, tirx
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import uncollected
from mesh_tensor.targets.dtypes import dtype_name

from .imported import ImportedModule
from .torch_args import COMPARISONS, compared_sizes, emit, op_name, with_constants, with_sizes_as_tensors
from .torch_backward import forget_saved
from .torch_chosen_rows import with_all_rows
from .torch_collectives import COLLECTIVES, NAMESPACE
from .torch_complex import COMPLEX, Pair, is_complex, of_complex, stays_complex
from .torch_decompositions import decomposed
from .torch_functions import GRAPHS
from .torch_general import any_operator, stays
from .torch_inputs import refuse_one_for_another, with_plain_inputs, with_size_conditions
from .torch_loops import LOOPS, graphs_within
from .torch_names import named
from .torch_numbers import WITH_NUMBERS
from .torch_ops import CONVERTERS, KEPT
from .torch_program import (
    ProgramOfTensors,
    allow_constants,
    check_program,
    depends_on_data,
    drop_assertions,
    written_buffers,
)
from .torch_sizes import in_tir, sizes_of, symbols_of
from .torch_ways_out import FIX, NAMESPACES, namespace, ways_out, ways_out_of_data


@uncollected
def import_torch(
    program: torch.export.ExportedProgram, buffers: bool, groups: Mapping[str, Mesh] | None = None
) -> ImportedModule:
    """The Relax module of an exported program: `mesh_tensor.from_torch`, without its check of results. `groups`: the
    axes of its collectives' groups, by name, of what is one device's part of a manual computation."""
    refuse_one_for_another(program)
    original, importer = program, _Importer()
    importer.groups = groups or {}
    with warnings.catch_warnings():
        for own in ("`isinstance.treespec, LeafSpec", r"erase_node\("):  # torch's; the second one of 2.14
            warnings.filterwarnings("ignore", message=own)
        try:
            program = decomposed(with_constants(with_plain_inputs(program)), KEPT, importer.convert_map)
            program = with_all_rows(program)
        except Exception as error:  # torch's own, of what it can't take apart
            refuse("torch can't take the program apart into operators", why=str(error), fix=FIX)
    check_program(program)
    drop_assertions(program)
    forget_saved(program)
    allow_constants()
    importer.begin(program)
    mod = importer.from_exported_program(
        ProgramOfTensors(program, buffers),
        keep_params_as_input=True,
        unwrap_unit_return_tuple=True,
        no_bind_return_tuple=False,
        custom_convert_map=None,
    )
    if importer.left_over:
        mod = relax.transform.DeadCodeElimination()(mod)
    module = named(mod, program, importer.env, buffers)
    return replace(module, mod=with_size_conditions(module.mod, original, importer.conditions))


class _Importer(ExportedProgramImporter):
    """TVM's importer, with every operator's conversion checked."""

    groups: Mapping[str, Mesh]
    left_over = False  # whether there are values of attempts at operators that nothing uses

    def begin(self, program: torch.export.ExportedProgram) -> None:
        """Take this program next."""
        self._main, self._written = program.graph_module, len(written_buffers(program))
        self._open: dict[Any, tirx.PrimExpr] = {}  # open sizes, by what torch calls them
        self.conditions = list[str]()  # what operators ask of open sizes

    def _translate_fx_graph(self, graph_module: Any, nodes: Any, inputs_vars: Any, custom_ops: Any = None) -> Any:
        """What a graph gives; the new values of written buffers are values of their own."""
        if graph_module is self._main:
            self.functions = self.block_builder  # what other functions go to
        made = super()._translate_fx_graph(graph_module, nodes, inputs_vars, custom_ops)
        if graph_module is not self._main or not self._written:
            return made
        count = len(made) - self._written
        given, new = list(made)[:count], list(made)[count:]
        return (*given, *(emit(self, relax.op.grad.no_grad(value)) for value in new))

    def create_convert_map(self) -> dict[str, Callable[[torch.fx.Node], relax.Expr]]:
        """From operators to functions of their fx nodes."""
        own = {
            name: lambda node, convert=convert: convert(node, self)
            for name, convert in {**CONVERTERS, **LOOPS, **COLLECTIVES}.items()
        }
        self.conversions_of_tvm = super().create_convert_map()
        refused = (*COMPLEX, *(compare.__name__ for compare in COMPARISONS))  # but of complex numbers, and of sizes
        every = {**dict.fromkeys(refused, _refused), **self.conversions_of_tvm, **own}
        return {name: self._checked(convert, name in WITH_NUMBERS) for name, convert in every.items()}

    def _checked(self, convert: Callable[[torch.fx.Node], Any], with_numbers: bool) -> Callable[[torch.fx.Node], Any]:
        def converted(node: torch.fx.Node) -> Any:
            nothing = _without_elements(node)
            try:
                if isinstance(node.meta.get("val"), torch.SymBool):
                    value = compared_sizes(node, self)
                elif is_complex(node):
                    value = of_complex(node, self, convert)
                else:
                    value = with_sizes_as_tensors(node, self, convert) if with_numbers else convert(node)
                differs = _difference(node, value)
            except Exception as error:  # TVM's importer raises what it happens to meet
                if nothing is None and (isinstance(error, MeshTensorError) or not stays(node)):
                    refuse(f"{_op(node)} can't be imported: {error}", where=_where(node), fix=FIX)
                differs = "in that TVM's importer can't take it"
            if differs and nothing is not None:
                self.left_over = True
                return emit(self, relax.op.zeros(*nothing))
            if differs and stays(node):
                self.left_over = True
                value, differs = any_operator(node, self), ""
            if not differs:
                value = self._with_known_sizes(node, value)
            if differs:
                refuse(differs, where=_where(node), why="TVM's importer reads this operator differently", fix=FIX)
            return value

        return converted

    def _with_known_sizes(self, node: torch.fx.Node, value: Any) -> Any:
        """A tensor whose shape says less than torch's (that of x[:n] is min(n, rows)), cast to that one."""
        meant = node.meta.get("val")
        if not (isinstance(meant, torch.Tensor) and isinstance(value, relax.Var)):
            return value
        if all(isinstance(size, int) for size in meant.shape):
            return value
        known = [size if isinstance(size, int) else self._sizes().get(size.node.expr) for size in meant.shape]
        shape = value.struct_info.shape
        if not all(isinstance(size, (int, tirx.Var)) for size in known):
            return value
        if shape is not None and all(map(_is_known_as, shape, known)):
            return value
        return self.block_builder.match_cast(value, relax.TensorStructInfo(known, value.struct_info.dtype))

    def size(self, size: int | torch.SymInt) -> int | tirx.PrimExpr | None:
        """A size, made of the open sizes of the inputs; None if it is not."""
        if isinstance(size, int):
            return size
        known = self._sizes()
        if (made := in_tir(size.node.expr, known)) is not None:
            return made
        symbols = {n: found for n, found in symbols_of(known).items() if n in size.node.expr.free_symbols}
        made = in_tir(size.node.expr, {**known, **{n: value for n, (value, _) in symbols.items()}})
        if made is not None:
            self.conditions += [condition for _, condition in symbols.values()]
        return made

    def _sizes(self) -> dict[Any, tirx.PrimExpr]:
        """The open sizes of the inputs, by what torch calls them."""
        if not self._open:
            places = self._main.graph.find_nodes(op="placeholder")
            given = [(place.meta.get("val"), self.env.get(place)) for place in places]
            self._open = sizes_of(
                (meant.shape, var.struct_info.shape)
                for meant, var in given
                if isinstance(meant, torch.Tensor) and not meant.is_complex() and var is not None
            )
        return self._open

    def _has_open_sizes(self) -> bool:
        given = (place.meta.get("val") for place in self._main.graph.find_nodes(op="placeholder"))
        return any(isinstance(size, torch.SymInt) for one in given for size in getattr(one, "shape", ()))

    def _is_known(self, node: torch.fx.Node) -> bool:
        """Operators are known by name; others' that are called as one of torch's are not meant."""
        if op_name(node) in COLLECTIVES:
            return namespace(node) == NAMESPACE and bool(self.groups)
        return namespace(node) in NAMESPACES or node.target in GRAPHS

    def _check_unsupported_func_type(self, nodes: list[torch.fx.Node]) -> None:
        """Refuse operators without a conversion, all of them."""
        calls = [node for node in graphs_within(nodes) if node.op == "call_function"]
        lacking = [node for node in calls if op_name(node) not in self.convert_map]
        stay = {op_name(node) for node in lacking if stays(node) or stays_complex(node)}
        self.convert_map |= {name: self._checked(lambda node: any_operator(node, self), False) for name in stay}
        unknown = [node for node in calls if op_name(node) not in self.convert_map or not self._is_known(node)]
        seeded = torch.Tag.nondeterministic_seeded
        random = [
            node for node in calls if seeded in getattr(node.target, "tags", ()) and op_name(node) not in CONVERTERS
        ]
        of_data = [node for node in calls if depends_on_data(node)]
        if of_data:
            users = [user for node in of_data for user in node.users]
            refuse(
                list(dict.fromkeys(f"{_op(node)} gives what depends on data ({_where(node)})" for node in of_data[:8])),
                where="the exported program",
                why="sizes, and numbers that are read out of tensors (.item(), .tolist()), have to be known ahead",
                fix=ways_out_of_data(of_data, users, self._has_open_sizes()),
            )
        unknown = [node for node in unknown if node not in random]
        problems = [f"{_op(node)} is not known ({_where(node)})" for node in unknown]
        problems += [f"{_op(node)} is random ({_where(node)})" for node in random]
        if problems:
            refuse(list(dict.fromkeys(problems)), where="the exported program", fix=ways_out(unknown, random))


def _without_elements(node: torch.fx.Node) -> tuple[list[int], str] | None:
    """Shape and dtype of a result that has no elements, which can be made without its operator (Relax's reshape takes a
    size of 0 for another one, its slices may end before they begin); None of any other."""
    meant = node.meta.get("val")
    if not isinstance(meant, torch.Tensor) or meant.is_complex() or not all(type(n) is int for n in meant.shape):
        return None
    return (list(meant.shape), dtype_name(meant.dtype)) if 0 in meant.shape else None


def _difference(node: torch.fx.Node, value: Any) -> str:
    """What Relax says about the result, if it is not what torch says. (TVM's importer makes float32 of some.)"""
    for made, meant in _pairs(value, node.meta.get("val")):
        info = made.struct_info
        shape = list(info.shape.values) if info.shape is not None else []
        same_shape = info.ndim == meant.dim() and all(_same(a, b) for a, b in zip(shape, meant.shape, strict=False))
        dtype = dtype_name(meant.dtype)
        if not same_shape or info.dtype != dtype:
            return f"{_op(node)} was imported as {info}, but in torch it is {tuple(meant.shape)} {dtype}"
    return ""


def _pairs(value: Any, meant: Any) -> Iterator[tuple[relax.Expr, torch.Tensor]]:
    """The tensors of a Relax value with torch's; other values are left out."""
    if isinstance(value, Pair):
        yield from ((part, meant.real) for part in (value.real, value.imag))
    elif isinstance(meant, (tuple, list)) and isinstance(value, (relax.Tuple, tuple, list)):
        fields = value.fields if isinstance(value, relax.Tuple) else value
        for made, one in zip(fields, meant, strict=False):
            yield from _pairs(made, one)
    elif isinstance(meant, torch.Tensor) and isinstance(getattr(value, "struct_info", None), relax.TensorStructInfo):
        yield value, meant


def _is_known_as(size: tirx.PrimExpr, known: int | tirx.Var) -> bool:
    return isinstance(size, tirx.IntImm) if isinstance(known, int) else size.same_as(known)


def _same(size: Any, meant: Any) -> bool:
    """Symbolic sizes are taken on trust."""
    return not isinstance(meant, int) or not hasattr(size, "value") or int(size) == meant


def _refused(node: torch.fx.Node) -> None:
    refuse(f"{_op(node)} of floats")


def _op(node: torch.fx.Node) -> str:
    return f"torch operator {node.target}"


def _where(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next((path for path, _ in reversed(stack.values()) if path), "")
    return f"value {node.name!r}" + (f" in {path}" if path else "")
