"""What is kept for a backward pass: as few bytes as any choice keeps."""

import itertools
import random

import pytest
from tvm import relax

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.plan.reader import read_graph
from mesh_tensor.plan.recompute import bytes_kept, least_kept


def _graph(rng):
    """A function of some sums, slices and concatenations, of values of different sizes."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{n}", relax.TensorStructInfo((rng.choice((2, 4, 8)),), "float32")) for n in range(2)]
    with builder.function("main", params):
        with builder.dataflow():
            known = list(params)
            for _ in range(6):
                first, second = rng.choice(known), rng.choice(known)
                size, other = int(first.struct_info.shape[0]), int(second.struct_info.shape[0])
                made = relax.op.add(first, second) if size == other else relax.op.concat([first, second], 0)
                if size > 2 and rng.random() < 0.4:
                    made = relax.op.strided_slice(first, [0], [0], [size // 2])
                known.append(builder.emit(made))
            result = builder.emit_output(known[-1])
        builder.emit_func_output(result)
    return read_graph(builder.get(), "main", Mesh({"none": 1}), {})


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_keeps_less(seed):
    rng = random.Random(seed)
    graph = _graph(rng)
    values = [value for node in graph.nodes for value in node.outputs]
    taken = rng.sample(values, min(3, len(values)))
    may = [value for value in values if rng.random() < 0.7]
    ways = [set(way) for count in range(len(may) + 1) for way in itertools.combinations(may, count)]
    kept = [bytes_kept(graph, taken, way) for way in ways]
    assert bytes_kept(graph, taken, least_kept(graph, taken, may, None)) == min(kept)
    for limit in sorted(set(kept)):
        found = least_kept(graph, taken, may, limit)
        assert found <= set(may)
        assert bytes_kept(graph, taken, found) <= limit
    assert least_kept(graph, taken, may, max(kept)) == set()
