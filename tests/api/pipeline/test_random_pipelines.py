"""Random functions, cuts, topologies, layouts, schedules: what the whole function gives, its gradients; or refused."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.pipelining import SCHEDULES

UNARY = {
    "tanh": (relax.op.tanh, torch.tanh),
    "relu": (relax.op.nn.relu, torch.relu),
    "exp": (relax.op.sigmoid, torch.sigmoid),
}
BINARY = {
    "add": (relax.op.add, torch.add),
    "multiply": (relax.op.multiply, torch.mul),
    "matmul": (relax.op.matmul, torch.matmul),
}
MESHES = [{"d": 1}, {"d": 2}, {"d": 2, "m": 2}, {"m": 3}]
TRAINING = [name for name in SCHEDULES if name != "forward"]


@st.composite
def operator(draw, i, weights):
    """On what was made last, and perhaps on a weight or on something made before."""
    kind = draw(st.sampled_from(["unary", "binary", "matmul", "matmul"]))
    if kind == "unary":
        return draw(st.sampled_from(list(UNARY))), -1, None
    if kind == "matmul":
        return "matmul", -1, ("w", draw(st.integers(0, weights - 1)))
    return draw(st.sampled_from(["add", "multiply"])), -1, ("v", draw(st.integers(0, i)))


@st.composite
def cases(draw):
    """A function as a list of (operator, operands): operands are numbers of values; and how it is to be run."""
    width, rows, weights = draw(st.sampled_from([2, 3, 4])), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    meshes, chunks = draw(st.lists(st.sampled_from(MESHES), min_size=1, max_size=3)), draw(st.integers(1, 2))
    count = len(meshes) * chunks
    ops = [draw(operator(i, weights)) for i in range(draw(st.integers(count + 1, count + 5)))]
    ops[draw(st.integers(0, len(ops) - 1))] = ("matmul", -1, ("w", 0))
    cuts = sorted(draw(st.lists(st.integers(0, len(ops) - 2), min_size=count - 1, max_size=count - 1, unique=True)))
    layouts = {
        "x": draw(st.sampled_from([{}, {"d": 0}, {"m": 1}])),
        "w0": draw(st.sampled_from([{}, {"d": 1}, {"m": 0}])),
    }
    fitting = [name for name in TRAINING if SCHEDULES[name].any_chunks or SCHEDULES[name].chunks == chunks]
    schedule = draw(st.sampled_from(fitting))
    return width, rows, weights, ops, meshes, cuts, layouts, schedule, draw(st.integers(1, 6)), draw(st.booleans())


def module_of(width, rows, weights, ops):
    """The function as a module, and by torch."""
    builder = relax.BlockBuilder()
    square = relax.TensorStructInfo((width, width), "float32")
    params = {"x": relax.Var("x", relax.TensorStructInfo((rows, width), "float32"))}
    params |= {f"w{i}": relax.Var(f"w{i}", square) for i in range(weights)}
    with builder.function("main", list(params.values())):
        with builder.dataflow():
            values = [params["x"]]
            for i, (name, one, other) in enumerate(ops):
                operands = [
                    values[one],
                    *([params[f"w{other[1]}"] if other[0] == "w" else values[other[1]]] if other else []),
                ]
                values.append(builder.emit((UNARY | BINARY)[name][0](*operands), f"v{i}"))
            out = builder.emit_output(relax.op.mean(values[-1]), "loss")
        builder.emit_func_output(out)

    def by_torch(x, leaves):
        values = [x]
        for name, one, other in ops:
            operands = [
                values[one],
                *([leaves[f"w{other[1]}"] if other[0] == "w" else values[other[1]]] if other else []),
            ]
            values.append((UNARY | BINARY)[name][1](*operands))
        return values[-1].mean()

    return builder.get(), by_torch


@given(cases())
def test_random_pipelines(case):
    width, rows, weights, ops, meshes, cuts, layouts, schedule, microbatches, recompute = case
    mod, by_torch = module_of(width, rows, weights, ops)
    leaves = {f"w{i}": (torch.randn(width, width) / 2).requires_grad_() for i in range(weights)}
    x = torch.randn(rows * microbatches, width)
    loss = by_torch(x, leaves)
    gradients = (
        torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if loss.requires_grad else [None] * weights
    )
    trained = [name for name, gradient in zip(leaves, gradients, strict=True) if gradient is not None]
    axes = {axis for mesh in meshes for axis in mesh}
    layouts = {n: v for n, v in layouts.items() if (n == "x" or uses(ops, n)) and axes.issuperset(v)}
    run, refusal = made(
        mod,
        {f"m{i}": mesh for i, mesh in enumerate(meshes)},
        [f"v{cut}" for cut in cuts] or {"m0": ["loss"]},
        layouts,
        microbatches=microbatches,
        schedule=schedule if trained else "forward",
        train=trained or False,
        weights={name: leaf.detach() for name, leaf in leaves.items()},
        recompute=recompute,
    )
    if run is None:
        assert any(words in refusal for words in REFUSED), refusal
        return
    torch.testing.assert_close(run(x), loss.detach(), rtol=1e-5, atol=1e-5)
    if trained:
        got, by_name = run.gradients(), dict(zip(leaves, gradients, strict=True))
        for name in trained:
            torch.testing.assert_close(got[name], by_name[name], rtol=1e-4, atol=1e-5, msg=name)


def made(*args, **options):
    """The pipeline, or why there is none."""
    try:
        return mt.pipeline(*args, **options), ""
    except mt.MeshTensorError as error:
        return None, str(error)


def uses(ops, weight):
    """Whether an operator takes that weight."""
    return any(other == ("w", int(weight[1:])) for _, _, other in ops)


# Schedules have sizes, and random names of cuts may not make stages.
REFUSED = (
    "stages on",
    "rounds, which are not equally long",
    "to fill both directions",
    "stages per mesh, but the order is made for",
    "has no stage",
    "computes nothing that another stage or the result takes",
    "which comes after it",
    "nothing uses parameter",
    "there is no value",
)
