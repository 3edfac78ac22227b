"""Mistakes that people make where they annotate a kernel: what they are told is in the words of that call."""

import inspect
import logging

import pytest
import tilelang.language as T
from tilelang.language.eager.builder import Builder
from tvm import tirx

import mesh_tensor as mt

MESH = mt.Mesh({"x": 2, "y": 3})
FIX = "fix: write {\"A\": {\"x\": 0}}: per buffer, the dim that each axis splits (axes: 'x', 'y'; dims of 'A': 0..1)"
LIST = '{"A": [mt.Shard(0), mt.Replicate()]}'


@T.prim_func
def scale(A: T.Tensor((64, 32), "float32"), B: T.Tensor((64,), "float32"), n: T.int32):
    with T.Kernel(64) as bx:
        B[bx] = A[bx, 0] * T.cast(n, "float32")


def factory(M, N=32):
    @T.prim_func
    def copy_rows(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
        with T.Kernel(M) as bx:
            for j in T.Parallel(N):
                B[bx, j] = A[bx, j]

    return copy_rows


def refusal(call, *args, **kwargs):
    with pytest.raises(mt.MeshTensorError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert max(map(len, message.splitlines())) < 500
    return message


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"z": 0}, "unknown mesh axis 'z' (the mesh has 'x', 'y')"),
        ({"X": 0}, "unknown mesh axis 'X' (the mesh has 'x', 'y'); did you mean 'x'?"),
        ({"x": 2}, "axis 'x' splits dim 2, but there are 2 dims"),
        ({0: "x"}, "{0: 'x'}: axis and dim are the other way round; write {'x': 0}"),
        ({0: ("x", "y")}, "axis and dim are the other way round; write {'x': 0, 'y': 0}"),
        ({"x": "0"}, "axis 'x' is given dim '0'; an axis splits one dim, which is an int, or None"),
        ({"x": True}, "axis 'x' is given dim True; an axis splits one dim"),
        ({"x": (0, 1)}, "axis 'x' is given dim (0, 1); an axis splits one dim"),
        ("S[0]", "can't read the sharding 'S[0]': the mesh has 2 axes ('x', 'y'), but placements: 1"),
        ("x=0", "can't read the sharding 'x=0': 'x=0' is none of S[dim], R, P[op]"),
        ([mt.Shard(0)], "the sharding [Shard(dim=0)] has 1 placements, but the mesh has 2 axes ('x', 'y')"),
        (["x", None], "['x', None] has 'x', but a list has one placement per mesh axis; an axis per dim is written"),
        (mt.Sharding.make({"x": 2}, 2), 'the sharding \'R\' is for Mesh({"x": 2}), not Mesh({"x": 2, "y": 3})'),
        (mt.Sharding.make(MESH, 3), "the sharding 'R, R' is for 3 dims, but the buffer has 2"),
        ({"partial": {"y": "mean"}}, "axis 'y' is partial with unknown op 'mean' (known: 'sum', 'max'"),
        ({"partial": "sum"}, "`partial` is 'sum', which is not a dict from axis names"),
        ({"sharding": {"x": 0}, "replicate": ("x",)}, "axis 'x' splits dim 0, but also is replicated"),
        ({"sharding": {"x": 0}, "partials": {"y": "sum"}}, "unknown key 'partials'"),
        ({"shard": {"x": 0}}, "unknown key 'shard' (known: 'block_shape', 'program_id', 'sharding'"),
        ({"sharding": {"x": 0}, "block_shape": (16,)}, "`block_shape` (16,) has 1 sizes, but the buffer has 2 dims"),
        (5, "`sharding` is 5, which is not a dict from axis names"),
    ],
    ids=repr,
)
def test_how_a_buffer_lies(stated, told):
    message = refusal(mt.annotate, scale, MESH, {"A": stated})
    assert "buffer 'A': " in message
    assert told in message
    assert 'where: kernel \'scale\' on Mesh({"x": 2, "y": 3})' in message
    assert FIX in message
    assert LIST in message
    assert "program_id" not in message.replace("'program_id', ", "")


@pytest.mark.parametrize(
    ("typo", "wanted"),
    [("partials", "partial"), ("replicat", "replicate"), ("shard", "sharding"), ("Sharding", "sharding")],
)
def test_a_metadata_key_that_nobody_reads(typo, wanted):
    """Through every door; what only begins with an underscore is the author's own."""
    told = f"unknown key {typo!r} (known: 'block_shape', 'program_id', 'sharding', 'replicate', 'partial')"
    info = mt.init_mesh_tensor_info({"x": 0})
    buffer = tirx.decl_buffer((64, 32), name="A")
    helpers = mt.mesh_tensor_functions(MESH)["annotate_mesh_tensor_info"]
    for call, args in (
        (mt.annotate, (scale, MESH, {"A": {**info, typo: {}}})),
        (helpers, ({buffer: {**info, typo: {}}},)),
    ):
        assert f"{told}; did you mean {wanted!r}?" in refusal(call, *args)
    assert "did you mean" not in refusal(helpers, {buffer: {**info, "colour": 1}})
    helpers({buffer: {**info, "_colour": 1}})


@pytest.mark.parametrize("missing", ["block_shape", "program_id", "sharding"])
def test_what_the_helper_requires_stays_required(missing):
    info = mt.init_mesh_tensor_info({"x": 0})
    del info[missing]
    helper = mt.mesh_tensor_functions(MESH)["annotate_mesh_tensor_info"]
    message = refusal(helper, {tirx.decl_buffer((64, 32), name="A"): info})
    assert f"buffer 'A': missing `{missing}`" in message
    assert "init_mesh_tensor_info(sharding=...) fills in what isn't given" in message


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a", "buffer 'a' is no parameter of the kernel (parameters: 'A', 'B'); did you mean 'A'?"),
        ("weight", "buffer 'weight' is no parameter of the kernel (parameters: 'A', 'B')\n"),
        ("n", "parameter 'n' is a number, and every device has it (parameters: 'A', 'B')"),
        (scale.buffer_map[scale.params[0]], "a buffer ('A') where a parameter's name is expected; give its name, 'A'"),
    ],
    ids=["case", "other", "scalar", "buffer"],
)
def test_which_buffer(name, told):
    message = refusal(mt.annotate, scale, MESH, {name: {"x": 0}})
    assert told in message
    assert FIX in message


@pytest.mark.parametrize("shardings", ["S[0], R", [{"x": 0}], None, 3])
def test_shardings_that_are_no_dict(shardings):
    message = refusal(mt.annotate, scale, MESH, shardings)
    assert f"the shardings are {shardings!r}, which is not a dict from buffer names" in message
    assert FIX in message


@pytest.mark.parametrize("mesh", [4, None, "x", {"x": 0}, {}, {"x": "2"}])
def test_a_mesh_that_is_none(mesh):
    message = refusal(mt.annotate, scale, mesh, {"A": {"x": 0}})
    assert "mesh" in message or "axis 'x' has size" in message
    assert 'fix: write it as {"x": 2, "y": 2}: axis names with the number of devices along each' in message


@pytest.mark.parametrize("mesh", [MESH, {"x": 2, "y": 3}], ids=["Mesh", "dict"])
def test_mesh_and_shardings_the_other_way_round(mesh):
    message = refusal(mt.annotate, scale, {"A": {"x": 0}}, mesh)
    assert "the mesh is {'A': {'x': 0}} and the shardings are " in message
    assert "they are the other way round" in message
    assert 'fix: write annotate(kernel, {"x": 2}, {"A": {"x": 0}})' in message


@pytest.mark.parametrize("call", [lambda f: mt.annotate(f, MESH, {}), mt.compile, mt.lower, mt.sharding_rule])
def test_a_factory_instead_of_a_kernel(call):
    message = refusal(call, factory)
    assert "'factory' is no kernel (PrimFunc), but a function that makes one" in message
    assert "fix: call it with sizes, and pass what it returns: factory(M=..., N=...)" in message


def test_what_is_no_kernel():
    assert "a list is no kernel (PrimFunc)" in refusal(mt.annotate, [scale] * 99, MESH, {})
    kernel = mt.compile(mt.annotate(factory(4), {"x": 2}, {"A": {"x": 0}}), target="interpret")
    assert "a MeshKernel is no kernel (PrimFunc)" in refusal(mt.compile, kernel)
    module = mt.lower(mt.annotate(factory(4), {"x": 2}, {"A": {"x": 0}}))
    message = refusal(mt.annotate, module, MESH, {})
    assert "a IRModule is no kernel (PrimFunc)" in message
    assert "give one of its functions" in message


class Heard(logging.Handler):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture
def heard(monkeypatch):
    """What loggers are told, and that of TileLang's builder whatever ran before in this process told it to be."""
    handler, root, builder = Heard(), logging.root, logging.getLogger(Builder.__module__)
    monkeypatch.setattr(builder, "disabled", False)
    monkeypatch.setattr(builder, "handlers", [handler])
    monkeypatch.setattr(root.manager, "disable", 0)
    levels = {logger: logger.level for logger in (root, builder)}
    root.addHandler(handler)
    for logger in levels:
        logger.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    for logger, level in levels.items():
        logger.setLevel(level)


class TestInsideOfAKernel:
    """TileLang logs the whole source of a function that raises while it is traced."""

    @staticmethod
    def build():
        fns = mt.mesh_tensor_functions(MESH)

        @T.prim_func
        def kernel(A: T.Tensor((64, 32), "float32")):
            fns["annotate_mesh_tensor_info"]({A: {"block_shape": (16, 8), "program_id": 0}})
            with T.Kernel(1):
                A[0, 0] = 0.0

    def test_ours_comes_alone(self, heard):
        message = refusal(self.build)
        assert "buffer 'A': missing `sharding`" in message
        line = inspect.getsourcelines(TestInsideOfAKernel.build)[1] + 6
        assert message.endswith(f"\n  line: {__file__}:{line}")
        assert heard.records == []

    def test_what_others_raise_is_logged_as_before(self, heard):
        def build():
            @T.prim_func
            def broken(A: T.Tensor((64, 32), "float32")):
                with T.Kernel(1):
                    A[0, 0] = missing_name  # noqa: F821

        with pytest.raises(NameError):
            build()
        assert any("Failed to build prim_func from broken" in record.getMessage() for record in heard.records)
