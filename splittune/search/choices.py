"""The numbers that guide the search and that no formula gives, where several of its rules share one.

What it does to halve or double one: `python -m benchmarks.search.screening`. What one rule alone needs stands beside
it; grids, such as the ratios of speed that are tried, bound how long a proposal takes.
"""

# What differs by no more than this part is as much: peaks and busy times of devices that are alike, what a sample takes
# on two of them. What varies by less tells nothing. Larger, and unlike devices are taken for one; smaller, and each
# is learned alone, from fewer trials.
TOLERANCE = 0.02
# Relative noise of a clock that repeats exactly, as modelled ones do: a fit must weigh its errors by something. Well
# below any gain that is searched for.
LEAST_NOISE = 0.001
# What is off by so many of its own deviations is no noise, and a model that is, is not believed. The usual three.
SIGNIFICANT = 3.0
# The optimism: faster than predicted by so many standard deviations; and what lacks less is as fast. The usual 95 % of
# one side: slower does not matter. Larger: more trials before the search ends.
CONFIDENCE = 1.65
# What likely fits, by the memory model's chances, where running out of memory may teach something. Larger: smaller
# strides, and fewer of them run out of memory.
LIKELY = 0.8
# A formula with one thing more in it, such as a knee, is believed if it leaves less than this part of the squared
# errors. Nearer to 1, noise bends lines; nearer to 0, what is real is missed.
BELIEVED = 0.5
# What a hypothesis lacks in log prior for each number more that it has, such as the two of tiles: with one more it must
# make the trials e times as likely to count as much.
PENALTY = 1.0
# Sizes tell of one another up to this difference of their logarithms: 1.4 times as large. Larger, and what was measured
# is carried further.
LENGTHSCALE = 0.35
# A device with so many times another's samples takes longer, whichever they are. Most cards that are used together
# differ by less.
MOST_UNLIKE = 3
# The first trial may have been cold, and took longer than it would now: it is measured once more if it lacks at most
# this part of the speed of the fastest, and before that its time may be off by half of it; and what it alone took
# longer, up to this part, was no wait for the host. A choice. Larger: more searches measure one more split.
MOST_COLD = 0.2
