"""Drafting: who proposes tokens, by which rule, and how well it went."""
