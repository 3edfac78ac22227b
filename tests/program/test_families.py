"""Plans of modules with alike layers, for other sizes: as those that are made anew."""

import random
from functools import lru_cache

import pytest
import torch
from torch.nn import functional as F
from tvm import ir, relax, tirx

import mesh_tensor as mt
from kernels.models import gpt2
from mesh_tensor.api import module_plans
from mesh_tensor.plan.ir import STATE_ATTR
from mesh_tensor.program import families, family

op = relax.op
MESHES = [{"x": 3}, {"x": 2, "y": 2}]
GPT = gpt2.Config(vocabulary=12, width=8, heads=2, layers=5, batch=2, positions=70)
COUNT = 5


@pytest.fixture
def planned(monkeypatch):
    """How many modules were planned whole, and how many small ones."""
    counts = {"whole": 0, "small": 0}
    new = module_plans.ModulePlans.new

    def counted(self, sizes, held, whole_axes, module=None, decided=None):
        counts["whole" if module is None else "small"] += 1
        return new(self, sizes, held, whole_axes, module, decided)

    monkeypatch.setattr(module_plans.ModulePlans, "new", counted)
    return counts


def same_as_new(run):
    """The plan of the last call is that which is made anew for its sizes."""
    made = run.plan
    new = run._plans.new(run._sizes, list(run._weights), False)
    assert families.outline(made) == families.outline(new)
    assert made.made.program.values == new.made.program.values
    assert (made.ports, made.index_checks, made.base) == (new.ports, new.index_checks, new.base)
    for step, other in zip(made.made.program.steps, new.made.program.steps, strict=True):
        assert (step.flops, step.bytes, step.words) == (other.flops, other.bytes, other.words)
    for step, other in zip(made.made.program.ops, new.made.program.ops, strict=True):
        assert step.call.kind == other.call.kind
    for name, data in made.made.constants.items():
        assert family.same_data(data, new.made.constants[name])


class Tower:
    """A module of layers on x (batch, places, 8). `layer` adds one to the builder: of the tower, the values so far, and
    its number; `give`: which values are returned."""

    def __init__(self, layer, give=lambda xs: xs[-1]):
        self.batch, self.places = (tirx.SizeVar(name, "int64") for name in ("batch", "places"))
        self.emit, self.weights = None, {}
        builder, info = relax.BlockBuilder(), relax.TensorStructInfo((self.batch, self.places, 8), "float32")
        self._params = {"x": (x := relax.Var("x", info))}
        with builder.testing_scope(def_vars=[self.batch, self.places]):
            self.emit, self.cast = builder.emit, builder.match_cast
            builder._begin_dataflow_block()
            values = [x]
            for number in range(COUNT):
                values.append(layer(self, values, number))
            given = give(values)
            made = builder.emit_output(relax.Tuple(given) if isinstance(given, list) else given)
            block = builder._end_block()
        func = relax.Function(
            list(self._params.values()), relax.SeqExpr([block], made), made.struct_info, is_pure=True
        ).with_attr("global_symbol", "main")
        self.mod = relax.transform.Normalize()(ir.IRModule({"main": func}))

    def param(self, name, *shape):
        """A parameter, which is a weight."""
        if name not in self._params:
            self._params[name] = relax.Var(name, relax.TensorStructInfo(shape, "float32"))
            self.weights[name] = torch.randn(*shape) / 4
        return self._params[name]


def mlp(tower, values, number):
    """A layer with what depends on sizes: places as numbers, a mask, slices, padding, a mean, a merged batch."""
    emit, x, batch, places = tower.emit, values[-1], tower.batch, tower.places
    a, b = tower.param(f"a{number}", 8, 16), tower.param(f"b{number}", 16, 8)
    at = emit(op.arange(0, places, 1, "int64"))
    later = emit(op.less(emit(op.expand_dims(at, 1)), emit(op.expand_dims(at, 0))))
    seen = emit(op.where(later, relax.const(-1e9), emit(op.matmul(x, emit(op.permute_dims(x, [0, 2, 1]))))))
    y = emit(op.matmul(emit(op.nn.softmax(seen)), x))
    y = emit(op.reshape(y, (batch * places, 8)))
    y = emit(op.matmul(emit(op.nn.relu(emit(op.matmul(y, a)))), b))
    y = emit(op.reshape(y, (batch, places, 8)))
    before = emit(op.strided_slice(x, [1], [0], [places - 1]))
    before = emit(op.nn.pad(before, [0, 0, 1, 0, 0, 0]))
    return emit(op.add(emit(op.add(y, before)), emit(op.mean(x, [1], keepdims=True))))


def mlp_in_torch(x, weights, number):
    places = x.shape[1]
    seen = (x @ x.mT).masked_fill(torch.arange(places)[:, None] < torch.arange(places), -1e9)
    y = torch.relu(torch.softmax(seen, -1) @ x @ weights[f"a{number}"]) @ weights[f"b{number}"]
    return y + F.pad(x[:, :-1], (0, 0, 1, 0)) + x.mean(1, keepdim=True)


@lru_cache(maxsize=1)
def gpt():
    model = gpt2.build(GPT)
    dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("places", min=2, max=64)}
    return model, mt.from_torch(torch.export.export(model, (torch.randint(12, (4, 6)),), dynamic_shapes=(dims,)))


def drawn(seed):
    """Sizes: even ones, uneven ones, ones with fewer places than devices, and ones that are as weights' by chance."""
    draw = random.Random(str(seed)).randint
    return [(4, 6), (6, 12), (1, 2), (8, 8), (2, 3), *((draw(1, 9), draw(2, 13)) for _ in range(2))]


def few(planned, sizes):
    """For most sizes nothing was planned whole but what was compared with."""
    assert planned["small"] >= len(set(sizes)) - 1
    assert planned["whole"] - len(sizes) < len(set(sizes)) - 1


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("given", [{}, {0: "x"}, {1: "x"}])
def test_gpt(planned, mesh, given):
    model, imported = gpt()
    shardings = {} if given else gpt2.tensor_parallel(GPT, "x")
    axis = "y" if "y" in mesh and not given else "x"
    run = mt.distribute_module(imported, mesh, shardings | {"tokens": {axis: min(given, default=0)}}, poison=True)
    for size in (sizes := drawn((mesh, given))):
        tokens = torch.randint(12, size)
        torch.testing.assert_close(run(tokens), model(tokens), rtol=2e-4, atol=2e-5)
        same_as_new(run)
    if 1 not in given:  # else rows of the positions' table lie in windows, which are for their very sizes
        few(planned, sizes)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("given", [{"x": {"x": 0}}, {"x": {"x": 1}}, {}])
def test_what_depends_on_sizes(planned, mesh, given):
    tower = Tower(mlp)
    split = {f"{name}{n}": {"x": dim} for n in range(COUNT) for name, dim in (("a", 1), ("b", 0))}
    run = mt.distribute_module(tower.mod, mesh, given or split, weights=tower.weights, poison=True)
    for size in (sizes := drawn((mesh, given))):
        x = expected = torch.randn(*size, 8)
        for number in range(COUNT):
            expected = mlp_in_torch(expected, tower.weights, number)
        torch.testing.assert_close(run(x), expected, rtol=2e-4, atol=2e-5)
        same_as_new(run)
    if given != {"x": {"x": 1}}:  # what is padded and shifted along a split dim has other margins for each size
        few(planned, sizes)


def product(tower, x, weight):
    return tower.emit(op.nn.relu(tower.emit(op.matmul(x, weight))))


def constants(tower, values, number):
    """Of another constant each: these layers are not alike."""
    return tower.emit(op.multiply(product(tower, values[-1], tower.param("w", 8, 8)), relax.const(1.0 + number)))


def axes(tower, values, number):
    """Of another attribute."""
    made = product(tower, values[-1], tower.param(f"w{number}", 8, 8))
    return tower.emit(op.add(made, tower.emit(op.mean(made, [number % 2], keepdims=True))))


def shared(tower, values, number):
    """Two weights by turns: what stands for one in a layer would stand for the other, too."""
    return product(tower, values[-1], tower.param(f"w{number % 2}", 8, 8))


def dense(tower, values, number):
    """The first value, and the two before."""
    made = tower.emit(op.add(product(tower, values[-1], tower.param(f"w{number}", 8, 8)), values[max(0, number - 1)]))
    return tower.emit(op.add(made, values[0]))


def alike(tower, values, number):
    made = product(tower, values[-1], tower.param(f"w{number}", 8, 8))
    return tower.emit(op.add(made, tower.emit(op.divide(values[-1], tower.param("all", 8)))))


def cast(tower, values, number):
    """Rows of a table, for as many places as there are: the module says that there are so many."""
    rows = tower.emit(op.strided_slice(tower.param("table", 8, 8), [0], [0], [tower.places]))
    rows = tower.cast(rows, relax.TensorStructInfo((tower.places, 8), "float32"))
    return tower.emit(op.add(product(tower, values[-1], tower.param(f"w{number}", 8, 8)), rows))


def in_torch(layer, x, weights, give):
    values = [x]
    for number in range(COUNT):
        name = {constants: "w", shared: f"w{number % 2}"}.get(layer, f"w{number}")
        made = torch.relu(values[-1] @ weights[name])
        if layer is constants:
            made = made * (1.0 + number)
        elif layer is axes:
            made = made + made.mean(number % 2, keepdim=True)
        elif layer is dense:
            made = made + values[max(0, number - 1)] + values[0]
        elif layer is cast:
            made = made + weights["table"][: x.shape[1]]
        elif layer is alike:
            made = made + values[-1] / weights["all"]
        values.append(made)
    return give(values)


GIVEN = {"last": lambda xs: xs[-1], "all": lambda xs: xs[1:], "some": lambda xs: [xs[-1], xs[0], xs[2], xs[-1]]}
ODD = {"constants": constants, "axes": axes, "shared": shared, "dense": dense, "alike": alike, "cast": cast}
ARE_ALIKE = {"alike", "axes", "dense", "cast"}  # two and two layers of axes


@pytest.mark.parametrize("given", list(GIVEN))
@pytest.mark.parametrize("name", list(ODD))
def test_layers_that_are_alike_or_not(planned, name, given):
    """Whatever is alike, results are right, and plans as those made anew."""
    tower = Tower(ODD[name], GIVEN[given])
    one = {"w0": {"x": 1}, "w3": {"x": 0}} if name not in ("constants", "shared") else {}
    for shardings in ({"x": {"x": 1}}, one):
        run = mt.distribute_module(tower.mod, {"x": 2}, shardings, weights=tower.weights, poison=True)
        before = planned["small"]
        for size in ((4, 6), (3, 5), (1, 1), (8, 8)):
            x = torch.randn(*size, 8)
            expected = in_torch(ODD[name], x, tower.weights, GIVEN[given])
            torch.testing.assert_close(run(x), expected, rtol=2e-4, atol=2e-5)
            same_as_new(run)
        is_alike = name in ARE_ALIKE and not (name == "axes" and shardings == one)
        assert (planned["small"] > before) == is_alike


def test_rows_that_a_table_lacks(planned):
    """What the module says of every layer's rows is checked for each size, also where few layers are planned."""
    tower = Tower(cast)
    run = mt.distribute_module(tower.mod, {"x": 2}, {"x": {"x": 0}}, weights=tower.weights)
    for places in (6, 5, 7):
        x = torch.randn(2, places, 8)
        torch.testing.assert_close(run(x), in_torch(cast, x, tower.weights, GIVEN["last"]), rtol=2e-4, atol=2e-5)
    assert planned["whole"] == 1
    assert planned["small"] >= 3
    with pytest.raises(mt.MeshTensorError, match=r"is \[8, 8\] float32, but the module says it is \[9, 8\]"):
        run(torch.randn(2, 9, 8))


def test_state_of_layers(planned):
    """What layers write is the next call's, each layer's own."""
    written = {}

    def layer(tower, values, number):
        state = tower.param(f"s{number}", 8)
        made = tower.emit(op.add(product(tower, values[-1], tower.param(f"w{number}", 8, 8)), state))
        written[number] = tower.emit(op.add(state, tower.emit(op.max(made, [0, 1]))))
        return made

    tower = Tower(layer, lambda xs: [xs[-1], *(written[number] for number in range(COUNT))])
    func = tower.mod["main"].with_attr(STATE_ATTR, {f"s{number}": number + 1 for number in range(COUNT)})
    run = mt.distribute_module(
        ir.IRModule({"main": func}), {"x": 2}, {"x": {"x": 1}}, weights=tower.weights, poison=True, overlap="off"
    )
    states = [tower.weights[f"s{number}"] for number in range(COUNT)]
    for size in ((4, 6), (3, 5), (1, 1), (8, 8), (3, 5)):
        x = expected = torch.randn(*size, 8)
        for number in range(COUNT):
            expected = torch.relu(expected @ tower.weights[f"w{number}"]) + states[number]
            states[number] = states[number] + expected.amax((0, 1))
        made = run(x)
        torch.testing.assert_close(made[0] if isinstance(made, tuple) else made, expected, rtol=2e-4, atol=2e-5)
        same_as_new(run)
    kept = run.state_dict()
    for number in range(COUNT):
        torch.testing.assert_close(kept[f"s{number}"], states[number], rtol=2e-4, atol=2e-5)
    assert planned["small"] >= 4
