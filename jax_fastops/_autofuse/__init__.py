"""Patterns in traced programs that our ops replace.

``graph`` flattens a program. ``meaning`` tells what its equations compute. ``patterns`` lists the
patterns, ``formulas`` compiles them, and ``match`` compares a formula with the values of a program.
``linear``, ``masks``, ``moves`` and ``drops`` recognize what is no formula. ``finding`` searches a
program for all of these, ``rewrite`` evaluates it with ops in their place, and ``api`` is what
users call. A module imports only modules to the left of it: graph, meaning, formulas, match, moves,
linear, masks, drops, patterns, finding, rewrite, api.
"""
