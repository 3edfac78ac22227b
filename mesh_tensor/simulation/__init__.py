"""What a Program takes on a Machine: time, memory, and why."""

from .pipelines import PipelineSimulation
from .simulate import Simulation, simulate
