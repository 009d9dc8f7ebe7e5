"""Two traces become pairs: which record of the target belongs to which of the reference, and how far apart they are.

Reads traces through `store.reader` only, without torch where NumPy has the dtype. What a difference
means is for `judge` to say.
"""
