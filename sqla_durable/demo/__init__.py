"""``sqla-durable demo``: a plan carried out by processes that are killed again and again.

:mod:`~sqla_durable.demo.models` and :mod:`~sqla_durable.demo.carry_out` are the program that a user would write. All
the rest kills its processes, shows what happens, and checks at the end that every effect in the database is there
exactly once, and every external one at least once.
"""
