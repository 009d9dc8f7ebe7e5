"""Pairs become findings: what was introduced where, what only followed from it, and the verdict."""
