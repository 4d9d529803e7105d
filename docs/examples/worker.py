# worker.py
import logging

from carry_out_plan import carry_out, plans

from sqla_durable import Worker

worker = Worker(plans.handled_by(carry_out), concurrency=10)

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    worker.run()
