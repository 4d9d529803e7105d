# worker.py
import logging
import signal
import time

from carry_out_plan import carry_out, plans

from sqla_durable import Ending, Outcome, RetryableError

PAUSE = 1.0  # seconds until the next look, where nothing was due

log = logging.getLogger("worker")


class Worker:
    def __init__(self) -> None:
        self.stopping = False

    def stop(self, *_: object) -> None:
        """Stop after the run that is under way. This is called by a signal, so it does nothing else."""
        self.stopping = True

    def work(self) -> None:
        while not self.stopping:
            try:
                busy = self.carry_out_one()
            except RetryableError as error:  # the database is away: it will be back
                log.warning("no claim: %s", error)
                busy = False
            if not busy:
                time.sleep(PAUSE)

    def carry_out_one(self) -> bool:
        """Claim what has been due for longest, and carry it out; say whether there was anything."""
        for run in plans.claim_due(limit=1):
            report(run.row.id, plans.execute(run, carry_out))
            return True
        return False


def report(plan_id: int, outcome: Outcome) -> None:
    match outcome.ending:
        case Ending.LANDED if outcome.failure is None:
            log.info("plan %s: %s", plan_id, outcome.status)
        case Ending.LANDED:
            log.error("plan %s: %s", plan_id, outcome.status, exc_info=outcome.exception)
        case ending:  # it goes on later, here or elsewhere
            log.warning("plan %s: %s, %s", plan_id, ending, outcome.exception)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    worker = Worker()
    signal.signal(signal.SIGTERM, worker.stop)
    signal.signal(signal.SIGINT, worker.stop)
    worker.work()


if __name__ == "__main__":
    main()
