"""What one rank refuses before its call begins is heard by the others, which are in that call: they waited until the
timeout, or took its next call for this one."""

from . import refused_bodies as bodies
from .launcher import run


def test_steps_of_training():
    facts = [
        "1 tensors and none for a batch of 'input', 'target'",
        "no rate at step 1",
        "'bias' is missing",
        "a tensor inside of torch.func.vmap",
    ]
    for rank, texts in enumerate(run(bodies.steps, 2)):
        for text, fact in zip(texts, facts, strict=True):
            assert fact in text
            assert _names_rank_1(text) == (rank == 0)


def test_states_and_turns():
    for rank, (reset, taken, first, later) in enumerate(run(bodies.states, 2)):
        assert f"rank {1 - rank} waited in vain somewhere else" in reset
        for text in (taken, first, later):
            assert "while another thread's is under way" in text
            assert _names_rank_1(text) == (rank == 0)


def test_backwards():
    for rank, texts in enumerate(run(bodies.backwards, 2)):
        for text in texts:
            assert "gradients of gradients (create_graph=True)" in text
            assert _names_rank_1(text) == (rank == 0)


def _names_rank_1(text):
    """Where ranks agree on what to run, they hear of a refusal there; else the one that waits finds out."""
    return "rank 1 refused the call: " in text or "rank 1 raised " in text
