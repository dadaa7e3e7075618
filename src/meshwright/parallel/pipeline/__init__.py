"""Runs any pipeline schedule with one executor."""
