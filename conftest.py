"""Clusters and models for the end-to-end tests, which lie in several folders and share them."""

pytest_plugins = ["e2e_fixtures"]
