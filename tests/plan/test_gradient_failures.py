"""What has no gradient is refused by name: never zero."""

import pytest
import torch
from torch import nn
from tvm import relax
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R
from tvm.script.parser import tir as T

import mesh_tensor as mt
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.vjp import vjp_of
from tests.refusals import refusal


def _refused(module, *args, **named):
    return refusal(mt.gradient, module, *args, **named)


@I.ir_module
class Kernel:
    """A TIR function between the weight and the loss."""

    @T.prim_func
    def double(x: T.handle, y: T.handle):
        X = T.match_buffer(x, (4,), "float32")
        Y = T.match_buffer(y, (4,), "float32")
        for i in range(4):
            with T.sblock("y"):
                v = T.axis.remap("S", [i])
                Y[v] = X[v] * T.float32(2)

    @R.function
    def main(w: R.Tensor((4,), "float32"), unused: R.Tensor((4,), "float32"), n: R.Tensor((4,), "int64")):
        cls = Kernel
        doubled = R.call_tir(cls.double, (w,), out_sinfo=R.Tensor((4,), "float32"))
        loss = R.sum(doubled)
        return loss, doubled, n


def test_an_operator_without_gradient():
    message = _refused(Kernel, ["w"])
    assert "operator R.call_tir has no gradient" in message
    assert "main.doubled" in message
    assert "R.grad.no_grad" in message


def test_a_parameter_without_influence():
    message = _refused(Kernel, ["unused"])
    assert "the result does not depend on parameter 'unused'" in message
    assert "leave it out of `wrt`" in message


def test_a_parameter_of_integers_and_one_that_is_not_there():
    assert "parameter n: int64[4] holds no floats" in _refused(Kernel, ["n"])
    message = _refused(Kernel, ["wait"])
    assert "there is no parameter 'wait'" in message
    assert "'w'" in message


@pytest.mark.parametrize(("loss", "said"), [(1, "doubled: float32[4]"), (2, "n: int64[4]")])
def test_a_loss_that_is_no_number(loss, said):
    message = _refused(Kernel, ["w"], loss=loss)
    assert f"the result to differentiate is {said}" in message
    assert "a gradient is that of one number" in message


def test_a_loss_that_is_not_there():
    assert "'main' has 3 results, and no result 3 to differentiate" in _refused(Kernel, ["w"], loss=3)
    assert "no result 'loss' to differentiate" in _refused(Kernel, ["w"], loss="loss")


class Detached(nn.Module):
    """Its weight only counts as a constant."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x):
        with torch.no_grad():
            doubled = 2 * self.w
        return (x * self.w.detach() * doubled).sum()


def test_what_counts_as_constant_has_no_influence():
    module = mt.from_torch(torch.export.export(Detached(), (torch.ones(3),)))
    assert "does not depend on parameter 'w'" in _refused(module)


def test_layouts_in_types():
    @I.ir_module
    class Typed:
        I.module_attrs({"device_num": 2})
        I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2))]})

        @R.function
        def main(x: R.DTensor((4,), "float32", "mesh[0]", "S[0]")) -> R.Tensor((), "float32"):
            loss = R.sum(x)
            return loss

    message = _refused(Typed)
    assert "'main.x'" in message
    assert "R.DTensor" in message
    assert "annotate_module" in message


def test_no_module():
    assert "gradient takes an IRModule, not Linear" in _refused(nn.Linear(2, 2))


def _text(of, operands='[[[2],"float32"]]', wrt="[0]"):
    return f'{{"of":{of},"operands":{operands},"wrt":{wrt},"given":[0],"seeds":[0]}}'


TANH = '{"op":"tanh","args":[{"operand":0}]}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no JSON"),
        ("[]", "is no text of mesh.vjp"),
        (_text('{"op":"print","args":[]}'), "there is no operator 'print' with a rule"),
        (_text(TANH, operands='[[[3],"float32"]]'), "they don't fit each other"),
        (_text(TANH, wrt="[7]"), "names operands or results that there are not"),
        (_text(TANH.replace("0", "9")), "is no call of an operator"),
        (_text(TANH.replace("]}", '],"attrs":["ir.Bad",{}]}')), "'ir.Bad' are no attributes"),
    ],
    ids=["nothing", "no dict", "an operator without rule", "other operands", "no operand", "no input", "no attributes"],
)
def test_a_text_that_nobody_wrote(text, said):
    """As it may stand in a file."""
    x = relax.Var("x", relax.TensorStructInfo((2,), "float32"))
    call = relax.op.call_pure_packed("mesh.vjp", x, x, relax.StringImm(text), sinfo_args=[x.struct_info])
    with pytest.raises(mt.MeshTensorError) as error:
        vjp_of(op_call(relax.BlockBuilder().normalize(call)))
    assert said in str(error.value)
