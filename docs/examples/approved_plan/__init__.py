"""An assistant proposes a plan of actions, a person approves it, and a request or a worker executes it."""
