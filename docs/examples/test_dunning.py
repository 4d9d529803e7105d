# test_dunning.py
from collections.abc import Iterator

import dunning
import pytest
from dunning import Base, DurableRun, DurableStep, Invoice, collect, functions, new_session
from sqlalchemy import create_engine

from sqla_durable import Ending, FunctionHandle, FunctionStatus, embedded
from sqla_durable.testing import let_pass, overrun

INVOICE = Invoice(address="ada@example.org", cents=2500)


@pytest.fixture(scope="session", autouse=True)
def database() -> Iterator[None]:
    with embedded.start() as server:
        engine = create_engine(server.url)
        new_session.configure(bind=engine)  # the functions have this sessionmaker
        Base.metadata.create_all(engine)
        yield
        engine.dispose()


@pytest.fixture
def handle() -> FunctionHandle[int]:
    """One that has slept for its day."""
    with new_session.begin() as session:
        handle = functions.start(session, collect, INVOICE)
    assert functions.execute(handle).ending is Ending.SUSPENDED
    with new_session.begin() as session:
        let_pass(session, DurableStep, handle, "a day of grace")
    return handle


def test_who_pays_in_time_is_not_reminded(handle: FunctionHandle[int]) -> None:
    functions.execute(handle)
    assert functions.describe(handle).waits_for == "paid"
    with new_session.begin() as session:
        functions.signal(session, handle, "paid", INVOICE.cents)
    functions.execute(handle)
    assert functions.result(handle) == INVOICE.cents
    assert [receipt.step for receipt in functions.steps(handle)] == ["a day of grace", "bill", "paid"]


def test_who_does_not_is_reminded(handle: FunctionHandle[int]) -> None:
    functions.execute(handle)
    with new_session.begin() as session:
        let_pass(session, DurableStep, handle, "paid")  # two weeks
    functions.execute(handle)
    assert functions.describe(handle).last_step == "remind"


def test_a_mail_service_that_hangs_is_not_waited_for(
    handle: FunctionHandle[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*_: str) -> None:
        with new_session.begin() as session:
            overrun(session, DurableRun, handle)  # the five minutes are over while it is called

    monkeypatch.setattr(dunning, "send_mail", hang)
    assert functions.execute(handle).status is FunctionStatus.TIMED_OUT


def test_a_mail_is_sent_again_under_the_same_key(handle: FunctionHandle[int], monkeypatch: pytest.MonkeyPatch) -> None:
    class PowerCut(BaseException):
        pass

    def send_and_die(key: str, *_: str) -> None:
        keys.append(key)
        if len(keys) == 1:
            raise PowerCut  # before the receipt is written

    keys: list[str] = []
    monkeypatch.setattr(dunning, "send_mail", send_and_die)
    with pytest.raises(PowerCut):
        functions.execute(handle)
    assert functions.execute(handle).ending is Ending.SUSPENDED
    assert keys == [keys[0], keys[0]]
