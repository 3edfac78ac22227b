"""TVM's Disco as a runtime: workers that run a Relax module each, and do collectives over torch.distributed's gloo."""

from .session import DiscoSession, Held
