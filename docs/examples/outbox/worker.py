"""The process that sends: ``sqla-durable worker outbox.worker:worker``."""

from outbox.database import create_tables, notifications
from outbox.deliver import deliver
from sqla_durable import Worker


def worker() -> Worker:
    create_tables()
    return Worker(notifications.handled_by(deliver))
