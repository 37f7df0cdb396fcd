"""Applies the patch set to the engine: process start, loader, and the register of changes."""
