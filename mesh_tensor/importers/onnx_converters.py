"""convert: TVM's importer of ONNX, which refuses what it would leave out; and operators that it lacks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tvm import ir, relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.aten import arguments_text

from .onnx_conversions import SIMPLE, Conversion

# What no result depends on: of how memory lies, of what is for training, or said by other options, too.
_NO_EFFECT = {"tvm_custom", "storage_order", "seed", "is_test", "consumed_inputs"}


def convert(onnx: Any, model: Any, shapes: Mapping[str, Any]) -> ir.IRModule:
    """The Relax module of a model; its weights are parameters, and their values its function's `params`.

    Raises:
        MeshTensorError: an operator has an option or an operand that its conversion does not look at.
    """
    frontend = importlib.import_module("tvm.relax.frontend.onnx.onnx_frontend")
    opset = opset_of(model)
    importer = _importer_class(onnx, frontend)(dict(shapes), "float32", keep_params_in_input=True, sanitize=False)
    return importer.from_onnx(model.graph, opset)


def opset_of(model: Any) -> int:
    """The version of ONNX's own operators in a model."""
    return next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 1)


class _Options(dict[str, Any]):
    """The options of a node, and which of them were looked at."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.seen.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.seen.add(name)
        return super().pop(name, *default)


def _importer_class(onnx: Any, frontend: Any) -> Any:
    class Operands(frontend.onnx_input):  # type: ignore[name-defined,misc]
        """The operands of a node, and which of them were looked at."""

        def __init__(self, given: Any) -> None:
            super().__init__(given)
            self.seen: set[int] = set()

        def __getitem__(self, item: Any) -> Any:
            self.seen.update(range(len(self))[item] if isinstance(item, slice) else [item])
            return super().__getitem__(item)

        def __iter__(self) -> Any:
            self.seen.update(range(len(self)))
            return super().__iter__()

    class Importer(frontend.ONNXGraphImporter):  # type: ignore[name-defined,misc]
        """Converts by `_CONVERSIONS` first; looks what conversions look at."""

        def _convert_operator(self, op_name: str, inputs: Any, attrs: dict[str, Any], opset: int) -> relax.Expr:
            options, operands = _Options(attrs), Operands(inputs)
            own = _CONVERSIONS.get(op_name)
            made = None if own is None else own(self.bb, operands, options)
            if made is None:
                made = super()._convert_operator(op_name, operands, options, opset)
            problems = [
                f"option {name!r} is {_shown(value)}"
                for name, value in attrs.items()
                if name not in options.seen | _NO_EFFECT and not _is_default(onnx, op_name, opset, name, value)
            ]
            problems += [
                f"operand {number} is given"
                for number, given in enumerate(inputs)
                if given is not None
                and number not in {seen % len(inputs) for seen in operands.seen if seen < len(inputs)}
            ]
            if problems:
                refuse(
                    problems,
                    where=f"node {attrs['tvm_custom']['name'] or op_name!r} ({op_name})",
                    why="its conversion leaves that out",
                    fix="export the model without",
                )
            return made

    return Importer


def _is_default(onnx: Any, op: str, opset: int, name: str, value: Any) -> bool:
    try:
        stated = onnx.defs.get_schema(op, opset, "").attributes[name].default_value
    except (KeyError, onnx.defs.SchemaError):
        return False
    if not stated.type:
        return False
    default = onnx.helper.get_attribute_value(stated)
    return bool((tuple(default) if isinstance(value, tuple) else default) == value)


def _shown(value: Any) -> str:
    return repr(value.decode(errors="replace") if isinstance(value, bytes) else value)[:60]


def _scatter_elements(builder: relax.BlockBuilder, operands: Any, options: Mapping[str, Any]) -> relax.Expr:
    """With its reduction, which TVM's importer leaves out."""
    reduction = options.get("reduction", b"none").decode()
    data, indices, updates = operands
    return relax.op.scatter_elements(
        data, indices, updates, axis=options.get("axis", 0), reduction={"none": "update"}.get(reduction, reduction)
    )


def _grid_sample(builder: relax.BlockBuilder, operands: Any, options: Mapping[str, Any]) -> relax.Expr:
    """Torch's, which counts modes and what lies outside by numbers."""
    x, grid = operands
    rank = x.struct_info.ndim
    mode = options.get("mode", b"linear").decode()
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    if mode == "cubic" and rank != 4:
        refuse("cubic samples of a grid that is no plane", fix="sample it linearly")
    numbers = [
        ("linear", "nearest", "cubic").index(mode),
        ("zeros", "border", "reflection").index(options.get("padding_mode", b"zeros").decode()),
        bool(options.get("align_corners", 0)),
    ]
    sizes = [*list(x.struct_info.shape)[:2], *list(grid.struct_info.shape)[1:-1]]
    info = relax.TensorStructInfo(sizes, x.struct_info.dtype)
    text = relax.StringImm(arguments_text([{"tensor": 0}, {"tensor": 1}, *numbers], {}))
    return relax.op.call_pure_packed(f"aten.grid_sampler_{rank - 2}d.default", x, grid, text, sinfo_args=[info])


_CONVERSIONS: dict[str, Conversion] = {"GridSample": _grid_sample, "ScatterElements": _scatter_elements, **SIMPLE}
