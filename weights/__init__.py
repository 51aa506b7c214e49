"""The weights that come with onerow, one folder per model, read through `importlib.resources`."""
