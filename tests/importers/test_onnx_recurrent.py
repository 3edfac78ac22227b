"""LSTMs, GRUs, RNNs and group norms of ONNX: in smaller operators; what isn't understood is named."""

import re

import pytest
import torch

import mesh_tensor as mt

onnx = pytest.importorskip("onnx")
POSITIONS, BATCH, FEATURES, HIDDEN = 4, 3, 5, 2


def saved(path, op, shape, weights, outputs=1, opset=21, **options):
    """A file with one operator; weights are shapes, or None for one that is left out."""
    names = [name if shape else "" for name, shape in zip("abcdefg", weights, strict=False)]
    make, kind = onnx.helper, onnx.TensorProto.FLOAT
    given = [
        make.make_tensor(name, kind, size, torch.randn(size).flatten())
        for name, size in zip("abcdefg", weights, strict=False)
        if size
    ]
    node = make.make_node(op, ["x", *names], [f"y{n}" for n in range(outputs)], **options)
    ranks = [len(shape) + (op in ("LSTM", "GRU", "RNN")), 3, 3][:outputs]
    made = [make.make_tensor_value_info(f"y{n}", kind, [f"y{n}d{i}" for i in range(r)]) for n, r in enumerate(ranks)]
    graph = make.make_graph([node], "main", [make.make_tensor_value_info("x", kind, shape)], made, given)
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", opset)], ir_version=10)
    onnx.save(model, path)
    return path


def lstm(path, *, directions=1, bias=True, first=False, shape=(POSITIONS, BATCH, FEATURES), **options):
    gates = 4 * HIDDEN
    state = (directions, BATCH, HIDDEN) if first else None
    weights = [(directions, gates, FEATURES), (directions, gates, HIDDEN), (directions, 2 * gates) if bias else None]
    return saved(path, "LSTM", shape, [*weights, None, state, state], 3, hidden_size=HIDDEN, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"opset": 11},
        {"bias": False, "first": True, "direction": "reverse"},
        {"directions": 2, "direction": "bidirectional", "first": True},
        {"shape": (1, BATCH, FEATURES)},
    ],
    ids=str,
)
def test_lstm(tmp_path, options):
    module = mt.from_onnx(lstm(tmp_path / "lstm.onnx", **options))
    x = torch.randn(options.get("shape", (POSITIONS, BATCH, FEATURES)))
    expected = mt.run_sequential(module.mod, [x, *module.params.values()])
    run = mt.distribute_module(module, {"x": 2, "y": 2}, {"x": {"x": 1}, "b": {"y": 1}}, poison=True)
    torch.testing.assert_close(run(x), expected)


def in_torch(kind, x, weights, first, options):
    """torch's GRU or RNN; it has the gates of a GRU in another order: reset, keep, new."""
    both = options.get("direction") == "bidirectional"
    make = {"GRU": torch.nn.GRU, "RNN": torch.nn.RNN}[kind]
    more = {"nonlinearity": options.get("activations", ["Tanh"])[0].lower()} if kind == "RNN" else {}
    model = make(FEATURES, HIDDEN, bidirectional=both, **more)
    biases = weights["c"].chunk(2, 1) if "c" in weights else [torch.zeros(1 + both, weights["a"].shape[1])] * 2
    for number in range(1 + both):
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        given = dict(zip(names, (weights["a"], weights["b"], *biases), strict=True))
        for name, tensor in given.items():
            parts = tensor[number].split(HIDDEN)
            ordered = torch.cat([parts[1], parts[0], parts[2]]) if kind == "GRU" else tensor[number]
            getattr(model, f"{name}_l0{'_reverse' * number}").data = ordered
    with torch.no_grad():
        turned = x.flip(0) if options.get("direction") == "reverse" else x
        every, last = model(turned, first)
    every = every.flip(0) if options.get("direction") == "reverse" else every
    return every.unflatten(2, (1 + both, HIDDEN)).transpose(1, 2), last


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GRU", {"linear_before_reset": 1}),
        ("GRU", {"linear_before_reset": 1, "direction": "bidirectional"}),
        ("GRU", {"linear_before_reset": 1, "direction": "reverse", "opset": 11}),
        ("RNN", {}),
        ("RNN", {"direction": "bidirectional", "activations": ["Relu", "Relu"]}),
        ("RNN", {"direction": "reverse"}),
    ],
    ids=str,
)
@pytest.mark.parametrize(("bias", "has_first"), [(True, False), (False, True)])
def test_gru_and_rnn(tmp_path, kind, options, bias, has_first):
    gates, directions = {"GRU": 3, "RNN": 1}[kind] * HIDDEN, 1 + (options.get("direction") == "bidirectional")
    state = (directions, BATCH, HIDDEN) if has_first else None
    shapes = [(directions, gates, FEATURES), (directions, gates, HIDDEN), (directions, 2 * gates) if bias else None]
    path = saved(
        tmp_path / "r.onnx",
        kind,
        (POSITIONS, BATCH, FEATURES),
        [*shapes, None, state],
        2,
        hidden_size=HIDDEN,
        **options,
    )
    known = "activations" not in options  # by onnx's reference
    module, x = mt.from_onnx(path, check=known), torch.randn(POSITIONS, BATCH, FEATURES)
    expected = in_torch(kind, x, module.params, module.params.get("e"), options)
    run = mt.distribute_module(module, {"x": 2, "y": 2}, {"x": {"x": 1}, "b": {"y": 1}}, poison=True)
    torch.testing.assert_close(run(x), expected)


@pytest.mark.parametrize("has_first", [True, False])
def test_a_gru_that_resets_the_state(tmp_path, has_first):
    """torch has none; next to ONNX's formulas, written down."""
    state = (1, BATCH, HIDDEN) if has_first else None
    shapes = [(1, 3 * HIDDEN, FEATURES), (1, 3 * HIDDEN, HIDDEN), (1, 6 * HIDDEN), None, state]
    path = saved(tmp_path / "gru.onnx", "GRU", (POSITIONS, BATCH, FEATURES), shapes, 2, hidden_size=HIDDEN)
    module, x = mt.from_onnx(path), torch.randn(POSITIONS, BATCH, FEATURES)
    (wz, wr, wh), (rz, rr, rh) = (module.params[name][0].split(HIDDEN) for name in "ab")
    wbz, wbr, wbh, rbz, rbr, rbh = module.params["c"][0].split(HIDDEN)
    h = module.params["e"][0] if has_first else torch.zeros(BATCH, HIDDEN)
    every = []
    for row in x:
        z = torch.sigmoid(row @ wz.T + h @ rz.T + wbz + rbz)
        r = torch.sigmoid(row @ wr.T + h @ rr.T + wbr + rbr)
        h = (1 - z) * torch.tanh(row @ wh.T + (r * h) @ rh.T + rbh + wbh) + z * h
        every.append(h)
    run = mt.distribute_module(module, {"x": 2}, {"x": {"x": 1}}, poison=True)
    torch.testing.assert_close(run(x), (torch.stack(every)[:, None], h[None]))


def lstm_by_hand(x, lengths, params, peepholes, couples, first, reverse):
    """ONNX's formulas of one direction, sequence by sequence; gates are relu6-like, states softsign."""
    w, r, bias = (params[name][0] for name in "abc")
    gate, squash = torch.nn.functional.hardsigmoid, torch.nn.functional.softsign
    every, ends = torch.zeros(POSITIONS, 1, BATCH, HIDDEN), []
    for row in range(BATCH):
        h, c = (state[0, row] for state in first)
        for position in sorted(range(lengths[row]), reverse=reverse):
            i, o, f, n = (w @ x[position, row] + r @ h + bias[: 4 * HIDDEN] + bias[4 * HIDDEN :]).split(HIDDEN)
            i = gate((i + peepholes[0] * c) * 1.2)
            f = 1 - i if couples else gate((f + peepholes[2] * c) * 1.2)
            c = f * c + i * torch.tanh(n)
            h = gate((o + peepholes[1] * c) * 1.2) * squash(c)
            every[position, 0, row] = h
        ends.append((h, c))
    return every, *(torch.stack(of)[None] for of in zip(*ends, strict=True))


@pytest.mark.parametrize(("couples", "direction"), [(0, "forward"), (1, "reverse")])
def test_an_lstm_with_lengths_peepholes_and_other_activations(tmp_path, couples, direction):
    """torch's hardsigmoid has a slope of 1/6, ONNX's of 0.2."""
    gates, state = 4 * HIDDEN, (1, BATCH, HIDDEN)
    weights = [(1, gates, FEATURES), (1, gates, HIDDEN), (1, 2 * gates), None, state, state, (1, 3 * HIDDEN)]
    options = {"hidden_size": HIDDEN, "input_forget": couples, "direction": direction}
    options |= {"activations": ["HardSigmoid", "Tanh", "Softsign"]}
    path = saved(tmp_path / "lstm.onnx", "LSTM", (POSITIONS, BATCH, FEATURES), weights, 3, **options)
    model = onnx.load(path)
    model.graph.initializer.append(onnx.helper.make_tensor("lengths", onnx.TensorProto.INT32, (BATCH,), [4, 1, 3]))
    model.graph.node[0].input[4] = "lengths"
    onnx.save(model, path)
    module, x = mt.from_onnx(path, check=False), torch.randn(POSITIONS, BATCH, FEATURES)
    peepholes = module.params["g"][0].split(HIDDEN)
    first = module.params["e"], module.params["f"]
    expected = lstm_by_hand(x, [4, 1, 3], module.params, peepholes, couples, first, direction == "reverse")
    run = mt.distribute_module(module, {"x": 2, "y": 2}, {"x": {"x": 1}, "b": {"y": 1}}, poison=True)
    torch.testing.assert_close(run(x), expected)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("GRU", {"activations": ["Affine", "Tanh"]}, "activations are ['Affine', 'Tanh']"),
        ("RNN", {"activations": ["Elu"], "activation_alpha": [0.5]}, "activations are ['Elu'], with numbers"),
        ("RNN", {"activations": ["Relu", "Tanh"]}, "activations are ['Relu', 'Tanh']"),
        ("RNN", {"clip": 2.0, "layout": 1}, "it has the option 'layout'"),
    ],
)
def test_grus_and_rnns_that_are_refused(tmp_path, kind, options, said):
    gates = {"GRU": 3, "RNN": 1}[kind] * HIDDEN
    shapes = [(1, gates, FEATURES), (1, gates, HIDDEN)]
    path = saved(tmp_path / "r.onnx", kind, (POSITIONS, BATCH, FEATURES), shapes, 2, hidden_size=HIDDEN, **options)
    with pytest.raises(mt.MeshTensorError, match=f"(?s){re.escape(said)}.*'y0' \\({kind}\\)"):
        mt.from_onnx(path)


@pytest.mark.parametrize("shape", [(2, 8, 5), (2, 8, 3, 2), (2, 8, 3, "width")])
def test_group_norm(tmp_path, shape):
    path = saved(tmp_path / "norm.onnx", "GroupNormalization", shape, [(8,), (8,)], num_groups=4, epsilon=0.01)
    module = mt.from_onnx(path)
    x = torch.randn([7 if size == "width" else size for size in shape])
    expected = torch.nn.functional.group_norm(x, 4, module.params["a"], module.params["b"], 0.01)
    for mesh, layout in (({"x": 2}, {"x": 0}), ({"x": 4}, {"x": 1})):
        torch.testing.assert_close(mt.distribute_module(module, mesh, {"x": layout}, poison=True)(x), expected)


def test_celu(tmp_path):
    module = mt.from_onnx(saved(tmp_path / "celu.onnx", "Celu", (3, 4), [], alpha=0.7))
    x = torch.randn(3, 4)
    run = mt.distribute_module(module, {"x": 2}, {"x": {"x": 0}})
    torch.testing.assert_close(run(x), torch.nn.functional.celu(x, 0.7))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shape": ("time", BATCH, FEATURES)}, "the number of positions is time"),
        ({"activations": ["Relu", "Tanh"], "clip": 1.0}, "activations are ['Relu', 'Tanh']"),
        ({"clip": 1.0}, "it has the option 'clip'"),
    ],
)
def test_lstms_that_are_refused(tmp_path, options, said):
    with pytest.raises(mt.MeshTensorError, match=f"(?s){re.escape(said)}.*'y0' \\(LSTM\\)"):
        mt.from_onnx(lstm(tmp_path / "lstm.onnx", **options))


def test_a_group_norm_of_open_sizes(tmp_path):
    path = saved(tmp_path / "norm.onnx", "GroupNormalization", (2, 8, "h", "w"), [(8,), (8,)], num_groups=4)
    with pytest.raises(mt.MeshTensorError, match=r"a group norm of a tensor of shape \[2, 8, 'h', 'w'\]"):
        mt.from_onnx(path)


def test_weights_whose_directions_are_split(tmp_path):
    """The only direction is on one device: what it computes is summed before positions are taken apart."""
    weights = [(1, 3 * HIDDEN, FEATURES), (1, 3 * HIDDEN, HIDDEN), (1, 6 * HIDDEN)]
    path = saved(tmp_path / "gru.onnx", "GRU", (1, BATCH, FEATURES), weights, 2, hidden_size=HIDDEN)
    module, x = mt.from_onnx(path), torch.randn(1, BATCH, FEATURES)
    expected = mt.run_sequential(module.mod, [x, *module.params.values()])
    run = mt.distribute_module(module, {"x": 3}, {name: {"x": 0} for name in "xac"}, poison=True)
    torch.testing.assert_close(run(x), expected)
