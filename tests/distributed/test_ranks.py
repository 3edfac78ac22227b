from . import bodies
from .launcher import run


def test_k_split_matmul():
    run(bodies.k_split_matmul, 2)
