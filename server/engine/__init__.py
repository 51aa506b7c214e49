"""Requests, sequences, sessions and the steps that serve them. Nothing here imports torch."""
