"""The database: that of ``DATABASE_URL``, or else an embedded PostgreSQL that all processes of the example share."""

import os
import tempfile
from pathlib import Path

from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import sessionmaker

from outbox.models import Base, Delivery, Notification
from sqla_durable import Runs, embedded

FOLDER = Path(tempfile.gettempdir()) / "outbox-postgres"
ONE_AT_A_TIME = 4711  # several processes may begin at once

engine = create_engine(os.environ.get("DATABASE_URL") or embedded.start(FOLDER).url)
new_session = sessionmaker(engine)
notifications = Runs(new_session, Notification, Delivery)


def create_tables() -> None:
    with engine.begin() as connection:
        connection.execute(select(func.pg_advisory_xact_lock(ONE_AT_A_TIME)))
        Base.metadata.create_all(connection)
