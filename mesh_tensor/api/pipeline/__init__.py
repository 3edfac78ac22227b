"""A model on several meshes, microbatch by microbatch."""

from .make import pipeline
from .model import Pipeline
