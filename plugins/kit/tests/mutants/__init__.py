"""Bugs that systems before this one have shipped, planted again, to see that the kit finds them.

`bugs` is the table, `loops` holds those that are of the loop and not of an algorithm, `planting` makes plugins of them.
``python -m mutants`` runs the whole kit on every one.
"""
