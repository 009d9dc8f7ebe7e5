"""Planted bugs and harmless rewrites in transformers' models: the cases of `tools/mutants.py`.

cases.py   what a case is, and the two registries
models.py  the models, built from small configs with weights of a trained model's sizes
program.py bugs in the program, weights unchanged
kernels.py faulty kernels: one op of one module computes wrongly
weights.py bugs in the weights
clean.py   pairs that are equal within noise
other_models.py, anywhere.py   models that differ most, and cases that need no place of a given name
naive.py   the rules that people use instead, for comparison
"""

from . import models, other_models  # what there is, before kinds ask for it

__all__ = ["models", "other_models"]
