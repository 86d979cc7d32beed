"""Problems that judge the search, written from what cards, models and torch's allocator do.

Nothing here imports the search, nor the problems it was developed on. Each module with a `draw` is
a generator of its own form; `makespan` finds the best split of any of them exactly.
"""
