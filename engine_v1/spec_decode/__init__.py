"""Drafting: who proposes tokens and by which rule, how much of a draft is verified, and how well it went."""
