"""Shares for cards that wait for one another only once a step: cards of a kind are one unknown, however many they are.

curve.py        what is known of one kind: its time for any share, and the largest share that fits
balance.py      shares that sum to the micro-batch, the slowest card as fast as can be
study.py        the accumulation steps and shares that are fastest, each measured; the even split beside them
"""
