"""A config's unequal shares inside the tools that train, and tuning from there: one file a tool.

Nothing is imported here: each file needs its tool, ``pip install 'splittune[lightning]'`` say.
"""
