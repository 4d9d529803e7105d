"""``python -m sqla_durable.cli``: the command where no script is installed."""

from sqla_durable.cli import main

main()
