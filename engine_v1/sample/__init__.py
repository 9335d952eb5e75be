"""From logits to tokens: coupled random numbers, sampling and log probabilities."""
