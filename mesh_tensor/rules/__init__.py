"""Sharding rules, derived from TIR."""

from .sharding_rule import ShardingRule, sharding_rule

__all__ = ["ShardingRule", "sharding_rule"]
