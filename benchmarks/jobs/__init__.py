"""The jobs of ``python -m benchmarks``: a module each, which has

``options(add)``            adds the job's own options; ``add`` is a parser's ``add_argument``
``run(options)``            does everything; or, for rows that are measured in processes:
``rows(options)``           the rows, dictionaries of what is measured
``measure(options, **row)`` the numbers of a row, in a process; or
``measure_all(options, rows)``  those of rows in sequence with the same ``shared(row)``
``facts(options)``          what the file says of all rows, and ``what``, a part of its name

Its docstring is its help.
"""
