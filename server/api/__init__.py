"""HTTP: routes, schemas, errors, streams. It knows the engine by its messages and no tensors."""
