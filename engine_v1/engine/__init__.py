"""One engine: requests in, steps, outputs out."""
