"""The load tester: what the cache is worth, measured through HTTP as a client sees it."""
