# functions_quickstart.py
import os

from quickstart import Base, write_entry
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from sqla_durable import FunctionMixin, FunctionRun, Functions, ReceiptMixin


class DurableRun(FunctionMixin, Base):  # two tables for all functions
    __tablename__ = "quickstart_run"


class DurableStep(ReceiptMixin[DurableRun], Base):
    __tablename__ = "quickstart_step"


engine = create_engine(os.environ["DATABASE_URL"])
Base.metadata.create_all(engine)
new_session = sessionmaker(engine)
functions = Functions(new_session, DurableRun, DurableStep)


@functions.function("write-entries")
def write_entries(run: FunctionRun, lines: list[str]) -> list[int]:
    return [run.step(position, write_entry, line) for position, line in enumerate(lines)]


with new_session.begin() as session:  # the run exists if, and only if, this commits
    handle = functions.start(session, write_entries, ["fourth", "fifth"], key="two more")

functions.execute(handle)  # or whichever process is free, for this and all others: Worker(functions).run()
print(functions.result(handle))
