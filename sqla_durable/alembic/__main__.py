"""``python -m sqla_durable.alembic`` prints the folder of the template."""

from sqla_durable.alembic.template import template_folder

print(template_folder())
