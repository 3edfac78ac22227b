"""What a Program takes on a Machine: time, memory, and why."""

from .simulate import Simulation, simulate

__all__ = ["Simulation", "simulate"]
