"""Notifications that are promised in the transaction of an order, and sent by a worker."""
