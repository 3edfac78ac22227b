"""Kernels with their backward kernels, in float64: gradients as numerical differences say, however buffers lie."""

import pytest
import torch

import mesh_tensor as mt
from kernels.cross_entropy import cross_entropy, cross_entropy_backward
from kernels.embedding import embedding, embedding_backward
from kernels.flash_attention import flash_attention_reference
from kernels.flash_attention_training import attention_backward, attention_with_lse
from kernels.layer_norm import layer_norm, layer_norm_backward
from kernels.matmul import matmul, matmul_backward
from kernels.mlp import mlp_gelu, mlp_gelu_backward
from kernels.rms_norm import rms_norm, rms_norm_backward
from kernels.rope import rope, rope_backward, rope_tables
from kernels.softmax import softmax, softmax_backward

WIDE = {"dtype": "float64", "accum_dtype": "float64"}


def drawn(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def angles(seq, dim):
    return [table.double() for table in rope_tables(seq, dim)]


# Per kernel: it, its backward kernels, its arguments, and some layouts of its buffers over an axis of 3 devices.
CASES = {
    "matmul": (
        matmul(5, 6, 7, 4, 4, 4, **WIDE),
        matmul_backward(5, 6, 7, 4, 4, 4, **WIDE),
        lambda: (drawn(5, 7), drawn(7, 6)),
        [{"A": {"x": 0}, "C": {"x": 0}}, {"B": {"x": 1}, "C": {"x": 1}}, {"A": {"x": 1}, "B": {"x": 0}}],
    ),
    "gelu": (
        mlp_gelu(5, 6, 4, 4, **WIDE),
        mlp_gelu_backward(5, 6, 4, 4, **WIDE),
        lambda: (drawn(5, 6),),
        [{"g": {"x": 0}, "h": {"x": 0}}, {"g": {"x": 1}, "h": {"x": 1}}],
    ),
    "softmax": (
        softmax(5, 6, 2, **WIDE),
        softmax_backward(5, 6, 2, **WIDE),
        lambda: (drawn(5, 6),),
        [{"X": {"x": 0}, "Y": {"x": 0}}, {"X": {"x": 1}, "Y": {"x": 1}}],
    ),
    "rms_norm": (
        rms_norm(5, 6, 1e-6, 2, **WIDE),
        rms_norm_backward(5, 6, 1e-6, 2, **WIDE),
        lambda: (drawn(5, 6), drawn(6)),
        [{"X": {"x": 0}, "Y": {"x": 0}}, {"X": {"x": 1}, "weight": {"x": 0}, "Y": {"x": 1}}],
    ),
    "layer_norm": (
        layer_norm(5, 6, 1e-5, 2, **WIDE),
        layer_norm_backward(5, 6, 1e-5, 2, **WIDE),
        lambda: (drawn(5, 6), drawn(6), drawn(6)),
        [{"X": {"x": 0}, "Y": {"x": 0}}, {"X": {"x": 1}, "weight": {"x": 0}, "bias": {"x": 0}, "Y": {"x": 1}}],
    ),
    "embedding": (
        embedding(5, 4, 6, 2, 4, dtype="float64"),
        embedding_backward(5, 4, 6, 2, 4, dtype="float64"),
        lambda: (torch.tensor([3, 0, 3, 1, 0], dtype=torch.int32), drawn(4, 6)),
        [{"ids": {"x": 0}, "out": {"x": 0}}, {"table": {"x": 1}, "out": {"x": 1}}],
    ),
    "rope": (
        rope(5, 3, 4, block_S=2, **WIDE),
        rope_backward(5, 3, 4, block_S=2, **WIDE),
        lambda: (drawn(5, 3, 4), *angles(5, 4)),
        [{"x": {"x": 0}, "cos": {"x": 0}, "sin": {"x": 0}, "out": {"x": 0}}, {"x": {"x": 1}, "out": {"x": 1}}],
    ),
    "cross_entropy": (
        cross_entropy(5, 6, 2, **WIDE),
        cross_entropy_backward(5, 6, 2, **WIDE),
        lambda: (drawn(5, 6), torch.tensor([5, 0, 2, 2, 1], dtype=torch.int32)),
        [{"logits": {"x": 0}, "labels": {"x": 0}, "loss": {"x": 0}}, {"logits": {"x": 1}}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    func, backward, arguments, layouts = CASES[name]
    tensors = [str(buffer.name) for buffer in func.buffer_map.values()]
    torch.manual_seed(0)
    for layout in ({}, *layouts):
        annotated = mt.annotate(func, {"x": 3}, {tensor: layout.get(tensor, {}) for tensor in tensors})
        kernel = mt.compile(annotated, target="interpret", poison=True, backward=backward)
        assert torch.autograd.gradcheck(kernel, arguments()), layout


QUERIES, KEYS = ("Q", "Out", "Lse"), ("K", "V")


@pytest.mark.parametrize(
    ("names", "dim"),
    [((), 0), (QUERIES + KEYS, 0), (QUERIES + KEYS, 1), (QUERIES, 2), (KEYS, 2)],
    ids=["whole", "batch", "heads", "queries", "keys"],
)
@pytest.mark.parametrize(("causal", "groups"), [(False, 1), (True, 2)])
def test_gradients_of_attention(causal, groups, names, dim):
    sizes, options = (2, 4, 5, 7, 3), {"causal": causal, "groups": groups, "block_M": 2, "block_N": 4, **WIDE}
    layouts = {name: {"x": dim} if name in names else {} for name in QUERIES + KEYS}
    func = mt.annotate(attention_with_lse(*sizes, **options), {"x": 2}, layouts)
    kernel = mt.compile(func, target="interpret", poison=True, backward=attention_backward(*sizes, **options))
    torch.manual_seed(0)
    q, k, v = drawn(2, 4, 5, 3), drawn(2, 4 // groups, 7, 3), drawn(2, 4 // groups, 7, 3)
    weights = torch.randn(2, 4, 5, 3, dtype=torch.float64)
    (kernel(q, k, v)[0] * weights).sum().backward()
    found = [tensor.grad for tensor in (q, k, v)]
    wanted = torch.autograd.grad((flash_attention_reference(q, k, v, causal) * weights).sum(), (q, k, v))
    torch.testing.assert_close(found, list(wanted))
