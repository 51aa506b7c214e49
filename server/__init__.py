"""The server: HTTP on top, the engine below, and the worker thread between them."""
