"""Networks, and how a model's name becomes weights in memory."""
