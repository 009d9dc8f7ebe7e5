"""Two traces become pairs: which record belongs to which, and how far apart their values are.

Reads traces through `store.reader` only, without torch where NumPy has the dtype. What a difference
means is for `judge` to say.
"""
