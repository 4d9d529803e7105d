"""The database: that of ``DATABASE_URL``, or else an embedded PostgreSQL that all processes of the example share."""

import os
import tempfile
from pathlib import Path

from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from outbox.models import Base, Delivery, Notification
from sqla_durable import Runs, embedded

FOLDER = Path(tempfile.gettempdir()) / "outbox-postgres"

engine = create_engine(os.environ.get("DATABASE_URL") or embedded.start(FOLDER).url)
new_session = sessionmaker(engine)
notifications = Runs(new_session, Notification, Delivery)


def create_tables() -> None:
    Base.metadata.create_all(engine)
