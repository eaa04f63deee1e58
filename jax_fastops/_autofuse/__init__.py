"""Patterns in traced programs that our ops replace.

``graph`` flattens a program, ``match`` finds patterns in it, ``patterns`` lists them, ``rewrite``
evaluates the program with ops in their place, ``api`` is what users call.
"""
