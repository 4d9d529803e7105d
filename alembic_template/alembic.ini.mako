[alembic]
# Where the metadata of your models is, as module:attribute: your declarative base, or a MetaData. Importing the module
# must define every model. Several are separated by commas or lines; one that refers to another's tables comes after it.
metadata =

# The database to migrate, unless the environment variable DATABASE_URL names one. A percent sign is doubled here.
sqlalchemy.url =

# The driver of a URL that names none. By psycopg_async or asyncpg, here or in the URL, migrations go over asyncio.
driver = psycopg

# How long a migration waits for a lock, and every later query on that table behind it, before it is rolled back; it can
# then be repeated. Written as in PostgreSQL; 0 waits for ever.
lock_timeout = 5s

# Whether autogenerate writes two migrations for tables that are full of rows and in use, as with  alembic -x online
# revision --autogenerate: one that locks them for moments only, and one that validates and builds indexes without.
online = false

script_location = ${script_location}
prepend_sys_path = .
path_separator = os
file_template = %%(year)d_%%(month).2d_%%(day).2d_%%(rev)s_%%(slug)s

[loggers]
keys = root,sqlalchemy,alembic

[handlers]
keys = console

[formatters]
keys = generic

[logger_root]
level = WARNING
handlers = console
qualname =

[logger_sqlalchemy]
level = WARNING
handlers =
qualname = sqlalchemy.engine

[logger_alembic]
level = INFO
handlers =
qualname = alembic

[handler_console]
class = StreamHandler
args = (sys.stderr,)
level = NOTSET
formatter = generic

[formatter_generic]
format = %(levelname)-5.5s [%(name)s] %(message)s
datefmt = %H:%M:%S
