"""Numbers and whole tensors have to be the same on all ranks: where they are not, all ranks refuse."""

from . import given_bodies as bodies
from .launcher import run


def test_numbers():
    for rank, texts in enumerate(run(bodies.numbers, 2)):
        for text in texts:
            there, here = (2.0, 3.0) if rank else (3.0, 2.0)
            assert f"rank {1 - rank} was given other values for 'alpha' ({there}, here {here})" in text
            assert "pass the same numbers and whole tensors on every rank" in text
            assert "mt.resume(mesh)" in text


def test_inputs():
    for rank, texts in enumerate(run(bodies.inputs, 2)):
        for text, name in zip(texts, ("input", "scale"), strict=True):
            assert f"rank {1 - rank} was given other values for '{name}' (digest " in text
            assert "or DTensors of what each rank has of its own" in text


def test_weights():
    for texts in run(bodies.weights, 2):
        for text in texts:
            assert "4 problems:" in text
            assert "values of 'p_0_weight' differ between ranks: rank 0: digest " in text
            assert "torch.manual_seed(...) before the model is made" in text


def test_another_mesh():
    for texts in run(bodies.another_mesh, 2):
        for text, what in zip(texts, ("parameter 'input': ", "parameter 'p_0_weight': ", "a DTensor "), strict=True):
            assert f"{what}on DeviceMesh((x=2), 'cpu', stride=(1,)) of ranks [1, 0], but expected" in text
            assert "of ranks [0, 1]\n" in text
            assert "pass a DTensor of the module's DeviceMesh, or a global tensor" in text


def test_training():
    for rank, (model, batch, state, piped) in enumerate(run(bodies.training, 2)):
        assert "values of 'p_0_weight' differ between ranks" in model
        assert f"rank {1 - rank} was given other values for 'input' (digest " in batch
        assert "values of 'p_2_bias' differ between ranks" in state
        assert f"rank {1 - rank} was given other values for 'y'" in piped
