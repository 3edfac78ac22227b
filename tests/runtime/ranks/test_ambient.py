"""What torch was told elsewhere never changes a result of ranks; gradients that nobody would compute are refused."""

from . import ambient_bodies as bodies
from .launcher import run


def test_states():
    run(bodies.states, 2)


def test_gradients():
    run(bodies.gradients, 2)
