"""Pipelines: stages of a model on several meshes, and the order in which their fragments run."""

from .check import Dependencies, Held, check_schedule, peaks
from .clock import Event, Timeline, timeline
from .orders import SCHEDULES
from .schedule import KINDS, Action, Schedule
