"""Models in torch: imported, they compute what torch computes; their shardings name what is there."""

from functools import cache

import pytest
import torch

import mesh_tensor as mt
from kernels.models import convnet, gpt2, llama, mlp, together

CONFIGS = {
    "mlp": (mlp, mlp.Config()),
    "gpt2": (gpt2, gpt2.Config()),
    "gpt2-fused": (gpt2, gpt2.Config(fused=True, layers=1, heads=2)),
    "llama": (llama, llama.Config()),
    "llama-one-key-head": (llama, llama.Config(key_heads=1, layers=1)),
    "convnet": (convnet, convnet.Config()),
}


@cache
def imported(name):
    """A model, and its module."""
    file, config = CONFIGS[name]
    model = file.build(config)
    return model, mt.from_torch(torch.export.export(model, file.example_inputs(config)))


@pytest.mark.parametrize("name", CONFIGS)
def test_computes_what_torch_computes(name):
    model, module = imported(name)
    file, config = CONFIGS[name]
    inputs = file.example_inputs(config)  # others than those it was exported with
    result = mt.run_sequential(module.mod, [*inputs, *module.params.values()])
    with torch.no_grad():
        torch.testing.assert_close(result, model(*inputs))


def test_inputs_have_the_names_of_the_shardings():
    names = {name: imported(name)[1].mod["main"].params[0].name_hint for name in ("mlp", "gpt2", "llama", "convnet")}
    assert names == {"mlp": "x", "gpt2": "tokens", "llama": "tokens", "convnet": "images"}


def layouts(name, shardings):
    """'name in torch' -> the text of the layout that was read back."""
    _, module = imported(name)
    mod = mt.annotate_module(module.mod, {"data": 2, "model": 2}, shardings)
    read = {key: str(a.sharding) for (_, key), a in mt.read_module_annotations(mod).annotations.items()}
    found = {key: read.pop(f"{module.names.get(key, key)}_sharded") for key in shardings}
    assert not read
    return found


def test_mlp():
    both = together(mlp.data_parallel("data"), mlp.tensor_parallel("model"))
    assert layouts("mlp", both) == {"x": "S[0], R", "weight1": "R, S[1]", "weight2": "R, S[0]"}


@pytest.mark.parametrize("name", ["gpt2", "gpt2-fused"])
def test_gpt2(name):
    config = CONFIGS[name][1]
    found = layouts(
        name,
        together(
            gpt2.data_parallel("data"),
            gpt2.tensor_parallel(config, "model", vocabulary=True),
            gpt2.sequence_parallel(config, "model"),
        ),
    )
    assert found["tokens"] == "S[0], R"
    assert found["blocks.0.attn.proj.weight"] == "R, S[1]"
    assert found["blocks.0.attn.qkv.bias" if config.fused else "blocks.0.attn.k.bias"] == "R, S[0]"
    assert found["blocks.0.fc.weight"] == found["wte.weight"] == "R, S[0]"
    assert found["blocks.0"] == found["norm"] == "R, S[1]"
    assert len(found) == 4 + config.layers * (9 if config.fused else 13)


def test_llama():
    config = CONFIGS["llama"][1]
    found = layouts("llama", together(llama.tensor_parallel(config, "model"), llama.sequence_parallel(config, "model")))
    assert found["layers.1.mlp.down_proj.weight"] == found["layers.1"] == "R, S[1]"
    assert len(found) == 1 + config.layers * 8
    found = layouts("llama", llama.fully_sharded(llama.build(config), "data"))
    assert set(found.values()) == {"S[0], R"}
    assert len(found) == 1 + len(list(llama.build(config).parameters()))


def test_convnet():
    found = layouts("convnet", together(convnet.data_parallel("data"), convnet.tensor_parallel("model")))
    assert found == {
        "images": "S[0], R",
        "conv1.weight": "R, S[0]",
        "conv2.weight": "R, S[1]",
        "fc.weight": "R, S[1]",
    }


def test_together_refuses_two_dims():
    with pytest.raises(ValueError, match=r"'x' is given different dims for \['a'\]"):
        together({"x": {"a": 0}}, {"x": {"a": 1}})
