"""Runs the model for one step on one device."""
