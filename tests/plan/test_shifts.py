"""Elements that go to other places of a dim which is split: from neighbours, or out of the own tile."""

import pytest
import torch
import torch.nn.functional as F
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.rules.operator.aten import arguments_text
from tests.other_machines import machine

op = relax.op
X, Y, COLUMN = torch.randn(3, 14), torch.randn(3, 5), 3 * 4  # bytes of a column
PLACES = torch.tensor([12, 3])


def module(make, *tensors):
    """A module with one function of such tensors; `make` gets what emits a call, and them."""
    builder = relax.BlockBuilder()
    infos = [relax.TensorStructInfo(t.shape, str(t.dtype).removeprefix("torch.")) for t in tensors]
    params = [relax.Var(f"p{i}", info) for i, info in enumerate(infos)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(make(builder.emit, *params))
        builder.emit_func_output(out)
    return builder.get()


def cut(x, begin, end, step=1):
    return op.strided_slice(x, [1], [begin], [end], [step])


def side_and_sum(emit, part, y):
    return op.add(emit(op.concat([part, y], 1)), emit(op.sum(part, 1, True)))


def roll(x, shifts, dims):
    text = relax.StringImm(arguments_text([{"tensor": 0}, shifts, dims], {}))
    return op.call_pure_packed("aten.roll.default", x, text, sinfo_args=[x.struct_info])


def unfold(x, size, step):
    text = relax.StringImm(arguments_text([{"tensor": 0}, 1, size, step], {}))
    info = relax.TensorStructInfo((3, (14 - size) // step + 1, size), "float32")
    return op.call_pure_packed("aten.unfold.default", x, text, sinfo_args=[info])


def differences(emit, x):
    return op.subtract(emit(cut(x, 1, 14)), emit(cut(x, 0, 13)))


# the function, its operands, what torch makes of them, columns that a device of two receives, and where the result is
CASES = {
    "differences": (differences, (X,), lambda x: x[:, 1:] - x[:, :-1], 1, "S[1]"),
    "every second": (lambda emit, x: cut(x, 1, 14, 2), (X,), lambda x: x[:, 1::2], 1, "S[1]"),
    "backwards": (lambda emit, x: cut(x, 11, 1, -3), (X,), lambda x: x[:, [11, 8, 5, 2]], 4, "S[1]"),
    "flip": (lambda emit, x: op.flip(x, 1), (X,), lambda x: x.flip(1), 7, "S[1]"),
    "roll": (lambda emit, x: roll(x, [2], [1]), (X,), lambda x: x.roll(2, 1), 2, "S[1]"),
    "roll farther than a tile": (lambda emit, x: roll(x, [1, -10], [0, 1]), (X,), lambda x: x.roll((1, -10), (0, 1)), 4,
        "S[1]"),
    "windows": (lambda emit, x: unfold(x, 4, 2), (X,), lambda x: x.unfold(1, 4, 2), 3, "S[1]"),
    "padding": (lambda emit, x: op.nn.pad(x, (0, 0, 2, 1)), (X,), lambda x: F.pad(x, (2, 1)), 2, "S[1]"),
    "padding with a number": (lambda emit, x: op.nn.pad(x, (1, 0, 2, 1), "constant", 5.0), (X,),
        lambda x: F.pad(x, (2, 1, 1, 0), value=5.0), 2, "S[1]"),
    "padding by less than nothing": (lambda emit, x: op.nn.pad(x, (0, 0, -3, -2)), (X,),
        lambda x: F.pad(x, (-3, -2)), 2, "S[1]"),
    "padding behind what is cut": (lambda emit, x: op.nn.pad(x, (0, 0, -4, 3), "constant", 5.0), (X,),
        lambda x: F.pad(x, (-4, 3), value=5.0), 4, "S[1]"),
    "side by side": (lambda emit, x, y: op.concat([x, y], 1), (X, Y), lambda x, y: torch.cat([x, y], 1), 3, "S[1]"),
    "shifted cache": (lambda emit, x, y: op.concat([emit(cut(x, 5, 14)), y], 1), (X, Y),
        lambda x, y: torch.cat([x[:, 5:], y], 1), 5, "S[1]"),
    "cache that forgets its end": (lambda emit, x, y: op.concat([y, emit(cut(x, 0, 9))], 1), (X, Y),
        lambda x, y: torch.cat([y, x[:, :-5]], 1), 5, "S[1]"),
    "rolled by slices": (lambda emit, x: op.concat([emit(cut(x, 3, 14)), emit(cut(x, 0, 3))], 1), (X,),
        lambda x: x.roll(-3, 1), 6, "S[1]"),
    "out of the middle": (lambda emit, x, y: op.concat([y, emit(cut(x, 3, 9)), y], 1), (X, Y),
        lambda x, y: torch.cat([y, x[:, 3:9], y], 1), 9, "S[1]"),
    "slice that others take too": (lambda emit, x, y: side_and_sum(emit, emit(cut(x, 5, 14)), y), (X, Y),
        lambda x, y: torch.cat([x[:, 5:], y], 1) + x[:, 5:].sum(1, True), 12, "S[1]"),
    "padding in a circle": (lambda emit, x: op.nn.pad(x, (0, 0, 4, 3), "circular"), (X,),
        lambda x: F.pad(x, (4, 3), "circular"), 4, "S[1]"),
    "flip of both": (lambda emit, x: op.flip(emit(op.flip(x, 1)), 0), (X,), lambda x: x.flip(0, 1), 7, "S[1]"),
    "backwards to the first": (lambda emit, x: cut(x, -1, -15, -2), (X,), lambda x: x[:, [13, 11, 9, 7, 5, 3, 1]], 9,
        "S[1]"),
    "rows of a cache": (lambda emit, x, y: op.slice_scatter(x, y, 4, 9, 1, axis=1), (X, Y),
        lambda x, y: x.slice_scatter(y, 1, 4, 9), 0, "S[1]"),
    "one element": (lambda emit, x: cut(x, 13, 14), (X,), lambda x: x[:, -1:], 1, "R"),
}  # fmt: skip


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_shifted(name, mesh):
    make, operands, reference, columns, layout = CASES[name]
    both = dict.fromkeys(mesh, 1)
    run = mt.distribute_module(module(make, *operands), mesh, {"p0": both}, poison=True)
    torch.testing.assert_close(torch.as_tensor(run(*operands)), reference(*operands))
    if mesh == {"x": 2}:
        assert sum(step.bytes for step in run.program.collectives) <= columns * COLUMN
        (result,) = (run.program.values[p.output] for p in run.program.parameters if p.output)
        assert str(result.sharding) == layout


@pytest.mark.parametrize("dim", [0, 1])
def test_nothing_is_turned_around(dim):
    x = torch.randn(3, 0)
    run = mt.distribute_module(module(lambda emit, x: op.flip(x, dim), x), {"x": 2}, {"p0": {"x": 1}}, poison=True)
    assert run(x).shape == (3, 0)


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize(
    ("begin", "end", "step", "rows"), [(1, 25, 1, 6), (2, 26, 1, 8), (0, 25, 2, 1), (25, 1, -1, 6), (25, 1, -2, 4)]
)
def test_what_is_cut_out_is_taken_apart(begin, end, step, rows, mesh):
    """A tile of the first of two dims reads as far as its elements together do; of the second, all."""
    x = torch.randn(3, 26)
    count = len(range(begin, end, step))
    shape = (3, rows, count // rows)
    apart = module(lambda emit, p: op.exp(emit(op.reshape(emit(cut(p, begin, end, step)), shape))), x)
    expected = x[:, list(range(begin, end, step))].reshape(shape).exp()
    for layout in (dict.fromkeys(mesh, 1), dict(zip(mesh, (2, 1), strict=False))):
        run = mt.distribute_module(apart, mesh, {"gv": layout}, poison=True)
        torch.testing.assert_close(torch.as_tensor(run(x)), expected)


# what is made of the parts of 3, 9 and 2 columns, and that in torch
UNEQUAL = {
    "each": (lambda emit, parts: [op.exp(part) for part in parts], lambda *parts: [part.exp() for part in parts]),
    "one": (lambda emit, parts: [op.exp(parts[1])], lambda _, part, __: [part.exp()]),
    "turned": (lambda emit, parts: [op.concat([parts[2], parts[0], parts[1]], 1)],
        lambda a, b, c: [torch.cat([c, a, b], 1)]),
    "summed": (lambda emit, parts: [op.sum(part, 1) for part in parts], lambda *parts: [part.sum(1) for part in parts]),
}  # fmt: skip


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_parts(name, mesh):
    make, reference = UNEQUAL[name]

    def parts(emit, x):
        split = emit(op.split(x, [3, 12], 1))
        made = make(emit, [emit(relax.TupleGetItem(split, n)) for n in range(3)])
        return relax.Tuple([emit(one) for one in made])

    with machine(1):
        run = mt.distribute_module(module(parts, X), mesh, {"p0": dict.fromkeys(mesh, 1)}, poison=True)
        for found, expected in zip(run(X), reference(*X.split([3, 9, 2], 1)), strict=True):
            torch.testing.assert_close(torch.as_tensor(found), expected)
    if mesh == {"x": 2} and name in ("each", "one"):
        assert {step.kind for step in run.program.collectives} == {"halo"}
        assert sum(step.bytes for step in run.program.collectives) < 7 * COLUMN


def positions(emit, index, *shape):
    return emit(op.reshape(index, shape))


def each(emit, index):
    """Where the elements of rows stand."""
    return positions(emit, index, 2, 1), emit(op.arange(0, 3, 1, dtype="int64"))


# into places that data says: of a tensor whose indexed dim is split
PUT = {
    "index_put": (lambda emit, x, v, p: op.index_put(x, each(emit, p), v), lambda x, v, p: x.index_copy(0, p, v)),
    "index_put adds": (
        lambda emit, x, v, p: op.index_put(x, each(emit, p), v, True),
        lambda x, v, p: x.index_add(0, p, v),
    ),
    "scatter_nd": (
        lambda emit, x, v, p: op.scatter_nd(x, positions(emit, p, 2, 1), v),
        lambda x, v, p: x.index_copy(0, p, v),
    ),
    "scatter_elements": (
        lambda emit, x, v, p: op.scatter_elements(
            x, emit(op.broadcast_to(positions(emit, p, 2, 1), (2, 3))), v, 0, "max"
        ),
        lambda x, v, p: x.scatter_reduce(0, p[:, None].expand(2, 3), v, "amax"),
    ),
}


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", PUT)
def test_put_where_data_says(name, parts):
    make, reference = PUT[name]
    x, values = X.T.contiguous(), torch.randn(2, 3)
    run = mt.distribute_module(module(make, x, values, PLACES), {"x": parts}, {"p0": {"x": 0}}, poison=True)
    for places in (PLACES, PLACES - 14):
        expected = reference(x, values, PLACES)
        torch.testing.assert_close(torch.as_tensor(run(x, values, places)), expected)
    assert not run.program.collectives
    with pytest.raises(mt.MeshTensorError, match="from 5 to 14"):
        run(x, values, PLACES + 2)


def test_padding_that_lies_outside_is_minus_infinity():
    run = mt.distribute_module(
        module(lambda emit, x: op.nn.pad(x, (0, 0, 3, 0), "constant", float("-inf")), X), {"x": 3}, {"p0": {"x": 1}}
    )
    torch.testing.assert_close(torch.as_tensor(run(X)), F.pad(X, (3, 0), value=float("-inf")))


def windows_of(emit, x, rows, cols, size):
    """Windows of (batch, rows, columns, features), beside each other."""
    batch, features = x.struct_info.shape[0], x.struct_info.shape[3]
    x = emit(op.reshape(x, (batch, rows // size, size, cols // size, size, features)))
    return emit(op.reshape(emit(op.permute_dims(x, [0, 1, 3, 2, 4, 5])), (-1, size * size, features)))


def shifted_windows(emit, x):
    """A step of attention inside windows of 4 x 4, and one inside windows that are shifted by 2."""

    def attended(x):
        tokens = windows_of(emit, x, 24, 8, 4)
        scores = emit(op.nn.softmax(emit(op.matmul(tokens, emit(op.permute_dims(tokens, [0, 2, 1]))))))
        made = emit(op.reshape(emit(op.matmul(scores, tokens)), (1, 6, 2, 4, 4, 3)))
        return emit(op.reshape(emit(op.permute_dims(made, [0, 1, 3, 2, 4, 5])), (1, 24, 8, 3)))

    x = emit(op.add(x, attended(x)))
    shifted = attended(emit(roll(x, [-2, -2], [1, 2])))
    return op.add(x, emit(roll(shifted, [2, 2], [1, 2])))


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
def test_shifted_windows(mesh):
    """Rows and columns of windows are split; what crosses their borders is exchanged."""
    x = torch.randn(1, 24, 8, 3)
    mod = module(shifted_windows, x)
    layout = {"x": 1} if len(mesh) == 1 else {"x": 1, "y": 2}
    run = mt.distribute_module(mod, mesh, {"p0": layout}, poison=True)
    torch.testing.assert_close(torch.as_tensor(run(x)), mt.run_sequential(mod, (x,)))
    assert {step.kind for step in run.program.collectives} == {"halo"}
    if mesh == {"x": 3}:
        assert [step.bytes for step in run.program.collectives] == [2 * 8 * 3 * 4] * 2


def test_convolution_between_reshapes():
    """The dims of its rows are taken apart before and after it."""
    x, w = torch.randn(1, 2, 4, 4, 5), torch.randn(2, 2, 3, 3)

    def make(emit, x, w):
        rows = emit(op.nn.relu(emit(op.reshape(x, (1, 2, 16, 5)))))
        return op.reshape(emit(op.nn.conv2d(rows, w, padding=1)), (1, 2, 4, 4, 5))

    expected = F.conv2d(x.reshape(1, 2, 16, 5).relu(), w, padding=1).reshape(x.shape)
    for parts, kinds in ((2, ["halo"]), (3, ["all_gather", "halo"])):
        run = mt.distribute_module(module(make, x, w), {"x": parts}, {"p0": {"x": 2}}, poison=True)
        torch.testing.assert_close(torch.as_tensor(run(x, w)), expected, rtol=1e-4, atol=1e-4)
        assert [step.kind for step in run.program.collectives] == kinds
