"""What TVM's importer of ONNX lacks, reads otherwise or leaves out: as onnx's reference has it, or refused."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import mesh_tensor as mt

from .test_frontends_onnx import save

RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((3, 5, 8)).astype("float32")
AT = RANDOM.integers(0, 3, (4, 5, 8))  # rows that come more than once
NEW = RANDOM.standard_normal((4, 5, 8)).astype("float32")
ENDS = np.where(X > 0.5, np.float32(np.inf), np.where(X < -0.5, np.float32(-np.inf), X))


@pytest.mark.parametrize(
    ("op", "x", "weights", "options"),
    [
        *(
            ("ScatterElements", X, {"at": AT, "new": NEW}, {"reduction": reduction, "opset": 18})
            for reduction in ("add", "mul", "min", "max")
        ),
        ("IsInf", ENDS, {}, {"detect_negative": 0}),
        ("IsInf", ENDS, {}, {"detect_positive": 0}),
        ("IsInf", ENDS, {}, {"detect_positive": 0, "detect_negative": 0}),
        ("LpNormalization", X, {}, {"axis": 2, "opset": 22}),
        *(("LpPool", X, {}, {"kernel_shape": [3], "pads": [1, 0], "p": p, "opset": 18}) for p in (1, 3)),
        ("CumSum", X, {"axis": np.array(1)}, {"exclusive": 1}),
        ("CumSum", X, {"axis": np.array(-1)}, {"exclusive": 1, "reverse": 1}),
        ("Split", X, {}, {"num_outputs": 3, "axis": 2, "outputs": 3, "opset": 18}),
        ("Pad", X, {"pads": np.array([1, 2, 3, 0]), "none": np.float32(7), "axes": np.array([2, 0])}, {"opset": 18}),
        ("Reshape", X, {"shape": np.array([-1, 4])}, {"allowzero": 1}),
        ("RMSNormalization", X, {"scale": X[0]}, {"axis": 1, "opset": 23}),
        ("LayerNormalization", X, {"scale": X[0, 0], "bias": X[1, 1]}, {"outputs": 3}),
        ("PRelu", X, {"slope": NEW[0, :, :1]}, {}),
        ("Pow", abs(X), {"power": AT[0, :1]}, {}),
        ("ReduceL2", X, {"axes": np.zeros(0, np.int64)}, {"noop_with_empty_axes": 1, "opset": 18}),
        ("ReduceSumSquare", X, {"axes": np.zeros(0, np.int64)}, {"noop_with_empty_axes": 1, "opset": 18}),
        ("TopK", X, {"k": np.array([3])}, {"axis": 2, "sorted": 0, "outputs": 2}),
        ("Dropout", X, {}, {"outputs": 2}),
    ],
)
def test_operators(tmp_path, op, x, weights, options):
    expected = save(tmp_path / "model.onnx", op, {"x": x}, weights, **options)
    module = mt.from_onnx(tmp_path / "model.onnx", check=False)
    for layout in ({}, {"a": 0}, {"a": 2}):
        run = mt.distribute_module(module.mod, {"a": 2}, {"x": layout}, weights=module.params)
        results = run(torch.from_numpy(x))
        for result, meant in zip(results if isinstance(results, tuple) else [results], expected, strict=True):
            torch.testing.assert_close(result, meant, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_grids(tmp_path, mode):
    image, grid = RANDOM.standard_normal((2, 3, 5, 6)).astype("float32"), RANDOM.uniform(-1.3, 1.3, (2, 4, 7, 2))
    grid = grid.astype("float32")
    options = {"mode": mode, "padding_mode": "border", "opset": 20}
    save(tmp_path / "model.onnx", "GridSample", {"x": image, "grid": grid}, {}, **options)
    module = mt.from_onnx(tmp_path / "model.onnx")
    run = mt.distribute_module(module.mod, {"a": 2}, {"x": {"a": 0}, "grid": {"a": 0}})
    given = torch.from_numpy(image), torch.from_numpy(grid)
    mode = {"linear": "bilinear"}.get(mode, mode)
    meant = torch.nn.functional.grid_sample(*given, mode=mode, padding_mode="border", align_corners=False)
    torch.testing.assert_close(run(*given), meant)


@pytest.mark.parametrize("p", [1, 2])
def test_zeros_over_their_norm_are_zeros(tmp_path, p):
    save(tmp_path / "model.onnx", "LpNormalization", {"x": X}, {}, axis=1, p=p, opset=22)
    module, x = mt.from_onnx(tmp_path / "model.onnx", check=False), torch.from_numpy(X * (X[:, :1] > 0))
    result = mt.distribute_module(module, {"a": 2}, {"x": {"a": 1}})(x)
    torch.testing.assert_close(result, torch.nn.functional.normalize(x, p, dim=1))


def _ends(size, window, step, apart, pad):
    """By ONNX's documents: as many windows as steps begin, the odd element of padding at the end that `pad` says."""
    missing = max(0, (-(-size // step) - 1) * step + (window - 1) * apart + 1 - size) if pad != "VALID" else 0
    return (missing // 2, -(-missing // 2)) if pad == "SAME_UPPER" else (-(-missing // 2), missing // 2)


@pytest.mark.parametrize("pad", ["SAME_LOWER", "SAME_UPPER", "VALID"])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool", "Conv"])
@pytest.mark.parametrize(
    ("window", "steps", "apart", "counts"),
    [
        ([3, 2], [2, 3], [1, 1], 0),
        ([4, 3], [1, 2], [1, 1], 1),
        ([3, 2], [3, 2], [2, 3], 1),
        ([1, 4], [3, 1], [1, 2], 0),
    ],
)
def test_paddings_that_follow_from_sizes(op, pad, window, steps, apart, counts):
    """The import's check among them, in which onnx's own reference pads the other side of maxima, or can't run."""
    image = RANDOM.standard_normal((2, 4, 9, 8)).astype("float32")
    options = {"kernel_shape": window, "strides": steps, "auto_pad": pad, "dilations": apart}
    options |= {"count_include_pad": counts} if op == "AveragePool" else {}
    weight = RANDOM.standard_normal((3, 4, *window)).astype("float32")
    ends = [_ends(*one, pad) for one in zip((9, 8), window, steps, apart, strict=True)]
    x, around = torch.from_numpy(image), [size for end in reversed(ends) for size in end]

    def windows(x, fill=0.0):
        padded = torch.nn.functional.pad(x, around, value=fill)
        for dim, (size, step, far) in enumerate(zip(window, steps, apart, strict=True), 2):
            padded = padded.unfold(dim, (size - 1) * far + 1, step)[..., ::far]
        return padded.flatten(-2)

    ones = windows(torch.ones_like(x), float(counts))
    expected = {
        "MaxPool": lambda: windows(x, -torch.inf).amax(-1),
        "AveragePool": lambda: windows(x).sum(-1) / ones.sum(-1),
        "LpPool": lambda: windows(x).square().sum(-1).sqrt(),
        "Conv": lambda: torch.einsum("ncijk,ock->noij", windows(x), torch.from_numpy(weight).flatten(2)),
    }[op]()
    weights = [numpy_helper.from_array(weight, "weight")] if op == "Conv" else []
    node = helper.make_node(op, ["x", "weight"][: 1 + len(weights)], ["y"], **options)
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, t.shape) for n, t in {"x": x, "y": expected}.items()]
    graph = helper.make_graph([node], "graph", values[:1], values[1:], weights)
    module = mt.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=8))
    for layout in ({"x": {"a": 0}}, {"x": {"a": 2}}):
        found = mt.distribute_module(module, {"a": 2}, layout, poison=True)(x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_pools_whose_sizes_are_not_settled(tmp_path):
    """3 places by onnx's shape inference, of 8 elements; 2 by ONNX's documents."""
    options = {"kernel_shape": [3], "strides": [3], "auto_pad": "VALID", "ceil_mode": 1}
    save(tmp_path / "model.onnx", "MaxPool", {"x": X}, {}, **options)
    with pytest.raises(mt.MeshTensorError, match="VALID with ceil_mode"):
        mt.from_onnx(tmp_path / "model.onnx", check=False)


def test_pools_of_open_sizes(tmp_path):
    """How much is padded depends on the size, unless windows are one step apart."""
    image, sizes = X[None], {"x": (1, 3, 5, "length")}
    options = {"kernel_shape": [1, 3], "auto_pad": "SAME_UPPER"}
    save(tmp_path / "model.onnx", "MaxPool", {"x": image}, {}, sizes=sizes, **options)
    module, x = mt.from_onnx(tmp_path / "model.onnx", check=False), torch.from_numpy(image)
    result = mt.run_sequential(module.mod, [x])
    torch.testing.assert_close(result, torch.nn.functional.max_pool2d(x, (1, 3), 1, (0, 1)))
    save(tmp_path / "model.onnx", "MaxPool", {"x": image}, {}, sizes=sizes, strides=[1, 2], **options)
    with pytest.raises(mt.MeshTensorError, match="SAME_UPPER paddings of an open size in steps of 2"):
        mt.from_onnx(tmp_path / "model.onnx", check=False)


def test_norms_that_are_trained(tmp_path):
    weights = dict.fromkeys(("scale", "bias", "mean", "var"), abs(X[0, 0, :5]))
    save(tmp_path / "model.onnx", "BatchNormalization", {"x": X}, weights, training_mode=1, outputs=3)
    with pytest.raises(mt.MeshTensorError, match=r"in training mode(.|\n)*'y0' \(BatchNormalization\)"):
        mt.from_onnx(tmp_path / "model.onnx", check=False)


def test_norms_of_order_one(tmp_path):
    """onnx's reference adds up values instead of their sizes."""
    save(tmp_path / "model.onnx", "LpNormalization", {"x": X}, {}, p=1, axis=2)
    module = mt.from_onnx(tmp_path / "model.onnx", check=False)
    result = mt.run_sequential(module.mod, [torch.from_numpy(X)])
    torch.testing.assert_close(result, torch.nn.functional.normalize(torch.from_numpy(X), p=1, dim=2))


def test_constants_of_numbers(tmp_path):
    nodes = [
        helper.make_node("Constant", [], ["f"], value_float=2.5),
        helper.make_node("Constant", [], ["i"], value_ints=[-1, 4]),
        helper.make_node("Mul", ["x", "f"], ["m"]),
        helper.make_node("Reshape", ["m", "i"], ["y"]),
    ]
    module = mt.from_onnx(saved(tmp_path, nodes, (3, 8), (6, 4)))
    x = torch.randn(3, 8)
    assert torch.equal(mt.run_sequential(module.mod, [x]), (x * 2.5).reshape(6, 4))


def test_attention_is_that_of_onnx(tmp_path):
    """TVM's importer has Microsoft's operator under this name."""
    q, k, v = (RANDOM.standard_normal((2, 4, length, 8)).astype("float32") for length in (5, 6, 6))
    (expected,) = save(tmp_path / "model.onnx", "Attention", {"q": q, "k": k, "v": v}, {}, opset=23)
    module = mt.from_onnx(tmp_path / "model.onnx")
    run = mt.distribute_module(module.mod, {"a": 2}, {name: {"a": 1} for name in "qkv"})
    torch.testing.assert_close(run(*map(torch.from_numpy, (q, k, v))), expected, rtol=1e-5, atol=1e-5)
    assert "all_gather" not in run.explain()


def test_options_that_no_conversion_looks_at(tmp_path):
    node = helper.make_node("Cast", ["x"], ["y"], name="narrow", to=TensorProto.FLOAT8E4M3FN, saturate=0)
    with pytest.raises(mt.MeshTensorError, match="option 'saturate' is 0") as error:
        mt.from_onnx(saved(tmp_path, [node], (3, 8), (3, 8), TensorProto.FLOAT8E4M3FN), check=False)
    assert "node 'narrow' (Cast)" in str(error.value)
    assert "its conversion leaves that out" in str(error.value)


def test_operators_of_others_by_a_known_name(tmp_path):
    node = helper.make_node("Relu", ["x"], ["y"], domain="my.own")
    path = saved(tmp_path, [node], (3, 8), (3, 8), domains=["my.own"])
    with pytest.raises(mt.MeshTensorError, match="operator 'Relu' is of the domain 'my.own'"):
        mt.from_onnx(path, check=False)


def test_sizes_are_computed_once(tmp_path):
    """What torch's exporter makes of x.reshape(x.shape[0], x.shape[1] * x.shape[2]), and of an open first size."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["rows"]),
        helper.make_node("Gather", ["shape", "two"], ["columns"]),
        helper.make_node("Mul", ["rows", "columns"], ["both"]),
        helper.make_node("Concat", ["less", "both"], ["into"], axis=0),
        helper.make_node("Reshape", ["x", "into"], ["y"]),
    ]
    numbers = {"one": [1], "two": [2], "less": [-1]}
    for first in (3, "n"):
        module = mt.from_onnx(saved(tmp_path, nodes, (first, 5, 8), (first, 40), **numbers))
        x = torch.randn(3, 5, 8)
        assert torch.equal(mt.run_sequential(module.mod, [x]), x.reshape(3, 40))
        assert "shape_of" not in module.mod.script()


def test_random_numbers_are_no_constants(tmp_path):
    nodes = [
        helper.make_node("Constant", [], ["like"], value_floats=[0.0, 0.0]),
        helper.make_node("RandomNormalLike", ["like"], ["noise"]),
        helper.make_node("Add", ["x", "noise"], ["y"]),
    ]
    with pytest.raises(mt.MeshTensorError, match="RandomNormalLike"):
        mt.from_onnx(saved(tmp_path, nodes, (3, 2), (3, 2)), check=False)


def saved(folder, nodes, shape, made, kind=TensorProto.FLOAT, domains=(), **numbers):
    """The path of a model of nodes from x to y."""
    constants = [numpy_helper.from_array(np.array(value), name) for name, value in numbers.items()]
    x, y = (
        helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
        helper.make_tensor_value_info("y", kind, made),
    )
    graph = helper.make_graph(nodes, "graph", [x], [y], constants)
    opsets = [helper.make_opsetid("", 21), *(helper.make_opsetid(domain, 1) for domain in domains)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"
