"""Resets database branches by way of a hosting API that takes its time, loses answers and is away now and then."""
