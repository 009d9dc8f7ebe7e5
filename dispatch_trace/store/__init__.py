"""Traces on disk: `writer` puts them there in the background, `reader` gets them back without torch.

`docs/format.md` is the specification of what lies in the files.
"""
