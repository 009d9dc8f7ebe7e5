"""Capture paths: what a running program computed, turned into raw records for the writer."""
