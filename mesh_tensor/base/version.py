"""The version, the one place where it is said."""

__version__ = "0.2.0.dev0"
