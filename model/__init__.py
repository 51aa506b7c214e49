"""The network and all that touches tensors: it knows nothing of HTTP or sessions."""
